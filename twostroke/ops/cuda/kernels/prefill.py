"""Attention of many new tokens per request: tiles of queries walk over the cached blocks, flash-attention style.

The query heads that share a K/V head lie in one tile, so K and V are read once for all of them. Tiles of all requests
of a step are one list, the longest first, so that a mixed batch is one launch. A short chunk of a long context makes
few tiles: then several programs share a tile's context and a second kernel merges their results.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from twostroke.ops.cuda.kernels.heads import FORMATS, load_tile
from twostroke.ops.cuda.kernels.launch import EARLY, gdc_launch_dependents, gdc_wait
from twostroke.ops.cuda.kernels.rows import tanh
from twostroke.ops.cuda.kernels.sinks import add_sinks, load_sinks
from twostroke.ops.interface import BLOCK, Attention, Batch, KVLayer

LOG2E = tl.constexpr(1.4426950408889634)
PROCESSORS = 132  # of an H200, with room for two programs each; elsewhere the last round of programs is less full
MOST_SPLITS = 16  # programs that share a tile's context
LONE = 0.65  # time of a program alone on a multiprocessor, over that of two side by side


@triton.jit
def products(
    q, n0, end, table, keys, key_scales, block_stride, token_stride, scale_block_stride,
    HEAD: tl.constexpr, WIDE: tl.constexpr, FORMAT: tl.constexpr, BLOCK: tl.constexpr, TILE_N: tl.constexpr,
    MASKED: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr, ORDERED: tl.constexpr = False,
):  # fmt: skip
    """q times the keys of a tile of positions, and where the tile's tokens and their scales lie."""
    places = n0 + tl.arange(0, TILE_N)
    valid = places < end
    blocks = tl.load(table + places // BLOCK, mask=valid, other=0) if MASKED else tl.load(table + places // BLOCK)
    k = load_tile(
        keys, blocks, places % BLOCK, valid, block_stride, token_stride, 1, HEAD, WIDE, MASKED, DTYPE, ORDERED
    )
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    where = blocks.to(tl.int64) * scale_block_stride + places % BLOCK
    if FORMAT > 0:
        s *= tl.load(key_scales + where, mask=valid, other=0.0)[None, :]
    return places, valid, blocks, where, s


@triton.jit
def visible(places, positions, valid, WINDOW: tl.constexpr):
    """Which tokens of a tile each query sees."""
    seen = (places[None, :] <= positions[:, None]) & valid[None, :]
    if WINDOW > 0:
        seen &= places[None, :] > positions[:, None] - WINDOW
    return seen


@triton.jit
def step(
    q, best, total, acc, n0, end, positions, table, keys, values, key_scales, value_scales, scale, softcap,
    block_stride, token_stride, scale_block_stride,
    HEAD: tl.constexpr, WIDE: tl.constexpr, FORMAT: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr, TILE_N: tl.constexpr, MASKED: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    places, valid, blocks, where, s = products(
        q, n0, end, table, keys, key_scales, block_stride, token_stride, scale_block_stride,
        HEAD, WIDE, FORMAT, BLOCK, TILE_N, MASKED, DTYPE, PRECISION,
    )  # fmt: skip
    if SOFTCAP:
        s = softcap * tanh(s * scale / softcap) * LOG2E
    else:
        s *= scale * LOG2E
    if MASKED:
        s = tl.where(visible(places, positions, valid, WINDOW), s, float("-inf"))
    new = tl.maximum(best, tl.max(s, axis=1))
    stable = tl.where(new == float("-inf"), 0.0, new) if MASKED else new  # a query may see nothing of a tile
    p = tl.exp2(s - stable[:, None])
    shrink = tl.exp2(best - stable)
    total = total * shrink + tl.sum(p, axis=1)
    v = load_tile(
        values, blocks, places % BLOCK, valid, block_stride, 1 if FORMAT > 0 else token_stride,
        BLOCK if FORMAT > 0 else 1, HEAD, WIDE, MASKED, DTYPE,
    )  # fmt: skip
    if FORMAT > 0:
        p *= tl.load(value_scales + where, mask=valid, other=0.0)[None, :]
    acc = acc * shrink[:, None]
    acc = tl.dot(p.to(DTYPE), v, acc, input_precision=PRECISION)
    return new, total, acc


@triton.jit(do_not_specialize=["rows", "table_stride", "splits"])
def prefill_kernel(
    q_ptr, out_ptr, part_ptr, part_max_ptr, part_sum_ptr, tiles_ptr, starts_ptr, contexts_ptr, tables_ptr, keys, values,
    key_scales, value_scales, sinks_ptr, scale, softcap, rows, splits, q_stride, table_stride,
    block_stride, head_stride, token_stride, scale_block_stride,
    scale_head_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD: tl.constexpr, WIDE: tl.constexpr, FORMAT: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr, SPLIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    SHARE: tl.constexpr = HEADS // KV_HEADS
    QUERIES: tl.constexpr = TILE_M // SHARE
    DTYPE: tl.constexpr = q_ptr.dtype.element_ty
    head, tile = tl.program_id(0), tl.program_id(1)
    request, first_query = tl.load(tiles_ptr + 2 * tile), tl.load(tiles_ptr + 2 * tile + 1)
    start, stop = tl.load(starts_ptr + request), tl.load(starts_ptr + request + 1)
    context = tl.load(contexts_ptr + request)
    index = tl.arange(0, TILE_M)
    query = first_query + index // SHARE
    mine = (index < QUERIES * SHARE) & (query < stop - start)
    before = context - (stop - start)  # tokens in the cache before this step
    positions = tl.where(mine, before + query, before + first_query)
    dims = tl.arange(0, WIDE)
    row = (start + query).to(tl.int64)
    inside = mine[:, None] & (dims < HEAD)[None, :]
    q = tl.load(
        q_ptr + (row * q_stride + (head * SHARE + index % SHARE) * HEAD)[:, None] + dims[None, :],
        mask=inside,
        other=0.0,
    )
    table = tables_ptr + request * table_stride
    keys += head * head_stride
    values += head * head_stride
    key_scales += head * scale_head_stride
    value_scales += head * scale_head_stride
    low = before + first_query  # position of the first query
    high = tl.minimum(low + QUERIES, context)  # one past the last
    begin = 0
    whole = (low + 1) // TILE_N * TILE_N  # tiles below this are seen by every query (but for a window)
    if WINDOW > 0:
        begin = tl.maximum(low - WINDOW + 1, 0) // TILE_N * TILE_N
        whole = begin
    if SPLIT:
        length = tl.cdiv(tl.cdiv(high - begin, TILE_N), splits) * TILE_N
        begin += tl.program_id(2) * length
        high = tl.minimum(high, begin + length)
        whole = tl.minimum(tl.maximum(whole, begin), tl.maximum(high, begin) // TILE_N * TILE_N)
    best = tl.full((TILE_M,), float("-inf"), tl.float32)
    total = tl.zeros((TILE_M,), tl.float32)
    acc = tl.zeros((TILE_M, WIDE), tl.float32)
    for n0 in tl.range(begin, whole, TILE_N, num_stages=STAGES):
        best, total, acc = step(
            q, best, total, acc, n0, context, positions, table, keys, values, key_scales, value_scales, scale, softcap,
            block_stride, token_stride, scale_block_stride,
            HEAD, WIDE, FORMAT, WINDOW, SOFTCAP, BLOCK, TILE_N, False, DTYPE, PRECISION,
        )  # fmt: skip
    for n0 in tl.range(whole, high, TILE_N, num_stages=STAGES):
        best, total, acc = step(
            q, best, total, acc, n0, context, positions, table, keys, values, key_scales, value_scales, scale, softcap,
            block_stride, token_stride, scale_block_stride,
            HEAD, WIDE, FORMAT, WINDOW, SOFTCAP, BLOCK, TILE_N, True, DTYPE, PRECISION,
        )  # fmt: skip
    place = row * HEADS + head * SHARE + index % SHARE
    if not SPLIT:
        if sinks_ptr is not None:
            sinks = load_sinks(sinks_ptr, head * SHARE + index % SHARE)
            total, acc = add_sinks(best, total, acc, sinks)
        tl.store(out_ptr + (place * HEAD)[:, None] + dims[None, :], (acc / total[:, None]).to(DTYPE), mask=inside)
    else:
        place += tl.program_id(2).to(tl.int64) * rows * HEADS
        tl.store(part_ptr + (place * HEAD)[:, None] + dims[None, :], acc, mask=inside)
        tl.store(part_max_ptr + place, best, mask=mine)
        tl.store(part_sum_ptr + place, total, mask=mine)


@triton.jit(do_not_specialize=["rows", "splits"])
def combine_kernel(
    part_ptr, part_max_ptr, part_sum_ptr, sinks_ptr, out_ptr, tiles_ptr, starts_ptr, rows, splits,
    HEADS: tl.constexpr, HEAD: tl.constexpr, WIDE: tl.constexpr, MOST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Merges the partial results of one query and head."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    tile, query = tl.program_id(0), tl.program_id(1)
    request, first_query = tl.load(tiles_ptr + 2 * tile), tl.load(tiles_ptr + 2 * tile + 1)
    start, stop = tl.load(starts_ptr + request), tl.load(starts_ptr + request + 1)
    row = (start + first_query + query).to(tl.int64)
    if row >= stop:
        return
    dims, split = tl.arange(0, WIDE), tl.arange(0, MOST)
    place, mine = row * HEADS + tl.program_id(2), split < splits
    at = place + split * rows.to(tl.int64) * HEADS
    best = tl.load(part_max_ptr + at, mask=mine, other=float("-inf"))
    sums = tl.load(part_sum_ptr + at, mask=mine, other=0.0)
    inside = mine[:, None] & (dims < HEAD)[None, :]
    parts = tl.load(part_ptr + (at * HEAD)[:, None] + dims[None, :], mask=inside, other=0.0)
    top = tl.max(best, axis=0)
    if sinks_ptr is not None:
        sink = load_sinks(sinks_ptr, tl.program_id(2))
        top = tl.maximum(top, sink)
    weight = tl.exp2(best - top)
    acc, total = tl.sum(weight[:, None] * parts, axis=0), tl.sum(weight * sums, axis=0)
    if sinks_ptr is not None:
        total += tl.exp2(sink - top)
    out = acc / total
    tl.store(out_ptr + place * HEAD + dims, out.to(out_ptr.dtype.element_ty), mask=dims < HEAD)


def split_for(tiles: int, kv_heads: int, rows: int, context: int) -> int:
    """Programs that share one tile's context: the power of two that keeps all multiprocessors busy longest."""

    def cost(splits: int) -> float:
        """The time of so many splits, in units of the time that one of two programs on a multiprocessor takes for a
        whole context."""
        rounds, rest = divmod(tiles * kv_heads * splits, 2 * PROCESSORS)
        last = 0.0 if rest == 0 else LONE if rest <= PROCESSORS else 1.0
        return (rounds + last) / splits + splits * rows / (6 * context)  # partial results are written, read and merged

    most = max(1, min(context // 1024, 16384 // max(rows, 1), MOST_SPLITS))
    return min((splits for splits in (1, 2, 4, 8, 16) if splits <= most), key=cost)


def draft_splits(tiles: int, kv_heads: int, context: int) -> int:
    """The same for tiles of a few rows, where reading the context is all there is to do."""
    splits = max(1, min(2 * PROCESSORS // (tiles * kv_heads), context // 256, MOST_SPLITS))
    return 1 << (splits.bit_length() - 1)


def tile_rows(dtype: torch.dtype, wide: int, share: int) -> int:
    rows = 64 if dtype == torch.float32 or wide > 128 else 128
    return max(rows, triton.next_power_of_2(share))


def make_tiles(
    counts: np.ndarray, contexts: np.ndarray, wanted: np.ndarray, queries: int, done: np.ndarray | None = None
) -> np.ndarray:
    """(tiles, 2) int32: request and first query of every tile of the `wanted` requests, the most work first.
    done: how many of each one's first queries another kernel computes."""
    skipped = np.zeros(len(wanted), np.int64) if done is None else done
    per = -(-(counts[wanted] - skipped) // queries)
    request = np.repeat(wanted, per)
    first = (np.arange(per.sum()) - np.repeat(np.cumsum(per) - per, per)) * queries + np.repeat(skipped, per)
    work = contexts[request] - counts[request] + first
    tiles = np.stack((request, first), axis=1).astype(np.int32)
    return np.ascontiguousarray(tiles[np.argsort(-work, kind="stable")])


def prefill_attention(
    q: Tensor, attention: Attention, kv: KVLayer, batch: Batch, group: int, out: Tensor, tiles: Tensor, *,
    splits: int = 1, queries: int = 0, tile_n: int | None = None, stages: int | None = None, warps: int | None = None,
) -> Tensor:  # fmt: skip
    """queries: the most that a tile has, where they are few; 0: as many as it may."""
    dim, share = attention.head_dim, attention.heads // attention.kv_heads
    wide = max(16, triton.next_power_of_2(dim))
    scales = kv.key_scales if kv.key_scales is not None else kv.keys
    value_scales = kv.value_scales if kv.value_scales is not None else kv.keys
    tables = batch.groups[group].tables
    wide_float = q.dtype == torch.float32
    rows, heads = q.shape[0], attention.heads
    early = EARLY if queries else {}  # the kernel after long tiles would take room from them
    tile_m = max(16, triton.next_power_of_2(queries * share)) if queries else tile_rows(q.dtype, wide, share)
    parts = out if splits == 1 else torch.empty(splits, rows, heads, dim, device=q.device)
    part_max, part_sum = (out, out) if splits == 1 else torch.empty(2, splits, rows, heads, device=q.device)
    prefill_kernel[(attention.kv_heads, tiles.shape[0], splits)](
        q, out, parts, part_max, part_sum, tiles, batch.starts, batch.contexts, tables, kv.keys, kv.values, scales,
        value_scales, attention.sinks, attention.scale, attention.softcap, rows, splits, q.stride(0), tables.stride(0),
        *kv.keys.stride()[:3], *scales.stride()[:2],
        HEADS=attention.heads, KV_HEADS=attention.kv_heads, HEAD=dim, WIDE=wide, FORMAT=FORMATS[kv.format],
        WINDOW=attention.window, SOFTCAP=attention.softcap > 0, BLOCK=BLOCK, TILE_M=tile_m,
        TILE_N=tile_n or (32 if wide_float or wide > 128 else 64), PRECISION="ieee" if wide_float else "tf32",
        STAGES=stages or (2 if wide_float or wide > 128 else 3), num_warps=warps or (8 if wide > 128 else 4),
        SPLIT=splits > 1, PDL=bool(early), **early,
    )  # fmt: skip
    if splits > 1:
        combine_kernel[(tiles.shape[0], tile_m // share, heads)](
            parts, part_max, part_sum, attention.sinks, out, tiles, batch.starts, rows, splits,
            HEADS=heads, HEAD=dim, WIDE=wide, MOST=MOST_SPLITS, PDL=bool(early), num_warps=1, **early,
        )  # fmt: skip
    return out
