"""Attention whose bits do not depend on the phase: one order of additions for a row, alone or among a chunk's rows.

A row's keys are taken in tiles of TILE_N at fixed positions. Tiles are summed in splits that end where those of
decode.py do (a function of the position alone), and splits are merged in order of position. A program either computes
all splits of its rows with two accumulators, one for the split and one for the splits before it, or it computes one
split, and the last program to finish merges all of them: the same operations in the same order. Keys that a row does
not see add exact zeros.

Every operation that is rounded is written out (`enable_fp_fusion` is off, multiply-adds are explicit), so that no
compiler decides differently for another tile. All sums over keys are the tensor cores' (the sum of a row's weights is
their product with ones), whose order does not depend on how a tile is spread over lanes and warps, once codes are put
in_order (heads.py).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from twostroke.ops.cuda.kernels.decode import DecodeScratch, split_of, split_start
from twostroke.ops.cuda.kernels.heads import FORMATS, load_tile, store_head, turned
from twostroke.ops.cuda.kernels.launch import EARLY, INTERPRETED, PDL, gdc_launch_dependents, gdc_wait
from twostroke.ops.cuda.kernels.prefill import products, tile_rows, visible
from twostroke.ops.cuda.kernels.rows import tanh
from twostroke.ops.cuda.kernels.sinks import add_sinks, load_sinks
from twostroke.ops.interface import BLOCK, Attention, Batch, KVLayer

LOG2E = 1.4426950408889634
SUMS = tl.constexpr(16)  # equal columns of a row's sum of weights: the narrowest right operand
MOST_PARTS = 1 << 25  # floats of unmerged splits


@triton.jit
def fence():
    """Makes what this program has written visible to every later read, asynchronous copies included."""
    tl.inline_asm_elementwise(
        "fence.acq_rel.gpu; mov.u32 $0, 0;", "=r,r", [tl.arange(0, 128)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def visit(
    q, best, total, acc, n0, context, positions, table, keys, values, key_scales, value_scales, factor, softcap,
    block_stride, token_stride, scale_block_stride,
    HEAD: tl.constexpr, WIDE: tl.constexpr, FORMAT: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr, TILE_N: tl.constexpr, MASKED: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of keys added to a split's maximum, sum and accumulator."""
    places, valid, blocks, where, s = products(
        q, n0, context, table, keys, key_scales, block_stride, token_stride, scale_block_stride,
        HEAD, WIDE, FORMAT, BLOCK, TILE_N, MASKED, DTYPE, PRECISION, FORMAT > 0,
    )  # fmt: skip
    if SOFTCAP:
        s = softcap * tanh(s * (factor * 0.6931471805599453) / softcap) * 1.4426950408889634
    if MASKED:
        s = tl.where(visible(places, positions, valid, WINDOW), s, float("-inf"))
    largest = tl.max(s, axis=1)
    new = tl.maximum(best, largest if SOFTCAP else largest * factor)
    stable = tl.where(new == float("-inf"), 0.0, new)
    if SOFTCAP:
        p = tl.exp2(s - stable[:, None])
    else:
        p = tl.exp2(tl.fma(s, tl.full(s.shape, 1.0, tl.float32) * factor, tl.broadcast_to(-stable[:, None], s.shape)))
    shrink = tl.exp2(best - stable)
    v = load_tile(
        values, blocks, places % BLOCK, valid, block_stride, 1 if FORMAT > 0 else token_stride,
        BLOCK if FORMAT > 0 else 1, HEAD, WIDE, MASKED, DTYPE, FORMAT > 0,
    )  # fmt: skip
    ones = tl.full((TILE_N, SUMS), 1.0, DTYPE)
    total = tl.dot(p.to(DTYPE), ones, total * shrink[:, None], input_precision=PRECISION)
    if FORMAT > 0:
        p *= tl.load(value_scales + where, mask=valid, other=0.0)[None, :]
    acc = tl.dot(p.to(DTYPE), v, acc * shrink[:, None], input_precision=PRECISION)
    return new, total, acc


