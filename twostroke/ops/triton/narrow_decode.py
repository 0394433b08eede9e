"""Attention of one new token per request over a cache of few bits, straight from memory into the tensor cores.

A warp works alone (narrow_tiles.py). q is read in the order in which K lies in the lanes, K's tokens in the order in
which their scores meet V. V lies transposed in its blocks (heads.py): an operand's bytes must be neighbours along the
tokens. The tile of queries has twice the rows that the heads need, for the two parts of q, and later of p. What is said
of splits in decode.py holds here too.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from twostroke.ops.interface import BLOCK, Attention, Batch, KVLayer
from twostroke.ops.triton.decode import LOG2E, DecodeScratch, combine, share_of
from twostroke.ops.triton.heads import FORMATS, head_scale, store_head, turned
from twostroke.ops.triton.launch import EARLY, INTERPRETED, PDL, gdc_launch_dependents, gdc_wait
from twostroke.ops.triton.narrow_tiles import (
    as_columns,
    as_rows,
    column_places,
    high_nibbles,
    inner_order,
    load_blocks,
    load_keys,
    load_scales,
    load_values,
    low_nibbles,
    one_sum,
    start_sum,
    times,
    two_parts,
)
from twostroke.ops.triton.rows import tanh


@triton.jit
def weigh(s, best, total, v_scale, FORMAT: tl.constexpr, RUN: tl.constexpr):
    """The softmax's next step: (2 R, TILE) weights of the tokens in load_values' order, and their common factor."""
    new = tl.maximum(best, tl.max(s, axis=1))
    stable = tl.where(new == float("-inf"), 0.0, new)
    p = tl.exp2(s - stable[:, None])
    shrink = tl.exp2(best - stable)
    total = total * shrink + tl.sum(p, axis=1)
    top = tl.maximum(tl.max(v_scale, axis=0), 1e-30)
    most: tl.constexpr = 1.0 if FORMAT == 3 else 127.0
    parts = two_parts(p * (v_scale * (most / top))[None, :], FORMAT)
    ordered = tl.reshape(parts, (parts.shape[0], parts.shape[1] // (4 * RUN), RUN // 2, 4, 2))
    parts = tl.reshape(tl.permute(ordered, (0, 1, 3, 2, 4)), (parts.shape[0], parts.shape[1]))
    return new, total, shrink, parts, top * (1.0 / most)


@triton.jit
def add_values(
    acc_a, acc_b, shrink, parts, factor, words, seen, R: tl.constexpr, PART: tl.constexpr, TILE: tl.constexpr,
    MASKED: tl.constexpr, FORMAT: tl.constexpr, RUN: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    start = start_sum(2 * R, PART, FORMAT)
    if FORMAT == 2:
        factor *= 1.0 / 16.0  # low_nibbles
        low = as_rows(low_nibbles(words), seen, PART, TILE, MASKED, FORMAT, RUN, FAST)
        high = as_rows(high_nibbles(words), seen, PART, TILE, MASKED, FORMAT, RUN, FAST)
        acc_b = acc_b * shrink[:, None] + one_sum(times(parts, high, start, FORMAT), FORMAT) * factor
    else:
        low = as_rows(words, seen, PART, TILE, MASKED, FORMAT, RUN, FAST)
    acc_a = acc_a * shrink[:, None] + one_sum(times(parts, low, start, FORMAT), FORMAT) * factor
    return acc_a, acc_b


@triton.jit
def operand(
    heads, shared, unit, which, rms, norm_ptr, cos_ptr, sin_ptr, position, HEAD: tl.constexpr, HALF: tl.constexpr,
    NORM: tl.constexpr, C: tl.constexpr, DTYPE: tl.constexpr, FORMAT: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """The elements of q that a piece of K meets, in two parts."""
    dims = which * C + inner_order(C, RUN)
    q = turned(heads, shared, dims, rms, norm_ptr, cos_ptr, sin_ptr, position, HEAD, HALF, NORM)
    return two_parts(q.to(DTYPE).to(tl.float32) / unit[:, None], FORMAT)


@triton.jit
def load_pieces(
    keys, scales, ids, n0, begin, end, block_stride, token_stride, scale_block_stride,
    WIDTH: tl.constexpr, PART: tl.constexpr, PIECES: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """K of a tile in up to four pieces, and its scales."""
    N: tl.constexpr = PART // PIECES  # bytes of a piece
    k_0 = load_keys(keys, ids, n0, begin, end, block_stride, token_stride, 0, WIDTH, N, BLOCK, TILE, MASKED)
    k_1, k_2, k_3 = k_0, k_0, k_0
    if PIECES > 1:
        k_1 = load_keys(keys, ids, n0, begin, end, block_stride, token_stride, N, WIDTH, N, BLOCK, TILE, MASKED)
    if PIECES > 2:
        k_2 = load_keys(keys, ids, n0, begin, end, block_stride, token_stride, 2 * N, WIDTH, N, BLOCK, TILE, MASKED)
        k_3 = load_keys(keys, ids, n0, begin, end, block_stride, token_stride, 3 * N, WIDTH, N, BLOCK, TILE, MASKED)
    return k_0, k_1, k_2, k_3, load_scales(scales, ids, n0, begin, end, scale_block_stride, BLOCK, TILE, MASKED)


@triton.jit
def load_tokens(
    table, key_words, value_words, key_scales, value_scales, n0, begin, end, until, block_stride, token_stride,
    scale_block_stride, WIDTH: tl.constexpr, PART: tl.constexpr, PIECES: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """K and V of a tile with their scales, from blocks that the table names up to `until`."""
    ids = load_blocks(table, n0, until, BLOCK, TILE)
    k_0, k_1, k_2, k_3, k_scale = load_pieces(
        key_words, key_scales, ids, n0, begin, end, block_stride, token_stride, scale_block_stride,
        WIDTH, PART, PIECES, BLOCK, TILE, MASKED,
    )  # fmt: skip
    v = load_values(value_words, ids, n0, end, block_stride, WIDTH, PART, BLOCK, TILE, MASKED)
    v_scale = load_scales(value_scales, ids, n0, begin, end, scale_block_stride, BLOCK, TILE, MASKED)
    return k_0, k_1, k_2, k_3, k_scale, v, v_scale


@triton.jit
def scores(
    q_0, q_1, q_2, q_3, q_scale, k_0, k_1, k_2, k_3, k_scale, n0, begin, end, softcap, R: tl.constexpr,
    C: tl.constexpr, PIECES: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr,
    SOFTCAP: tl.constexpr, FORMAT: tl.constexpr, RUN: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """(R, TILE) scores in load_keys' order, times log2 e; q_scale (R,) holds all factors but the tokens' own."""
    s = times(q_0, as_columns(k_0, C, TILE, FORMAT, RUN, FAST), start_sum(2 * R, TILE, FORMAT), FORMAT)
    if PIECES > 1:
        s = times(q_1, as_columns(k_1, C, TILE, FORMAT, RUN, FAST), s, FORMAT)
    if PIECES > 2:
        s = times(q_2, as_columns(k_2, C, TILE, FORMAT, RUN, FAST), s, FORMAT)
        s = times(q_3, as_columns(k_3, C, TILE, FORMAT, RUN, FAST), s, FORMAT)
    s = one_sum(s, FORMAT) * q_scale[:, None] * k_scale[None, :]
    if SOFTCAP:
        s = softcap * LOG2E * tanh(s / softcap)
    if MASKED:
        _, place = column_places(n0, BLOCK, TILE)
        s = tl.where(tl.reshape((place >= begin) & (place < end), (TILE,))[None, :], s, float("-inf"))
    return s


@triton.jit(do_not_specialize=["table_stride", "splits"])
def narrow_kernel(
    q_ptr, out_ptr, part_ptr, part_max_ptr, part_sum_ptr, done_ptr, rows_ptr, shared_ptr, starts_ptr, contexts_ptr,
    tables_ptr,
    keys, values, key_scales, value_scales, cos_ptr, sin_ptr, qnorm_ptr, knorm_ptr, q_eps, k_eps,
    scale, softcap, q_stride, table_stride, block_stride, head_stride, token_stride, scale_block_stride,
    scale_head_stride, splits,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, R: tl.constexpr, HEAD: tl.constexpr, WIDE: tl.constexpr,
    HALF: tl.constexpr, NORM: tl.constexpr, FORMAT: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, SCALE: tl.constexpr, SPLITS_2: tl.constexpr, LISTED: tl.constexpr,
    FUSED: tl.constexpr, PDL: tl.constexpr,
    FAST: tl.constexpr, CASCADE: tl.constexpr,
):  # fmt: skip
    SHARE: tl.constexpr = HEADS // KV_HEADS
    DTYPE: tl.constexpr = q_ptr.dtype.element_ty
    PAIRS: tl.constexpr = FORMAT == 2
    WIDTH: tl.constexpr = HEAD // 2 if PAIRS else HEAD
    PART: tl.constexpr = WIDE // 2 if PAIRS else WIDE  # bytes of a token
    C: tl.constexpr = min(WIDE, 64)  # elements of a piece of K
    PIECES: tl.constexpr = WIDE // C
    head, split = tl.program_id(0), tl.program_id(1)
    request, context, first_split, last_split, first_own, begin, end = share_of(
        split, tl.program_id(2), rows_ptr, shared_ptr, contexts_ptr, WINDOW, SCALE, LISTED, FUSED, CASCADE
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
    if FUSED:  # what is cached depends on nobody: ask for it before the projection ends
        k_0, k_1, k_2, k_3, k_scale, v, v_scale = load_tokens(
            table, key_words, value_words, key_scales, value_scales, begin, begin, end, whole, block_stride,
            token_stride, scale_block_stride, WIDTH, PART, PIECES, BLOCK, TILE, False,
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
    dims = tl.arange(0, WIDE)
    q = turned(heads, shared, dims, rms, qnorm_ptr, cos_ptr, sin_ptr, newest, HEAD, TURN, QNORM)
    most: tl.constexpr = 16.0 if FORMAT == 3 else 127.0
    unit = tl.maximum(tl.max(tl.abs(q), axis=1), 1e-30) / most
    q_0 = operand(
        heads, shared, unit, 0, rms, qnorm_ptr, cos_ptr, sin_ptr, newest, HEAD, TURN, QNORM, C, DTYPE, FORMAT, RUN
    )
    q_1, q_2, q_3 = q_0, q_0, q_0
    if PIECES > 1:
        q_1 = operand(
            heads, shared, unit, 1, rms, qnorm_ptr, cos_ptr, sin_ptr, newest, HEAD, TURN, QNORM, C, DTYPE, FORMAT, RUN
        )
    if PIECES > 2:
        q_2 = operand(
            heads, shared, unit, 2, rms, qnorm_ptr, cos_ptr, sin_ptr, newest, HEAD, TURN, QNORM, C, DTYPE, FORMAT, RUN
        )
        q_3 = operand(
            heads, shared, unit, 3, rms, qnorm_ptr, cos_ptr, sin_ptr, newest, HEAD, TURN, QNORM, C, DTYPE, FORMAT, RUN
        )
    q_scale = unit * (scale / 16.0 if PAIRS else scale)
    if not SOFTCAP:
        q_scale *= LOG2E
    best = tl.full((R,), float("-inf"), tl.float32)
    total = tl.zeros((R,), tl.float32)
    acc_a = tl.zeros((R, PART), tl.float32)
    acc_b = acc_a
    there = tl.full((4, TILE // 4), 1, tl.int1)
    if not FUSED:
        k_0, k_1, k_2, k_3, k_scale, v, v_scale = load_tokens(
            table, key_words, value_words, key_scales, value_scales, begin, begin, end, whole, block_stride,
            token_stride, scale_block_stride, WIDTH, PART, PIECES, BLOCK, TILE, False,
        )  # fmt: skip
    ids = load_blocks(table, begin + TILE, whole, BLOCK, TILE)
    for n0 in tl.range(begin, whole, TILE, num_stages=1):
        s = scores(
            q_0, q_1, q_2, q_3, q_scale, k_0, k_1, k_2, k_3, k_scale, n0, begin, end, softcap,
            R, C, PIECES, BLOCK, TILE, False, SOFTCAP, FORMAT, RUN, FAST,
        )  # fmt: skip
        k_0, k_1, k_2, k_3, k_scale = load_pieces(
            key_words, key_scales, ids, n0, begin, end, block_stride, token_stride, scale_block_stride,
            WIDTH, PART, PIECES, BLOCK, TILE, False,
        )  # fmt: skip
        best, total, shrink, parts, factor = weigh(s, best, total, v_scale, FORMAT, RUN)
        acc_a, acc_b = add_values(
            acc_a, acc_b, shrink, parts, factor, v, there, R, PART, TILE, False, FORMAT, RUN, FAST
        )
        v = load_values(value_words, ids, n0, end, block_stride, WIDTH, PART, BLOCK, TILE, False)
        v_scale = load_scales(value_scales, ids, n0, begin, end, scale_block_stride, BLOCK, TILE, False)
        ids = load_blocks(table, n0 + 2 * TILE, whole, BLOCK, TILE)
    for n0 in tl.range(whole, end, TILE, num_stages=1):
        k_0, k_1, k_2, k_3, k_scale, v, v_scale = load_tokens(
            table, key_words, value_words, key_scales, value_scales, n0, begin, end, end, block_stride,
            token_stride, scale_block_stride, WIDTH, PART, PIECES, BLOCK, TILE, True,
        )  # fmt: skip
        s = scores(
            q_0, q_1, q_2, q_3, q_scale, k_0, k_1, k_2, k_3, k_scale, n0, begin, end, softcap,
            R, C, PIECES, BLOCK, TILE, True, SOFTCAP, FORMAT, RUN, FAST,
        )  # fmt: skip
        best, total, shrink, parts, factor = weigh(s, best, total, v_scale, FORMAT, RUN)
        place = n0 + tl.arange(0, 4)[:, None] * (TILE // 4) + tl.arange(0, TILE // 4)[None, :]
        acc_a, acc_b = add_values(
            acc_a, acc_b, shrink, parts, factor, v, (place >= begin) & (place < end), R, PART, TILE, True, FORMAT, RUN,
            FAST,
        )  # fmt: skip
    if FUSED:
        owner = split == last_split  # of the newest token
        if owner:
            block = tl.load(table + newest // BLOCK).to(tl.int64)
            offset = newest % BLOCK
            one = tl.arange(0, 2)
            mine = one < 1
            k_at = keys + block * block_stride + offset * token_stride + one * 0
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
            s = tl.sum(q.to(DTYPE).to(tl.float32) * new_k[None, :], axis=1) * scale
            if SOFTCAP:
                s = softcap * tanh(s / softcap)
            new = tl.maximum(best, s * LOG2E)
            p, shrink = tl.exp2(s * LOG2E - new), tl.exp2(best - new)
            best, total = new, total * shrink + p
            if PAIRS:
                v_a, v_b = tl.split(tl.reshape(new_v, (WIDE // 2, 2)))
                acc_b = acc_b * shrink[:, None] + p[:, None] * v_b[None, :]
                acc_a = acc_a * shrink[:, None] + p[:, None] * v_a[None, :]
            else:
                acc_a = acc_a * shrink[:, None] + p[:, None] * new_v[None, :]
    dims = (2 if PAIRS else 1) * tl.arange(0, PART)
    inside = shared[:, None] & (dims < HEAD)[None, :]
    place = out_ptr + row * HEADS * HEAD + (head * SHARE + index)[:, None] * HEAD
    if first_split == last_split:
        tl.store(place + dims[None, :], (acc_a / total[:, None]).to(DTYPE), mask=inside)
        if PAIRS:
            tl.store(place + dims[None, :] + 1, (acc_b / total[:, None]).to(DTYPE), mask=inside)
        return
    part = (request * HEADS + head * SHARE + index) * splits  # (R,): first part of each head
    mine_at = part_ptr + ((part + split) * HEAD)[:, None]
    tl.store(mine_at + dims[None, :], acc_a, mask=inside)
    if PAIRS:
        tl.store(mine_at + dims[None, :] + 1, acc_b, mask=inside)
    tl.store(part_max_ptr + part + split, best, mask=shared)
    tl.store(part_sum_ptr + part + split, total, mask=shared)
    tl.debug_barrier()
    counter = done_ptr + request * KV_HEADS + head
    if tl.atomic_add(counter, 1, sem="acq_rel") != last_split - first_own:
        return
    tl.store(counter, 0)
    tl.debug_barrier()
    every = tl.arange(0, WIDE)
    acc, sums = combine(
        part, part_ptr, part_max_ptr, part_sum_ptr, first_split, last_split, shared, every, HEAD, SPLITS_2
    )
    tl.store(place + every[None, :], (acc / sums[:, None]).to(DTYPE), mask=shared[:, None] & (every < HEAD)[None, :])


def narrow_attention(
    q: Tensor, attention: Attention, kv: KVLayer, batch: Batch, group: int, out: Tensor, scratch: DecodeScratch, *,
    requests: int, listed: Tensor | None, splits: int, fused: bool, scale: int = 1,
    shared: Tensor | None = None, tile: int | None = None,
) -> Tensor:  # fmt: skip
    """As decode_attention, over int8, int4 or fp8."""
    dim, share = attention.head_dim, attention.heads // attention.kv_heads
    wide = max(64 if kv.format == "int4" else 32, triton.next_power_of_2(dim))
    rope, qn, kn = attention.rope, attention.query_norm, attention.key_norm
    assert kv.key_scales is not None and kv.value_scales is not None
    total = batch.contexts.shape[0]
    part, part_max, part_sum, done = scratch.reserve(total, attention.heads, splits, dim)
    tables = batch.groups[group].tables
    narrow_kernel[(attention.kv_heads, splits, requests)](
        q, out, part, part_max, part_sum, done, tables if listed is None else listed,
        tables if shared is None else shared, batch.starts, batch.contexts, tables, kv.keys, kv.values,
        kv.key_scales, kv.value_scales, rope.cos if rope else q, rope.sin if rope else q,
        qn.weight if qn else q, kn.weight if kn else q, qn.eps if qn else 0.0, kn.eps if kn else 0.0,
        attention.scale, attention.softcap, q.stride(0), tables.stride(0), *kv.keys.stride()[:3],
        *kv.key_scales.stride()[:2], splits,
        HEADS=attention.heads, KV_HEADS=attention.kv_heads, R=max(8, triton.next_power_of_2(share)), HEAD=dim,
        WIDE=wide, HALF=rope.cos.shape[1] if rope else 0, NORM=qn is not None, FORMAT=FORMATS[kv.format],
        WINDOW=attention.window, SOFTCAP=attention.softcap > 0, BLOCK=BLOCK,
        TILE=tile or (64 if kv.format == "int4" and wide <= 128 else 32), SCALE=scale,
        SPLITS_2=max(128, triton.next_power_of_2(splits)),
        LISTED=listed is not None, FUSED=fused, PDL=PDL, FAST=not INTERPRETED,
        CASCADE=shared is not None, num_warps=1, **EARLY,
    )  # fmt: skip
    return out
