"""Latent attention in the absorbed form: what all heads share is read once for a tile of queries and heads.

A query head is its product with the head's part of `key_up` beside its rotated part. A cached entry is key and value in
one: its first LATENT numbers are the value. Entries are taken in tiles at fixed positions and summed in splits that end
where those of decode.py do, as in exact_attention.py: one program computes a split, and the last to finish merges all
of them in order of position. For many queries a program computes all splits of its rows. With EXACT it sums each split
by itself and merges, the same operations in the same order; else it takes the context as one. Without EXACT a single
query's context is cut into as many equal parts as fill the device, and the kernel that follows merges them
(latent_ends.py); where heads are few, latent_decode.py computes the parts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from twostroke.ops.cuda.kernels.decode import DecodeScratch, split_of, split_start
from twostroke.ops.cuda.kernels.exact_attention import LOG2E, MOST_PARTS, SUMS, merge
from twostroke.ops.cuda.kernels.heads import in_order
from twostroke.ops.cuda.kernels.latent_decode import few_heads_kernel, part_length
from twostroke.ops.cuda.kernels.latent_ends import MOST_EVEN, Parts, cache_strides, merge_parts
from twostroke.ops.cuda.kernels.launch import EARLY, INTERPRETED, PDL, gdc_launch_dependents, gdc_wait
from twostroke.ops.interface import BLOCK, LATENT_GROUP, Batch, KVLayer, LatentAttention

PLACES = 264  # programs that fill an H200
FEW_HEADS = 16  # that latent_decode.py serves
GROUP = tl.constexpr(LATENT_GROUP)  # numbers that share a scale


@triton.jit
def visit(
    q, turned, best, total, acc, n0, context, positions, table, keys, scales, factor, block_stride, token_stride,
    scale_block_stride, scale_group_stride, LATENT: tl.constexpr, LATENT_2: tl.constexpr, ROPE: tl.constexpr,
    ROPE_2: tl.constexpr, BLOCK: tl.constexpr, TILE_N: tl.constexpr, MASKED: tl.constexpr, DTYPE: tl.constexpr,
    PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """One tile of entries added to a split's maximum, sum and accumulator."""
    places = n0 + tl.arange(0, TILE_N)
    valid = places < context
    blocks = tl.load(table + places // BLOCK, mask=valid, other=0).to(tl.int64)
    rows = keys + blocks * block_stride + places % BLOCK * token_stride
    dims, pairs = tl.arange(0, LATENT_2), tl.arange(0, ROPE_2)
    inside = valid[:, None] & (dims < LATENT)[None, :]
    entry = tl.load(rows[:, None] + dims[None, :], mask=inside, other=0.0)
    shared = tl.load(rows[:, None] + LATENT + pairs[None, :], mask=valid[:, None] & (pairs < ROPE)[None, :], other=0.0)
    if scales is not None:
        factors = scales + blocks * scale_block_stride + places % BLOCK
        groups = (dims // GROUP * scale_group_stride)[None, :]
        entry = entry.to(tl.float32) * tl.load(factors[:, None] + groups, mask=inside, other=0.0)
        turned_scale = tl.load(factors + LATENT // GROUP * scale_group_stride, mask=valid, other=0.0)
        shared = shared.to(tl.float32) * turned_scale[:, None]
    entry, shared = entry.to(DTYPE), shared.to(DTYPE)
    if EXACT and scales is not None:
        entry, shared = in_order(entry), in_order(shared)
    s = tl.dot(q, tl.trans(entry), input_precision=PRECISION)
    s = tl.dot(turned, tl.trans(shared), s, input_precision=PRECISION)
    if MASKED:
        s = tl.where((places[None, :] <= positions[:, None]) & valid[None, :], s, float("-inf"))
    new = tl.maximum(best, tl.max(s, axis=1) * factor)
    stable = tl.where(new == float("-inf"), 0.0, new)
    p = tl.exp2(tl.fma(s, tl.full(s.shape, 1.0, tl.float32) * factor, tl.broadcast_to(-stable[:, None], s.shape)))
    shrink = tl.exp2(best - stable)
    ones = tl.full((TILE_N, SUMS), 1.0, DTYPE)
    total = tl.dot(p.to(DTYPE), ones, total * shrink[:, None], input_precision=PRECISION)
    acc = tl.dot(p.to(DTYPE), entry, acc * shrink[:, None], input_precision=PRECISION)
    return new, total, acc


@triton.jit(do_not_specialize=["splits", "table_stride"])
def latent_kernel(
    q_ptr, out_ptr, part_ptr, part_max_ptr, part_sum_ptr, done_ptr, tiles_ptr, starts_ptr, contexts_ptr, tables_ptr,
    keys, scales, factor, table_stride, block_stride, token_stride, scale_block_stride, scale_group_stride, splits,
    HEADS: tl.constexpr, HEADS_T: tl.constexpr, LATENT: tl.constexpr, LATENT_2: tl.constexpr, ROPE: tl.constexpr,
    ROPE_2: tl.constexpr, BLOCK: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr, PARALLEL: tl.constexpr, EXACT: tl.constexpr, LISTED: tl.constexpr, EVEN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A tile is HEADS_T heads of TILE_M / HEADS_T queries; LISTED as in exact_attention.py. EVEN: with PARALLEL, equal
    parts of the context, `splits` of them, which are left to be merged. out (T, HEADS, LATENT)."""
    QUERIES: tl.constexpr = TILE_M // HEADS_T if LISTED == 2 else 1
    DTYPE: tl.constexpr = q_ptr.dtype.element_ty
    WIDTH: tl.constexpr = LATENT + ROPE
    heads, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
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
    last_split = split_of(tl.maximum(high - 1, 0))
    length = part_length(high, splits, TILE_N)
    if EVEN:
        last_split = tl.maximum(high - 1, 0) // length
    empty = (context <= 0) | (first_query >= stop - start)
    if PARALLEL:
        empty = empty | (split > last_split)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if empty:
        return
    index = tl.arange(0, TILE_M)
    query, head = first_query + index // HEADS_T, heads * HEADS_T + index % HEADS_T
    mine = (index < QUERIES * HEADS_T) & (query < stop - start) & (head < HEADS)
    positions = tl.where(mine, before + query, low)
    row = tl.where(mine, start + query, start).to(tl.int64)
    head = tl.where(mine, head, 0)
    dims, pairs = tl.arange(0, LATENT_2), tl.arange(0, ROPE_2)
    inside = mine[:, None] & (dims < LATENT)[None, :]
    q_rows = q_ptr + (row * HEADS + head) * WIDTH
    q = tl.load(q_rows[:, None] + dims[None, :], mask=inside, other=0.0)
    turned = tl.load(q_rows[:, None] + LATENT + pairs[None, :], mask=mine[:, None] & (pairs < ROPE)[None, :], other=0.0)
    table = tables_ptr + request * table_stride
    whole = (low + 1) // TILE_N * TILE_N  # tiles below are seen by every query
    best = tl.full((TILE_M,), float("-inf"), tl.float32)
    total = tl.zeros((TILE_M, SUMS), tl.float32)
    acc = tl.zeros((TILE_M, LATENT_2), tl.float32)
    if PARALLEL or not EXACT:
        begin, end = 0, high
        if PARALLEL:
            begin, end = split_start(split), tl.minimum(high, split_start(split + 1))
        if EVEN:
            begin, end = split * length, tl.minimum(high, (split + 1) * length)
        until = tl.maximum(begin, tl.minimum(whole, end // TILE_N * TILE_N))
        for n0 in tl.range(begin, until, TILE_N, num_stages=STAGES):
            best, total, acc = visit(
                q, turned, best, total, acc, n0, context, positions, table, keys, scales, factor, block_stride,
                token_stride, scale_block_stride, scale_group_stride, LATENT, LATENT_2, ROPE, ROPE_2, BLOCK, TILE_N,
                False, DTYPE, PRECISION, EXACT,
            )  # fmt: skip
        for n0 in tl.range(until, end, TILE_N, num_stages=STAGES):
            best, total, acc = visit(
                q, turned, best, total, acc, n0, context, positions, table, keys, scales, factor, block_stride,
                token_stride, scale_block_stride, scale_group_stride, LATENT, LATENT_2, ROPE, ROPE_2, BLOCK, TILE_N,
                True, DTYPE, PRECISION, EXACT,
            )  # fmt: skip
    else:
        all_best, all_total, all_acc = best, total, acc
        for part_of in range(0, last_split + 1):
            begin, end = split_start(part_of), tl.minimum(high, split_start(part_of + 1))
            best = tl.full((TILE_M,), float("-inf"), tl.float32)
            total = tl.zeros((TILE_M, SUMS), tl.float32)
            acc = tl.zeros((TILE_M, LATENT_2), tl.float32)
            for n0 in tl.range(begin, end, TILE_N, num_stages=STAGES):
                best, total, acc = visit(
                    q, turned, best, total, acc, n0, context, positions, table, keys, scales, factor, block_stride,
                    token_stride, scale_block_stride, scale_group_stride, LATENT, LATENT_2, ROPE, ROPE_2, BLOCK,
                    TILE_N, True, DTYPE, PRECISION, EXACT,
                )  # fmt: skip
            all_best, all_total, all_acc = merge(all_best, all_total, all_acc, best, total, acc)
        best, total, acc = all_best, all_total, all_acc
    if EVEN:
        part = ((tile * tl.num_programs(0) + heads) * TILE_M + index) * splits + split
        tl.store(part_ptr + (part.to(tl.int64) * LATENT)[:, None] + dims[None, :], acc, mask=inside)
        tl.store(part_max_ptr + part, best, mask=mine)
        tl.store(part_sum_ptr + part, tl.max(total, axis=1), mask=mine)
        return
    if PARALLEL:  # noqa: SIM102  (one is known at compile time)
        if last_split > 0:
            programs = tl.num_programs(0)
            part = ((tile * programs + heads) * TILE_M + index) * splits
            at = part_ptr + ((part + split).to(tl.int64) * LATENT)[:, None] + dims[None, :]
            tl.store(at, acc, mask=inside)
            tl.store(part_max_ptr + part + split, best, mask=mine)
            tl.store(part_sum_ptr + part + split, tl.max(total, axis=1), mask=mine)
            tl.debug_barrier()
            counter = done_ptr + tile * programs + heads
            if tl.atomic_add(counter, 1, sem="acq_rel") != last_split:
                return
            tl.store(counter, 0)
            tl.debug_barrier()
            best = tl.full((TILE_M,), float("-inf"), tl.float32)
            total = tl.zeros((TILE_M, SUMS), tl.float32)
            acc = tl.zeros((TILE_M, LATENT_2), tl.float32)
            for other in range(0, last_split + 1):
                next_best = tl.load(part_max_ptr + part + other, mask=mine, other=0.0, cache_modifier=".cg")
                next_sum = tl.load(part_sum_ptr + part + other, mask=mine, other=1.0, cache_modifier=".cg")
                at = part_ptr + ((part + other).to(tl.int64) * LATENT)[:, None] + dims[None, :]
                next_acc = tl.load(at, mask=inside, other=0.0, cache_modifier=".cg")
                next_total = tl.broadcast_to(next_sum[:, None], total.shape)
                best, total, acc = merge(best, total, acc, next_best, next_total, next_acc)
    to = out_ptr + ((row * HEADS + head) * LATENT)[:, None] + dims[None, :]
    tl.store(to, (acc * (1.0 / tl.max(total, axis=1))[:, None]).to(DTYPE), mask=inside)


def latent_tile(dtype: torch.dtype, heads: int, exact: bool) -> tuple[int, int]:
    """Rows of a tile of many queries, and how many heads of a query it holds."""
    rows = 16 if dtype == torch.float32 or INTERPRETED else 32 if exact else 64
    return rows, min(heads, rows)


def latent_attention(
    query: Tensor, attention: LatentAttention, cache: KVLayer, batch: Batch, group: int, out: Tensor,
    scratch: DecodeScratch, *, tiles: Tensor | None, count: int, splits: int, single: bool, exact: bool,
) -> None:  # fmt: skip
    """query (T, heads, latent + rope_dim) -> out (T, heads, latent), the weighted sums of latents. tiles, count, splits
    and single: as in exact_attention.py."""
    heads, latent = attention.heads, attention.latent
    wide = query.dtype == torch.float32
    rows, heads_t = latent_tile(query.dtype, heads, exact)
    if single:
        rows = 16 if wide or INTERPRETED else max(16, min(64, triton.next_power_of_2(heads)))
        heads_t = min(heads, rows)
    groups = triton.cdiv(heads, heads_t)
    if single and not exact:
        parts = few_heads_parts if heads <= FEW_HEADS else many_heads_parts
        merge_parts(parts(query, attention, cache, batch, group, scratch, tiles, count), attention, batch, tiles, out)
        return
    if count * groups * rows * splits * latent > (4 if single else 1) * MOST_PARTS:
        splits = 0
    part, part_max, part_sum, done = scratch.reserve(count, groups * rows, max(1, splits), latent)
    tables = batch.groups[group].tables
    latent_kernel[(groups, count, max(1, splits))](
        query, out, part, part_max, part_sum, done, tables if tiles is None else tiles, batch.starts, batch.contexts,
        tables, cache.keys, cache.key_scales, attention.scale * LOG2E, tables.stride(0), *cache_strides(cache), splits,
        **latent_constants(attention, wide, rows, heads_t), PARALLEL=splits > 0, EXACT=exact,
        LISTED=0 if tiles is None else 1 if single else 2, EVEN=False, PDL=PDL, num_warps=8 if rows >= 32 else 4,
        enable_fp_fusion=False, **EARLY,
    )  # fmt: skip


def latent_constants(attention: LatentAttention, wide: bool, rows: int, heads_t: int) -> dict[str, object]:
    latent, rope = attention.latent, attention.rope_dim
    return {
        "HEADS": attention.heads, "HEADS_T": heads_t, "LATENT": latent,
        "LATENT_2": max(16, triton.next_power_of_2(latent)), "ROPE": rope,
        "ROPE_2": max(16, triton.next_power_of_2(rope)), "BLOCK": BLOCK, "TILE_M": rows, "TILE_N": 16 if wide else 32,
        "PRECISION": "ieee" if wide else "tf32", "STAGES": 2,
    }  # fmt: skip


def many_heads_parts(
    query: Tensor, attention: LatentAttention, cache: KVLayer, batch: Batch, group: int, scratch: DecodeScratch,
    listed: Tensor | None, count: int,
) -> Parts:  # fmt: skip
    """Single tokens of any number of heads."""
    wide = query.dtype == torch.float32
    rows = 16 if wide or INTERPRETED else max(16, min(64, triton.next_power_of_2(attention.heads)))
    heads_t, tables = min(attention.heads, rows), batch.groups[group].tables
    groups = triton.cdiv(attention.heads, heads_t)
    splits = even_parts(count * groups, tables.shape[1] * BLOCK, PLACES)
    part, part_max, part_sum, done = scratch.reserve(count, groups * rows, splits, attention.latent)
    latent_kernel[(groups, count, splits)](
        query, query, part, part_max, part_sum, done, tables if listed is None else listed, batch.starts,
        batch.contexts, tables, cache.keys, cache.key_scales, attention.scale * LOG2E, tables.stride(0),
        *cache_strides(cache), splits, **latent_constants(attention, wide, rows, heads_t), PARALLEL=True, EXACT=False,
        LISTED=0 if listed is None else 1, EVEN=True, PDL=PDL, num_warps=8 if rows >= 32 else 4,
        enable_fp_fusion=False, **EARLY,
    )  # fmt: skip
    return Parts(part, part_max, part_sum, count, splits, 16 if wide else 32, heads_t, rows, done)


def few_heads_parts(
    query: Tensor, attention: LatentAttention, cache: KVLayer, batch: Batch, group: int, scratch: DecodeScratch,
    listed: Tensor | None, count: int,
) -> Parts:  # fmt: skip
    """Single tokens with few heads."""
    heads, tables, wide = attention.heads, batch.groups[group].tables, query.dtype == torch.float32
    splits = even_parts(count, tables.shape[1] * BLOCK, PLACES)
    part, part_max, part_sum, done = scratch.reserve(count, heads, splits, attention.latent)
    tile = 16 if wide else 32
    few_heads_kernel[(count, splits)](
        query, part, part_max, part_sum, tables if listed is None else listed, batch.starts, batch.contexts, tables,
        cache.keys, cache.key_scales, attention.scale * LOG2E, tables.stride(0), *cache_strides(cache), splits,
        HEADS=heads, HEADS_2=max(16, triton.next_power_of_2(heads)), LATENT=attention.latent, ROPE=attention.rope_dim,
        ROPE_2=max(16, triton.next_power_of_2(attention.rope_dim)), CUT=LATENT_GROUP, BLOCK=BLOCK, TILE_N=tile,
        PRECISION="ieee" if wide else "tf32", STAGES=1 if wide else 3, LISTED=listed is not None,
        PDL=PDL, num_warps=4, **EARLY,
    )  # fmt: skip
    return Parts(part, part_max, part_sum, count, splits, tile, heads, heads, done)


def even_parts(programs: int, context: int, places: int) -> int:
    """Parts of a context of up to `context` tokens, of at least 64 each, for so many programs beside each other."""
    return max(1, min(MOST_EVEN, places // max(1, programs), context // 64))
