"""Latent attention in the absorbed form: what all heads share is read once for a tile of queries and heads.

A query head is its product with the head's part of `key_up` beside its rotated part. A cached entry is key and value in
one: its first LATENT numbers are the value. Entries are taken in tiles at fixed positions and summed in splits that end
where those of decode.py do, as in exact_attention.py: one program computes a split, and the last to finish merges all
of them in order of position. For many queries a program computes all splits of its rows. With EXACT it sums each split
by itself and merges, the same operations in the same order; else it takes the context as one. Without EXACT a single
query's context is cut into as many equal parts as fill the device, and a kernel of its own merges them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from twostroke.ops.cuda.kernels.decode import DecodeScratch, split_of, split_start
from twostroke.ops.cuda.kernels.exact_attention import LOG2E, MOST_PARTS, SUMS, merge
from twostroke.ops.cuda.kernels.launch import EARLY, INTERPRETED, PDL, gdc_launch_dependents, gdc_wait
from twostroke.ops.interface import BLOCK, Batch, KVLayer, LatentAttention

MOST_EVEN = 128  # equal parts of a context
PLACES = 396  # programs that fill an H200


@triton.jit(do_not_specialize=["rows"])
def head_product_kernel(
    x_ptr, w_ptr, out_ptr, rows, x_stride, x_head_stride, out_stride, out_head_stride,
    N: tl.constexpr, K: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Each head of each row times the head's own matrix (N, K), along K from the first column to the last."""
    head = tl.program_id(2).to(tl.int64)
    r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    w_rows = w_ptr + (head * N + tl.where(n < N, n, 0)) * K
    x_rows = x_ptr + tl.where(r < rows, r, 0).to(tl.int64) * x_stride + head * x_head_stride
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    acc = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
    for k0 in range(0, K, BLOCK_K):
        inside = (k0 + k < K)[None, :]
        w = tl.load(w_rows[:, None] + (k0 + k)[None, :], mask=inside, other=0.0)
        x = tl.load(x_rows[:, None] + (k0 + k)[None, :], mask=inside & (r < rows)[:, None], other=0.0)
        acc = tl.dot(x, tl.trans(w), acc, input_precision=PRECISION)
    place = out_ptr + r.to(tl.int64)[:, None] * out_stride + head * out_head_stride + n[None, :]
    tl.store(place, acc.to(out_ptr.dtype.element_ty), mask=(r < rows)[:, None] & (n < N)[None, :])


def head_product(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """out (T, heads, N) = x (T, heads, K) times weight (heads · N, K), head by head. A head's elements lie together."""
    rows, heads, k = x.shape
    n = out.shape[2]
    wide = x.dtype == torch.float32
    block_r = 16 if rows <= 16 or wide or INTERPRETED else 64
    head_product_kernel[(triton.cdiv(n, 64), triton.cdiv(rows, block_r), heads)](
        x, weight, out, rows, *x.stride()[:2], *out.stride()[:2], N=n, K=k, BLOCK_R=block_r, BLOCK_N=64,
        BLOCK_K=32 if wide else 64, PRECISION="ieee" if wide else "tf32", PDL=PDL, num_warps=4, **EARLY,
    )  # fmt: skip


@triton.jit
def rotated(x_ptr, x_stride, heads, cos_ptr, sin_ptr, position, HALF: tl.constexpr, HALF_2: tl.constexpr):
    """Both halves of 2 HALF numbers of each of `heads`, rotated: two of (heads, HALF_2)."""
    pair = tl.arange(0, HALF_2)
    inside = (pair < HALF)[None, :]
    at = x_ptr + heads[:, None] * x_stride + pair[None, :]
    first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + position * HALF + pair, mask=pair < HALF, other=0.0)[None, :]
    sin = tl.load(sin_ptr + position * HALF + pair, mask=pair < HALF, other=0.0)[None, :]
    return first * cos - second * sin, second * cos + first * sin


