"""Attention of one new token per request over K and V of eight bits, loaded as operands of the tensor cores.

A warp works alone. K and V are the tall sides of its products, the heads that share them the narrow side
(tall_tiles.py). q is read in the order in which the lanes hold K; q, and later p, are split into two parts. Splits are
as in decode.py.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from twostroke.ops.cuda.kernels.decode import LOG2E, DecodeScratch, combine, share_of
from twostroke.ops.cuda.kernels.heads import FORMATS, head_scale, store_head, turned
from twostroke.ops.cuda.kernels.launch import EARLY, INTERPRETED, PDL, gdc_launch_dependents, gdc_wait
from twostroke.ops.cuda.kernels.narrow_tiles import inner_order
from twostroke.ops.cuda.kernels.rows import tanh
from twostroke.ops.cuda.kernels.sinks import add_sinks, load_sinks
from twostroke.ops.cuda.kernels.tall_tiles import (
    as_left,
    as_right,
    by_heads,
    load_blocks,
    load_keys,
    load_scales,
    load_values,
    one_sum,
    start_sum,
    times,
    token_places,
    two_columns,
)
from twostroke.ops.interface import BLOCK, Attention, Batch, KVLayer


@triton.jit
def weigh(s, best, total, v_scale, FORMAT: tl.constexpr, RUN: tl.constexpr):
    """The softmax's next step: weights (TILE, 2 R) of the tokens in the order of V's inner side, and their factor (4,),
    the same four times. total (8, R): each lane's own sum."""
    TILE: tl.constexpr = s.shape[0]
    R: tl.constexpr = s.shape[1]
    new = tl.maximum(best, tl.max(s, axis=0))
    stable = tl.where(new == float("-inf"), 0.0, new)
    p = tl.exp2(s - stable[None, :])
    shrink = tl.exp2(best - stable)
    total = total * shrink[None, :] + tl.sum(tl.reshape(p, (TILE // 8, 8, R)), axis=0)
    top = tl.maximum(tl.max(v_scale, axis=0), 1e-30)
    most: tl.constexpr = 1.0 if FORMAT == 3 else 127.0
    parts = two_columns(by_heads(p, v_scale * (most / top)[None, :]), FORMAT)
    return new, total, shrink, as_right(parts, TILE, RUN), top * (1.0 / most)


@triton.jit
def add_values(
    acc, shrink, parts, factor, words, seen, WIDE: tl.constexpr, TILE: tl.constexpr,
    MASKED: tl.constexpr, FORMAT: tl.constexpr, RUN: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    start = start_sum(WIDE, parts.shape[1], FORMAT)
    factor = tl.broadcast_to(factor[None, :], (WIDE, 4))
    codes = as_left(words, WIDE, TILE, FORMAT, RUN, FAST)
    if MASKED and FORMAT == 3:  # where nothing is `seen`, memory may hold NaN
        codes = tl.where(seen[None, :], codes, 0.0)
    return acc * shrink[None, :] + by_heads(one_sum(times(codes, parts, start, FORMAT), FORMAT), factor)


@triton.jit
def piece_of_q(
    heads, shared, which: tl.constexpr, rms, norm_ptr, cos_ptr, sin_ptr, position, HEAD: tl.constexpr,
    HALF: tl.constexpr, NORM: tl.constexpr, N: tl.constexpr, DTYPE: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """(R, N): the elements of q that are multiplied with N bytes of K."""
    dims = which * N + inner_order(N, RUN)
    q = turned(heads, shared, dims, rms, norm_ptr, cos_ptr, sin_ptr, position, HEAD, HALF, NORM)
    return q.to(DTYPE).to(tl.float32)


@triton.jit
def operand(q, unit, FORMAT: tl.constexpr):
    """(N, 2 R): a piece of q in two parts."""
    return two_columns(tl.trans(q * (1.0 / unit)[:, None]), FORMAT)


@triton.jit
def load_pieces(
    keys, scales, ids, n0, begin, end, block_stride, scale_block_stride, WIDTH: tl.constexpr, N: tl.constexpr,
    PIECES: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """K of a tile in up to four pieces of N bytes, and its scales."""
    k_0 = load_keys(keys, ids, n0, begin, end, block_stride, 0, WIDTH, N, BLOCK, TILE, MASKED)
    k_1, k_2, k_3 = k_0, k_0, k_0
    if PIECES > 1:
        k_1 = load_keys(keys, ids, n0, begin, end, block_stride, N, WIDTH, N, BLOCK, TILE, MASKED)
    if PIECES > 2:
        k_2 = load_keys(keys, ids, n0, begin, end, block_stride, 2 * N, WIDTH, N, BLOCK, TILE, MASKED)
        k_3 = load_keys(keys, ids, n0, begin, end, block_stride, 3 * N, WIDTH, N, BLOCK, TILE, MASKED)
    return k_0, k_1, k_2, k_3, load_scales(scales, ids, n0, begin, end, scale_block_stride, BLOCK, TILE, MASKED)


@triton.jit
def load_tokens(
    table, key_words, value_words, key_scales, value_scales, n0, begin, end, until, block_stride,
    scale_block_stride, HEAD: tl.constexpr, WIDE: tl.constexpr, N: tl.constexpr, PIECES: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """K and V of a tile with their scales, from blocks that the table names up to `until`."""
    k_ids, v_ids = load_blocks(table, n0, until, BLOCK, TILE)
    k_0, k_1, k_2, k_3, k_scale = load_pieces(
        key_words, key_scales, k_ids, n0, begin, end, block_stride, scale_block_stride,
        HEAD, N, PIECES, BLOCK, TILE, MASKED,
    )  # fmt: skip
    v = load_values(value_words, v_ids, n0, end, block_stride, HEAD, WIDE, BLOCK, TILE, MASKED)
    v_scale = load_scales(value_scales, k_ids, n0, begin, end, scale_block_stride, BLOCK, TILE, MASKED)
    return k_0, k_1, k_2, k_3, k_scale, v, v_scale


@triton.jit
def add_piece(
    s, words, q, N: tl.constexpr, TILE: tl.constexpr, FORMAT: tl.constexpr, RUN: tl.constexpr, FAST: tl.constexpr
):
    return times(as_left(words, TILE, N, FORMAT, RUN, FAST), q, s, FORMAT)


@triton.jit
def scores(
    q_0, q_1, q_2, q_3, q_scale, start, k_0, k_1, k_2, k_3, k_scale, n0, begin, end, softcap,
    N: tl.constexpr, PIECES: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr,
    SOFTCAP: tl.constexpr, FORMAT: tl.constexpr, RUN: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """(TILE, R) scores in the order of K's rows, times log2 e; q_scale (R,) holds all factors but the tokens' own."""
    COLUMNS: tl.constexpr = start.shape[1]
    s = tl.reshape(tl.broadcast_to(start[None, :, :], (TILE // 16, 16, COLUMNS)), (TILE, COLUMNS))
    s = add_piece(s, k_0, q_0, N, TILE, FORMAT, RUN, FAST)
    if PIECES > 1:
        s = add_piece(s, k_1, q_1, N, TILE, FORMAT, RUN, FAST)
    if PIECES > 2:
        s = add_piece(s, k_2, q_2, N, TILE, FORMAT, RUN, FAST)
        s = add_piece(s, k_3, q_3, N, TILE, FORMAT, RUN, FAST)
    s = by_heads(one_sum(s, FORMAT), k_scale) * q_scale[None, :]
    if SOFTCAP:
        s = softcap * LOG2E * tanh(s / softcap)
    if MASKED:
        place = token_places(n0, TILE)
        s = tl.where(((place >= begin) & (place < end))[:, None], s, float("-inf"))
    return s


@triton.jit
def inner_seen(n0, begin, end, TILE: tl.constexpr, RUN: tl.constexpr):
    """(TILE,): whether the tokens of V's inner side are the program's own."""
    row = tl.arange(0, TILE)
    place = n0 + row // RUN % 4 * (TILE // 4) + row // (4 * RUN) * RUN + row % RUN
    return (place >= begin) & (place < end)


@triton.jit(do_not_specialize=["table_stride", "splits", "doublings"])
def tall_kernel(
    q_ptr, out_ptr, part_ptr, part_max_ptr, part_sum_ptr, done_ptr, rows_ptr, shared_ptr, starts_ptr, contexts_ptr,
    tables_ptr,
    keys, values, key_scales, value_scales, cos_ptr, sin_ptr, qnorm_ptr, knorm_ptr, sinks_ptr, q_eps, k_eps,
    scale, softcap, q_stride, table_stride, block_stride, head_stride, scale_block_stride,
    scale_head_stride, splits, doublings,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, R: tl.constexpr, HEAD: tl.constexpr, WIDE: tl.constexpr,
    HALF: tl.constexpr, NORM: tl.constexpr, FORMAT: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, SPLITS_2: tl.constexpr, LISTED: tl.constexpr,
    FUSED: tl.constexpr, PDL: tl.constexpr,
    FAST: tl.constexpr, CASCADE: tl.constexpr,
):  # fmt: skip
    SHARE: tl.constexpr = HEADS // KV_HEADS
    DTYPE: tl.constexpr = q_ptr.dtype.element_ty
    N: tl.constexpr = min(WIDE, 64)  # bytes of a piece of K
    PIECES: tl.constexpr = WIDE // N
    head, split = tl.program_id(0), tl.program_id(1)
    request, context, first_split, last_split, first_own, begin, end = share_of(
        split, tl.program_id(2), rows_ptr, shared_ptr, contexts_ptr, doublings, WINDOW, LISTED, FUSED, CASCADE
    )
    if (split < first_own) | (split > last_split) | (context <= 0):
        if PDL:
            gdc_wait()
            gdc_launch_dependents()
        return
    newest = context - 1
    row = tl.load(starts_ptr + request).to(tl.int64)
    table = tables_ptr + request * table_stride
    keys += head * head_stride
    values += head * head_stride
    key_scales += head * scale_head_stride
    value_scales += head * scale_head_stride
    key_words = keys.to(tl.pointer_type(tl.int32), bitcast=True)
    value_words = values.to(tl.pointer_type(tl.int32), bitcast=True)
    RUN: tl.constexpr = 4 if FORMAT == 3 else 8  # neighbours along a product's inner side that lie in one lane
    whole = begin // TILE * TILE if WINDOW > 0 else end // TILE * TILE  # up to here tiles need no mask
    if FUSED:  # no kernel of this step writes cached tokens: load them before the projection ends
        k_0, k_1, k_2, k_3, k_scale, v, v_scale = load_tokens(
            table, key_words, value_words, key_scales, value_scales, begin, begin, end, whole, block_stride,
            scale_block_stride, HEAD, WIDE, N, PIECES, BLOCK, TILE, False,
        )  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    index = tl.arange(0, R)
    shared = index < SHARE
    heads = q_ptr + row * q_stride + (head * SHARE + tl.where(shared, index, 0)) * HEAD
    TURN: tl.constexpr = HALF if FUSED else 0
    QNORM: tl.constexpr = NORM and FUSED
    rms = head_scale(heads, q_eps, HEAD, WIDE, QNORM)
    q_0 = piece_of_q(heads, shared, 0, rms, qnorm_ptr, cos_ptr, sin_ptr, newest, HEAD, TURN, QNORM, N, DTYPE, RUN)
    q_1, q_2, q_3 = q_0, q_0, q_0
    if PIECES > 1:
        q_1 = piece_of_q(heads, shared, 1, rms, qnorm_ptr, cos_ptr, sin_ptr, newest, HEAD, TURN, QNORM, N, DTYPE, RUN)
    if PIECES > 2:
        q_2 = piece_of_q(heads, shared, 2, rms, qnorm_ptr, cos_ptr, sin_ptr, newest, HEAD, TURN, QNORM, N, DTYPE, RUN)
        q_3 = piece_of_q(heads, shared, 3, rms, qnorm_ptr, cos_ptr, sin_ptr, newest, HEAD, TURN, QNORM, N, DTYPE, RUN)
    largest = tl.maximum(tl.max(tl.abs(q_0), axis=1), tl.max(tl.abs(q_1), axis=1))
    if PIECES > 2:
        largest = tl.maximum(largest, tl.maximum(tl.max(tl.abs(q_2), axis=1), tl.max(tl.abs(q_3), axis=1)))
    most: tl.constexpr = 16.0 if FORMAT == 3 else 127.0
    unit = tl.maximum(largest, 1e-30) / most
    q_0, q_1 = operand(q_0, unit, FORMAT), operand(q_1, unit, FORMAT)
    q_2, q_3 = operand(q_2, unit, FORMAT), operand(q_3, unit, FORMAT)
    # Sums start from a product with zeros, so that q is in its lanes before the loop.
    nothing = tl.zeros((16, N), tl.float16 if FORMAT == 3 else tl.int8)
    start = times(nothing, q_0, start_sum(16, 2 * R, FORMAT), FORMAT)
    if PIECES > 1:
        start = times(nothing, q_1, start, FORMAT)
    if PIECES > 2:
        start = times(nothing, q_2, start, FORMAT)
        start = times(nothing, q_3, start, FORMAT)
    q_scale = unit * scale
    if not SOFTCAP:
        q_scale *= LOG2E
    best = tl.full((R,), float("-inf"), tl.float32)
    total = tl.zeros((8, R), tl.float32)
    acc = tl.zeros((WIDE, R), tl.float32)
    there = tl.full((TILE,), 1, tl.int1)
    if not FUSED:
        k_0, k_1, k_2, k_3, k_scale, v, v_scale = load_tokens(
            table, key_words, value_words, key_scales, value_scales, begin, begin, end, whole, block_stride,
            scale_block_stride, HEAD, WIDE, N, PIECES, BLOCK, TILE, False,
        )  # fmt: skip
    k_ids, v_ids = load_blocks(table, begin + TILE, whole, BLOCK, TILE)
    for n0 in tl.range(begin, whole, TILE, num_stages=1):
        s = scores(
            q_0, q_1, q_2, q_3, q_scale, start, k_0, k_1, k_2, k_3, k_scale, n0, begin, end, softcap,
            N, PIECES, TILE, False, SOFTCAP, FORMAT, RUN, FAST,
        )  # fmt: skip
        k_0, k_1, k_2, k_3, k_scale = load_pieces(
            key_words, key_scales, k_ids, n0, begin, end, block_stride, scale_block_stride,
            HEAD, N, PIECES, BLOCK, TILE, False,
        )  # fmt: skip
        best, total, shrink, parts, factor = weigh(s, best, total, v_scale, FORMAT, RUN)
        acc = add_values(acc, shrink, parts, factor, v, there, WIDE, TILE, False, FORMAT, RUN, FAST)
        v = load_values(value_words, v_ids, n0, end, block_stride, HEAD, WIDE, BLOCK, TILE, False)
        v_scale = load_scales(value_scales, k_ids, n0, begin, end, scale_block_stride, BLOCK, TILE, False)
        k_ids, v_ids = load_blocks(table, n0 + 2 * TILE, whole, BLOCK, TILE)
    for n0 in tl.range(whole, end, TILE, num_stages=1):
        k_0, k_1, k_2, k_3, k_scale, v, v_scale = load_tokens(
            table, key_words, value_words, key_scales, value_scales, n0, begin, end, end, block_stride,
            scale_block_stride, HEAD, WIDE, N, PIECES, BLOCK, TILE, True,
        )  # fmt: skip
        s = scores(
            q_0, q_1, q_2, q_3, q_scale, start, k_0, k_1, k_2, k_3, k_scale, n0, begin, end, softcap,
            N, PIECES, TILE, True, SOFTCAP, FORMAT, RUN, FAST,
        )  # fmt: skip
        best, total, shrink, parts, factor = weigh(s, best, total, v_scale, FORMAT, RUN)
        seen = inner_seen(n0, begin, end, TILE, RUN)
        acc = add_values(acc, shrink, parts, factor, v, seen, WIDE, TILE, True, FORMAT, RUN, FAST)
    sums = tl.sum(total, axis=0)
    if FUSED:
        owner = split == last_split  # of the newest token
        if owner:
            block = tl.load(table + newest // BLOCK).to(tl.int64)
            offset = newest % BLOCK
            one = tl.arange(0, 2)
            mine = one < 1
            k_at = keys + block * block_stride + offset * HEAD + one * 0
            v_at = values + block * block_stride + offset + one * 0
            at = block * scale_block_stride + offset + one * 0
            k_head = q_ptr + row * q_stride + (HEADS + head) * HEAD + one * 0
            new_k = store_head(
                k_at, key_scales + at, k_head, mine, knorm_ptr, k_eps, cos_ptr, sin_ptr, newest,
                HEAD, WIDE, HALF, NORM, FORMAT, 1,
            )  # fmt: skip
            new_v = store_head(
                v_at, value_scales + at, k_head + KV_HEADS * HEAD, mine, knorm_ptr, k_eps, cos_ptr, sin_ptr, newest,
                HEAD, WIDE, 0, False, FORMAT, BLOCK,
            )  # fmt: skip
            new_k = tl.sum(tl.where(mine[:, None], new_k, 0.0), axis=0)
            new_v = tl.sum(tl.where(mine[:, None], new_v, 0.0), axis=0)
            dims = tl.arange(0, WIDE)
            q = turned(heads, shared, dims, rms, qnorm_ptr, cos_ptr, sin_ptr, newest, HEAD, TURN, QNORM)
            s = tl.sum(q.to(DTYPE).to(tl.float32) * new_k[None, :], axis=1) * scale
            if SOFTCAP:
                s = softcap * tanh(s / softcap)
            new = tl.maximum(best, s * LOG2E)
            p, shrink = tl.exp2(s * LOG2E - new), tl.exp2(best - new)
            best, sums = new, sums * shrink + p
            acc = acc * shrink[None, :] + p[None, :] * new_v[:, None]
    acc = tl.trans(acc)
    dims = tl.arange(0, WIDE)
    inside = shared[:, None] & (dims < HEAD)[None, :]
    place = out_ptr + row * HEADS * HEAD + (head * SHARE + index)[:, None] * HEAD + dims[None, :]
    if sinks_ptr is not None:
        sinks = load_sinks(sinks_ptr, head * SHARE + tl.where(shared, index, 0))
    if first_split == last_split:
        if sinks_ptr is not None:
            sums, acc = add_sinks(best, sums, acc, sinks)
        tl.store(place, (acc / sums[:, None]).to(DTYPE), mask=inside)
        return
    part = (request * HEADS + head * SHARE + index) * splits  # (R,): first part of each head
    tl.store(part_ptr + ((part + split) * HEAD)[:, None] + dims[None, :], acc, mask=inside)
    tl.store(part_max_ptr + part + split, best, mask=shared)
    tl.store(part_sum_ptr + part + split, sums, mask=shared)
    tl.debug_barrier()
    counter = done_ptr + request * KV_HEADS + head
    if tl.atomic_add(counter, 1, sem="acq_rel") != last_split - first_own:
        return
    tl.store(counter, 0)
    tl.debug_barrier()
    best, sums, acc = combine(
        part, part_ptr, part_max_ptr, part_sum_ptr, first_split, last_split, shared, dims, HEAD, SPLITS_2
    )
    if sinks_ptr is not None:
        sums, acc = add_sinks(best, sums, acc, sinks)
    tl.store(place, (acc / sums[:, None]).to(DTYPE), mask=inside)


def tall_attention(
    q: Tensor, attention: Attention, kv: KVLayer, batch: Batch, group: int, out: Tensor, scratch: DecodeScratch, *,
    requests: int, listed: Tensor | None, splits: int, fused: bool, scale: int = 1,
    shared: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`decode_attention` over int8 or fp8 K and V."""
    dim, share = attention.head_dim, attention.heads // attention.kv_heads
    wide = max(32, triton.next_power_of_2(dim))
    rope, qn, kn = attention.rope, attention.query_norm, attention.key_norm
    assert kv.key_scales is not None and kv.value_scales is not None
    assert kv.keys.stride(2) == kv.keys.shape[3]  # tokens of a block side by side
    total = batch.contexts.shape[0]
    part, part_max, part_sum, done = scratch.reserve(total, attention.heads, splits, dim)
    tables = batch.groups[group].tables
    tall_kernel[(attention.kv_heads, splits, requests)](
        q, out, part, part_max, part_sum, done, tables if listed is None else listed,
        tables if shared is None else shared, batch.starts, batch.contexts, tables, kv.keys, kv.values,
        kv.key_scales, kv.value_scales, rope.cos if rope else q, rope.sin if rope else q,
        qn.weight if qn else q, kn.weight if kn else q, attention.sinks, qn.eps if qn else 0.0, kn.eps if kn else 0.0,
        attention.scale, attention.softcap, q.stride(0), tables.stride(0), *kv.keys.stride()[:2],
        *kv.key_scales.stride()[:2], splits, scale.bit_length() - 1,
        HEADS=attention.heads, KV_HEADS=attention.kv_heads, R=max(4, triton.next_power_of_2(share)), HEAD=dim,
        WIDE=wide, HALF=rope.cos.shape[1] if rope else 0, NORM=qn is not None, FORMAT=FORMATS[kv.format],
        WINDOW=attention.window, SOFTCAP=attention.softcap > 0, BLOCK=BLOCK,
        TILE=32, SPLITS_2=max(128, triton.next_power_of_2(splits)),
        LISTED=listed is not None, FUSED=fused, PDL=PDL, FAST=not INTERPRETED,
        CASCADE=shared is not None, num_warps=1, **EARLY,
    )  # fmt: skip
    return out