@triton.jit
def merge(best, total, acc, next_best, next_total, next_acc):
    """Merges the splits so far with the next one."""
    new = tl.maximum(best, next_best)
    stable = tl.where(new == float("-inf"), 0.0, new)
    before, after = tl.exp2(best - stable), tl.exp2(next_best - stable)
    total = tl.fma(next_total, tl.broadcast_to(after[:, None], total.shape), total * before[:, None])
    acc = tl.fma(next_acc, tl.broadcast_to(after[:, None], acc.shape), acc * before[:, None])
    return new, total, acc


@triton.jit(do_not_specialize=["splits", "table_stride"])
def attend_kernel(
    q_ptr, out_ptr, part_ptr, part_max_ptr, part_sum_ptr, done_ptr, tiles_ptr, starts_ptr, contexts_ptr, tables_ptr,
    keys, values, key_scales, value_scales, cos_ptr, sin_ptr, sinks_ptr, factor, softcap, q_stride, table_stride,
    block_stride, head_stride, token_stride, scale_block_stride, scale_head_stride, splits,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD: tl.constexpr, WIDE: tl.constexpr, FORMAT: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr, PARALLEL: tl.constexpr, LISTED: tl.constexpr, PDL: tl.constexpr,
    FUSED: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """PARALLEL: one program for each of `splits` splits. LISTED: 0 for a tile of one query for each request, 1 the same
    for the requests listed, 2 for tiles given as (request, first query). FUSED: q_ptr holds the raw projections of
    single queries; they are rotated here, and the program that owns the newest position writes its K and V first."""
    SHARE: tl.constexpr = HEADS // KV_HEADS
    QUERIES: tl.constexpr = TILE_M // SHARE
    PART_ROWS: tl.constexpr = TILE_M if LISTED == 2 else SHARE
    DTYPE: tl.constexpr = q_ptr.dtype.element_ty
    head, tile = tl.program_id(0), tl.program_id(1)
    request, first_query = tile, 0
    if LISTED == 1:
        request = tl.load(tiles_ptr + tile)
    if LISTED == 2:
        request, first_query = tl.load(tiles_ptr + 2 * tile), tl.load(tiles_ptr + 2 * tile + 1)
    start, stop = tl.load(starts_ptr + request), tl.load(starts_ptr + request + 1)
    context = tl.load(contexts_ptr + request)
    before = context - (stop - start)  # tokens in the cache before this step
    low = before + first_query  # position of the first query
    high = tl.minimum(low + QUERIES, context)  # one past the last
    first = tl.maximum(low - WINDOW + 1, 0) // TILE_N * TILE_N if WINDOW > 0 else 0
    first_split, last_split = split_of(first), split_of(high - 1)
    begin, end = first, high
    split = tl.program_id(2)
    empty = context <= 0
    if PARALLEL:
        empty = empty | (split < first_split) | (split > last_split)
    if empty:
        if PDL:
            gdc_wait()
            gdc_launch_dependents()
        return
    if PARALLEL:
        begin, end = tl.maximum(first, split_start(split)), tl.minimum(high, split_start(split + 1))
    index = tl.arange(0, TILE_M)
    query = first_query + index // SHARE
    mine = (index < QUERIES * SHARE) & (query < stop - start)
    positions = tl.where(mine, before + query, low)
    dims = tl.arange(0, WIDE)
    row = (start + query).to(tl.int64)
    inside = mine[:, None] & (dims < HEAD)[None, :]
    table = tables_ptr + request * table_stride
    keys += head * head_stride
    values += head * head_stride
    key_scales += head * scale_head_stride
    value_scales += head * scale_head_stride
    whole = (low + 1) // TILE_N * TILE_N if WINDOW == 0 else 0  # tiles below are seen by every query
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    q_rows = q_ptr + row * q_stride + (head * SHARE + index % SHARE) * HEAD
    if FUSED:
        unscaled = tl.full((TILE_M,), 1.0, tl.float32)
        q = turned(q_rows, mine, dims, unscaled, cos_ptr, cos_ptr, sin_ptr, low, HEAD, HALF, False).to(DTYPE)
        if (not PARALLEL) or split == last_split:
            one = tl.arange(0, 2)
            block = tl.load(table + low // BLOCK).to(tl.int64)
            token = block * block_stride + low % BLOCK * token_stride + one * 0
            at = block * scale_block_stride + low % BLOCK + one * 0
            k_head = q_ptr + start.to(tl.int64) * q_stride + (HEADS + head) * HEAD + one * 0
            store_head(
                keys + token, key_scales + at, k_head, one < 1, cos_ptr, 0.0, cos_ptr, sin_ptr, low,
                HEAD, WIDE, HALF, False, FORMAT, 1,
            )  # fmt: skip
            v_token = token
            if FORMAT > 0:
                v_token = block * block_stride + low % BLOCK + one * 0
            store_head(
                values + v_token, value_scales + at, k_head + KV_HEADS * HEAD, one < 1, cos_ptr, 0.0, cos_ptr, sin_ptr,
                low, HEAD, WIDE, 0, False, FORMAT, BLOCK if FORMAT > 0 else 1,
            )  # fmt: skip
            if PDL:
                fence()
            tl.debug_barrier()
    else:
        q = tl.load(q_rows[:, None] + dims[None, :], mask=inside, other=0.0)
    best = tl.full((TILE_M,), float("-inf"), tl.float32)
    total = tl.zeros((TILE_M, SUMS), tl.float32)
    acc = tl.zeros((TILE_M, WIDE), tl.float32)
    all_best, all_total, all_acc = best, total, acc
    from_split, to_split = first_split, last_split
    if PARALLEL:
        from_split, to_split = split, split
    for part_of in range(from_split, to_split + 1):
        if not PARALLEL:
            begin, end = tl.maximum(first, split_start(part_of)), tl.minimum(high, split_start(part_of + 1))
        until = tl.maximum(begin, tl.minimum(whole, end // TILE_N * TILE_N))
        best = tl.full((TILE_M,), float("-inf"), tl.float32)
        total = tl.zeros((TILE_M, SUMS), tl.float32)
        acc = tl.zeros((TILE_M, WIDE), tl.float32)
        for n0 in tl.range(begin, until, TILE_N, num_stages=STAGES):
            best, total, acc = visit(
                q, best, total, acc, n0, context, positions, table, keys, values, key_scales, value_scales, factor,
                softcap, block_stride, token_stride, scale_block_stride,
                HEAD, WIDE, FORMAT, WINDOW, SOFTCAP, BLOCK, TILE_N, False, DTYPE, PRECISION,
            )  # fmt: skip
        for n0 in tl.range(until, end, TILE_N, num_stages=STAGES):
            best, total, acc = visit(
                q, best, total, acc, n0, context, positions, table, keys, values, key_scales, value_scales, factor,
                softcap, block_stride, token_stride, scale_block_stride,
                HEAD, WIDE, FORMAT, WINDOW, SOFTCAP, BLOCK, TILE_N, True, DTYPE, PRECISION,
            )  # fmt: skip
        if not PARALLEL:
            all_best, all_total, all_acc = merge(all_best, all_total, all_acc, best, total, acc)
    if PARALLEL:
        if first_split != last_split:
            part = ((tile * KV_HEADS + head) * PART_ROWS + index) * splits
            at = part_ptr + ((part + split) * HEAD)[:, None] + dims[None, :]
            tl.store(at, acc, mask=inside)
            tl.store(part_max_ptr + part + split, best, mask=mine)
            tl.store(part_sum_ptr + part + split, tl.max(total, axis=1), mask=mine)
            tl.debug_barrier()
            counter = done_ptr + tile * KV_HEADS + head
            if tl.atomic_add(counter, 1, sem="acq_rel") != last_split - first_split:
                return
            tl.store(counter, 0)
            tl.debug_barrier()
            best = tl.full((TILE_M,), float("-inf"), tl.float32)
            total = tl.zeros((TILE_M, SUMS), tl.float32)
            acc = tl.zeros((TILE_M, WIDE), tl.float32)
            for other in range(first_split, last_split + 1):
                next_best = tl.load(part_max_ptr + part + other, mask=mine, other=0.0, cache_modifier=".cg")
                next_sum = tl.load(part_sum_ptr + part + other, mask=mine, other=1.0, cache_modifier=".cg")
                next_total = tl.broadcast_to(next_sum[:, None], total.shape)
                at = part_ptr + ((part + other) * HEAD)[:, None] + dims[None, :]
                next_acc = tl.load(at, mask=inside, other=0.0, cache_modifier=".cg")
                best, total, acc = merge(best, total, acc, next_best, next_total, next_acc)
    else:
        best, total, acc = all_best, all_total, all_acc
    place = out_ptr + ((row * HEADS + head * SHARE + index % SHARE) * HEAD)[:, None] + dims[None, :]
    sums = tl.max(total, axis=1)
    if sinks_ptr is not None:
        sums, acc = add_sinks(best, sums, acc, load_sinks(sinks_ptr, head * SHARE + index % SHARE))
    tl.store(place, (acc * (1.0 / sums)[:, None]).to(DTYPE), mask=inside)


def tile_shape(dtype: torch.dtype, wide: int, share: int, single: bool) -> tuple[int, int]:
    """Rows and warps of a tile of one query, or of many. The interpreter's products are a library's, whose order may
    follow the shape: one shape for all there."""
    if single and not INTERPRETED:
        return max(16, triton.next_power_of_2(share)), 4
    rows = tile_rows(dtype, wide, share)
    return rows, 4 if dtype == torch.float32 else 8


def exact_attention(
    q: Tensor, attention: Attention, kv: KVLayer, batch: Batch, group: int, out: Tensor, scratch: DecodeScratch, *,
    tiles: Tensor | None, count: int, splits: int, single: bool, fused: bool = False,
) -> Tensor:  # fmt: skip
    """q (T, heads · head_dim), rotated, or with `fused` the raw projections of a step of streams, whose K and V are
    written too; only where q and k have no norms. tiles: `count` pairs of request and first query, or with `single` the
    requests that have one query (None: the first `count`). splits: at least split_count of the longest context, one
    program for each; 0: a program computes all of them."""
    dim, share = attention.head_dim, attention.heads // attention.kv_heads
    wide = max(16, triton.next_power_of_2(dim))
    scales = kv.key_scales if kv.key_scales is not None else kv.keys
    value_scales = kv.value_scales if kv.value_scales is not None else kv.keys
    tables, rope = batch.groups[group].tables, attention.rope
    rows, warps = tile_shape(q.dtype, wide, share, single)
    part_rows = attention.kv_heads * (share if single else rows)
    if count * part_rows * splits * dim > MOST_PARTS:
        splits = 0
    part, part_max, part_sum, done = scratch.reserve(count, part_rows, max(1, splits), dim)
    attend_kernel[(attention.kv_heads, count, max(1, splits))](
        q, out, part, part_max, part_sum, done, tables if tiles is None else tiles, batch.starts, batch.contexts,
        tables, kv.keys, kv.values, scales, value_scales, rope.cos if rope else q, rope.sin if rope else q,
        attention.sinks, attention.scale * LOG2E, attention.softcap, q.stride(0), tables.stride(0),
        *kv.keys.stride()[:3], *scales.stride()[:2], splits,
        HEADS=attention.heads, KV_HEADS=attention.kv_heads, HEAD=dim, WIDE=wide, FORMAT=FORMATS[kv.format],
        WINDOW=attention.window, SOFTCAP=attention.softcap > 0, BLOCK=BLOCK, TILE_M=rows,
        TILE_N=32 if q.dtype == torch.float32 or wide > 128 else 64,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", STAGES=2, PARALLEL=splits > 0,
        LISTED=0 if tiles is None else 1 if single else 2, PDL=PDL, FUSED=fused,
        HALF=rope.cos.shape[1] if rope else 0, num_warps=warps, enable_fp_fusion=False, **EARLY,
    )  # fmt: skip
    return out