@triton.jit(do_not_specialize=["table_stride"])
def latent_store_kernel(
    q_ptr, kv_ptr, query_ptr, keys, norm_ptr, cos_ptr, sin_ptr, positions_ptr, slots_ptr, contexts_ptr, eps,
    q_stride, kv_stride, block_stride, token_stride, table_stride,
    HEADS: tl.constexpr, HEADS_2: tl.constexpr, PLAIN: tl.constexpr, LATENT: tl.constexpr, LATENT_2: tl.constexpr,
    HALF: tl.constexpr, HALF_2: tl.constexpr, BLOCK: tl.constexpr, STREAMS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The rotated part of every query head goes behind its absorbed part, the latent and the shared key part to the
    cache. STREAMS: a row is a request, and `slots_ptr` its table of blocks; rows without a context are padding."""
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + row)
    pair = tl.arange(0, HALF_2)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if tl.program_id(1) == 0:
        head = tl.arange(0, HEADS_2)
        mine = head < HEADS
        first, second = rotated(
            q_ptr + row * q_stride + PLAIN, PLAIN + 2 * HALF, tl.where(mine, head, 0), cos_ptr, sin_ptr, position,
            HALF, HALF_2,
        )  # fmt: skip
        behind = query_ptr + (row * HEADS + head)[:, None] * (LATENT + 2 * HALF) + LATENT + pair[None, :]
        inside = mine[:, None] & (pair < HALF)[None, :]
        tl.store(behind, first.to(query_ptr.dtype.element_ty), mask=inside)
        tl.store(behind + HALF, second.to(query_ptr.dtype.element_ty), mask=inside)
    else:
        if STREAMS:
            block = tl.load(slots_ptr + row * table_stride + position // BLOCK).to(tl.int64)
            offset = position % BLOCK
            stored = tl.load(contexts_ptr + row) > 0
        else:
            slot = tl.load(slots_ptr + row).to(tl.int64)
            block, offset = slot // BLOCK, slot % BLOCK
            stored = slot >= 0
        to = keys + block * block_stride + offset * token_stride
        dims = tl.arange(0, LATENT_2)
        x = tl.load(kv_ptr + row * kv_stride + dims, mask=dims < LATENT, other=0.0).to(tl.float32)
        x = x * tl.rsqrt(tl.sum(x * x) / LATENT + eps) * tl.load(norm_ptr + dims, mask=dims < LATENT, other=0.0)
        tl.store(to + dims, x.to(keys.dtype.element_ty), mask=dims < tl.where(stored, LATENT, 0))
        left, right = rotated(
            kv_ptr + row * kv_stride + LATENT, 0, tl.arange(0, 1), cos_ptr, sin_ptr, position, HALF, HALF_2
        )  # fmt: skip
        known = (pair < tl.where(stored, HALF, 0))[None, :]
        tl.store(to + LATENT + pair[None, :], left.to(keys.dtype.element_ty), mask=known)
        tl.store(to + LATENT + HALF + pair[None, :], right.to(keys.dtype.element_ty), mask=known)


def store_latents(
    q: Tensor, kv: Tensor, query: Tensor, attention: LatentAttention, cache: KVLayer, batch: Batch, group: int,
    streams: bool,
) -> None:  # fmt: skip
    """The rotated parts into query (T, heads, latent + rope_dim), the entries into the cache. Rows with a negative
    slot are padding."""
    blocks, half = batch.groups[group], attention.rope_dim // 2
    latent_store_kernel[(q.shape[0], 2)](
        q, kv, query, cache.keys, attention.norm.weight, attention.rope.cos, attention.rope.sin, batch.positions,
        blocks.tables if streams else blocks.slots, batch.contexts, attention.norm.eps, q.stride(0), kv.stride(0),
        cache.keys.stride(0), cache.keys.stride(2), blocks.tables.stride(0),
        HEADS=attention.heads, HEADS_2=triton.next_power_of_2(attention.heads), PLAIN=attention.plain_dim,
        LATENT=attention.latent, LATENT_2=triton.next_power_of_2(attention.latent), HALF=half,
        HALF_2=triton.next_power_of_2(half), BLOCK=BLOCK, STREAMS=streams, PDL=PDL, num_warps=4,
        enable_fp_fusion=False, **EARLY,
    )  # fmt: skip


@triton.jit
def visit(
    q, turned, best, total, acc, n0, context, positions, table, keys, factor, block_stride, token_stride,
    LATENT: tl.constexpr, LATENT_2: tl.constexpr, ROPE: tl.constexpr, ROPE_2: tl.constexpr, BLOCK: tl.constexpr,
    TILE_N: tl.constexpr, MASKED: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of entries added to a split's maximum, sum and accumulator."""
    places = n0 + tl.arange(0, TILE_N)
    valid = places < context
    blocks = tl.load(table + places // BLOCK, mask=valid, other=0).to(tl.int64)
    rows = keys + blocks * block_stride + places % BLOCK * token_stride
    dims, pairs = tl.arange(0, LATENT_2), tl.arange(0, ROPE_2)
    entry = tl.load(rows[:, None] + dims[None, :], mask=valid[:, None] & (dims < LATENT)[None, :], other=0.0).to(DTYPE)
    shared = tl.load(
        rows[:, None] + LATENT + pairs[None, :], mask=valid[:, None] & (pairs < ROPE)[None, :], other=0.0
    ).to(DTYPE)
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


@triton.jit
def part_length(context, splits, TILE_N: tl.constexpr):
    """Tokens of an equal part."""
    return tl.maximum(tl.cdiv(tl.cdiv(context, splits), TILE_N), 1) * TILE_N


@triton.jit(do_not_specialize=["splits"])
def latent_merge_kernel(
    part_ptr, part_max_ptr, part_sum_ptr, out_ptr, tiles_ptr, starts_ptr, contexts_ptr, splits,
    HEADS: tl.constexpr, HEADS_T: tl.constexpr, LATENT: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    LISTED: tl.constexpr, SPLITS_2: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The equal parts of one query head's context, merged."""
    tile, head = tl.program_id(0), tl.program_id(1)
    dims = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    request = tile
    if LISTED == 1:
        request = tl.load(tiles_ptr + tile)
    context = tl.load(contexts_ptr + request)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if context <= 0:
        return
    split = tl.arange(0, SPLITS_2)
    there = split <= (context - 1) // part_length(context, splits, TILE_N)
    groups: tl.constexpr = (HEADS + HEADS_T - 1) // HEADS_T
    part = ((tile * groups + head // HEADS_T) * TILE_M + head % HEADS_T) * splits + split
    most = tl.load(part_max_ptr + part, mask=there, other=float("-inf"))
    weight = tl.exp2(most - tl.max(most, axis=0))
    total = tl.sum(weight * tl.load(part_sum_ptr + part, mask=there, other=0.0), axis=0)
    at = part_ptr + (part.to(tl.int64) * LATENT)[:, None] + dims[None, :]
    parts = tl.load(at, mask=there[:, None] & (dims < LATENT)[None, :], other=0.0)
    row = tl.load(starts_ptr + request).to(tl.int64)
    out = tl.sum(parts * weight[:, None], axis=0) / total
    tl.store(out_ptr + (row * HEADS + head) * LATENT + dims, out.to(out_ptr.dtype.element_ty), mask=dims < LATENT)


@triton.jit(do_not_specialize=["splits", "table_stride"])
def latent_kernel(
    q_ptr, out_ptr, part_ptr, part_max_ptr, part_sum_ptr, done_ptr, tiles_ptr, starts_ptr, contexts_ptr, tables_ptr,
    keys, factor, table_stride, block_stride, token_stride, splits,
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
                q, turned, best, total, acc, n0, context, positions, table, keys, factor, block_stride, token_stride,
                LATENT, LATENT_2, ROPE, ROPE_2, BLOCK, TILE_N, False, DTYPE, PRECISION,
            )  # fmt: skip
        for n0 in tl.range(until, end, TILE_N, num_stages=STAGES):
            best, total, acc = visit(
                q, turned, best, total, acc, n0, context, positions, table, keys, factor, block_stride, token_stride,
                LATENT, LATENT_2, ROPE, ROPE_2, BLOCK, TILE_N, True, DTYPE, PRECISION,
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
                    q, turned, best, total, acc, n0, context, positions, table, keys, factor, block_stride,
                    token_stride, LATENT, LATENT_2, ROPE, ROPE_2, BLOCK, TILE_N, True, DTYPE, PRECISION,
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
    heads, latent, rope = attention.heads, attention.latent, attention.rope_dim
    wide = query.dtype == torch.float32
    rows, heads_t = latent_tile(query.dtype, heads, exact)
    if single:
        rows = 16 if wide or INTERPRETED else max(16, min(64, triton.next_power_of_2(heads)))
        heads_t = min(heads, rows)
    groups = triton.cdiv(heads, heads_t)
    even = single and not exact
    if even:
        splits = even_parts(count * groups, batch.groups[group].tables.shape[1] * BLOCK)
    elif count * groups * rows * splits * latent > (4 if single else 1) * MOST_PARTS:
        splits = 0
    part, part_max, part_sum, done = scratch.reserve(count, groups * rows, max(1, splits), latent)
    tables = batch.groups[group].tables
    latent_kernel[(groups, count, max(1, splits))](
        query, out, part, part_max, part_sum, done, tables if tiles is None else tiles, batch.starts, batch.contexts,
        tables, cache.keys, attention.scale * LOG2E, tables.stride(0), cache.keys.stride(0), cache.keys.stride(2),
        splits,
        HEADS=heads, HEADS_T=heads_t, LATENT=latent, LATENT_2=max(16, triton.next_power_of_2(latent)), ROPE=rope,
        ROPE_2=max(16, triton.next_power_of_2(rope)), BLOCK=BLOCK, TILE_M=rows, TILE_N=16 if wide else 32,
        PRECISION="ieee" if wide else "tf32", STAGES=2, PARALLEL=splits > 0, EXACT=exact,
        LISTED=0 if tiles is None else 1 if single else 2, EVEN=even, PDL=PDL, num_warps=8 if rows >= 32 else 4,
        enable_fp_fusion=False, **EARLY,
    )  # fmt: skip
    if even:
        latent_merge_kernel[(count, heads, triton.cdiv(latent, 128))](
            part, part_max, part_sum, out, tables if tiles is None else tiles, batch.starts, batch.contexts, splits,
            HEADS=heads, HEADS_T=heads_t, LATENT=latent, TILE_M=rows, TILE_N=16 if wide else 32,
            LISTED=0 if tiles is None else 1, SPLITS_2=MOST_EVEN, BLOCK=128, PDL=PDL, num_warps=4, **EARLY,
        )  # fmt: skip


def even_parts(programs: int, context: int) -> int:
    """Parts of a context of up to `context` tokens, of at least 64 each, for so many programs beside each other."""
    return max(1, min(MOST_EVEN, PLACES // max(1, programs), context // 64))
