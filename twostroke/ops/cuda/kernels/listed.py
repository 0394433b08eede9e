"""Compressed attention's products: scores of the indexer, and attention over a row's window and its entries.

A program has one row and some of its heads, which all read the same keys, each of them as key and as value. It goes
through the window and then through the entries, in tiles that begin where the row's window and its list begin, and adds
the sink last. So the order of a row's additions depends on its position alone: prompts, chunks and single tokens have
the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from twostroke.ops.compressed_interface import CompressedAttention, Indexer
from twostroke.ops.cuda.kernels.entries import EntryPlaces, Owners
from twostroke.ops.cuda.kernels.launch import INTERPRETED
from twostroke.ops.cuda.kernels.sinks import add_sinks, load_sinks

LOG2E = 1.4426950408889634
SCORED = 64  # entries that a program scores
MOST_KEYS = 1 << 25  # scores that are sorted at a time
NEVER = tl.constexpr(-(1 << 63))  # the key of an entry that is not there


@triton.jit
def visit(
    q, best, total, acc, numbers, valid, data_ptr, tables, factor, block_stride, entry_stride, SIZE: tl.constexpr,
    DIM: tl.constexpr, DIM_2: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of entries, by their numbers, added to the maximum, the sum and the accumulator."""
    dims = tl.arange(0, DIM_2)
    blocks = tl.load(tables + numbers // SIZE, mask=valid, other=0).to(tl.int64)
    at = data_ptr + (blocks * block_stride + numbers % SIZE * entry_stride)[:, None] + dims[None, :]
    entry = tl.load(at, mask=valid[:, None] & (dims < DIM)[None, :], other=0.0).to(DTYPE)
    s = tl.dot(q, tl.trans(entry), input_precision=PRECISION) * factor
    s = tl.where(valid[None, :], s, float("-inf"))
    new = tl.maximum(best, tl.max(s, axis=1))
    p, shrink = tl.exp2(s - new[:, None]), tl.exp2(best - new)
    total = total * shrink + tl.sum(p, axis=1)
    return new, total, tl.dot(p.to(DTYPE), entry, acc * shrink[:, None], input_precision=PRECISION)


@triton.jit(do_not_specialize=["raw_table_stride", "table_stride", "most"])
def listed_kernel(
    q_ptr, out_ptr, sinks_ptr, raw_ptr, raw_tables_ptr, data_ptr, tables_ptr, chosen_ptr, positions_ptr, requests_ptr,
    contexts_ptr, factor, raw_block_stride, raw_entry_stride, raw_table_stride, block_stride, entry_stride,
    table_stride, most, HEADS: tl.constexpr, DIM: tl.constexpr, DIM_2: tl.constexpr, WINDOW: tl.constexpr,
    RATIO: tl.constexpr, RAW_SIZE: tl.constexpr, SIZE: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """q and out (T, HEADS, DIM). RATIO: tokens of an entry; 0: there are none. chosen_ptr: (T, most) numbers of the
    entries that a row reads; None: all that are complete."""
    DTYPE: tl.constexpr = q_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    position, request = tl.load(positions_ptr + row), tl.load(requests_ptr + row)
    if position >= tl.load(contexts_ptr + request):
        return
    head, dims, places = tl.program_id(1) * TILE_M + tl.arange(0, TILE_M), tl.arange(0, DIM_2), tl.arange(0, TILE_N)
    inside = (head < HEADS)[:, None] & (dims < DIM)[None, :]
    at = (row * HEADS + head)[:, None] * DIM + dims[None, :]
    q = tl.load(q_ptr + at, mask=inside, other=0.0)
    best = tl.full((TILE_M,), float("-inf"), tl.float32)
    total, acc = tl.zeros((TILE_M,), tl.float32), tl.zeros((TILE_M, DIM_2), tl.float32)
    tables = raw_tables_ptr + request.to(tl.int64) * raw_table_stride
    for n0 in tl.range(tl.maximum(position + 1 - WINDOW, 0), position + 1, TILE_N, num_stages=STAGES):
        best, total, acc = visit(
            q, best, total, acc, n0 + places, n0 + places <= position, raw_ptr, tables, factor, raw_block_stride,
            raw_entry_stride, RAW_SIZE, DIM, DIM_2, DTYPE, PRECISION,
        )  # fmt: skip
    if RATIO > 0:
        count = (position + 1) // RATIO
        if chosen_ptr is not None:
            count = tl.minimum(count, most)
        tables = tables_ptr + request.to(tl.int64) * table_stride
        for n0 in tl.range(0, count, TILE_N, num_stages=STAGES):
            numbers, valid = n0 + places, n0 + places < count
            if chosen_ptr is not None:
                numbers = tl.load(chosen_ptr + row * most + numbers, mask=valid, other=0)
            best, total, acc = visit(
                q, best, total, acc, numbers, valid, data_ptr, tables, factor, block_stride, entry_stride, SIZE, DIM,
                DIM_2, DTYPE, PRECISION,
            )  # fmt: skip
    total, acc = add_sinks(best, total, acc, load_sinks(sinks_ptr, tl.minimum(head, HEADS - 1)))
    tl.store(out_ptr + at, (acc / total[:, None]).to(DTYPE), mask=inside)


def listed_attention(
    q: Tensor, attention: CompressedAttention, raw: EntryPlaces, entries: EntryPlaces | None, chosen: Tensor | None,
    owners: Owners,
) -> Tensor:  # fmt: skip
    """q (T, heads · dim), rotated -> the same shape. entries: None for a layer with the window alone; chosen: the
    numbers of those that each row reads, None: all."""
    heads, dim, wide = attention.heads, attention.dim, q.dtype == torch.float32
    rows = 16 if wide or INTERPRETED else max(16, min(32, triton.next_power_of_2(heads)))
    out, listed = torch.empty_like(q), entries or raw
    listed_kernel[(q.shape[0], triton.cdiv(heads, rows))](
        q, out, attention.sinks, *raw, *listed, chosen, *owners, attention.scale * LOG2E, *raw.strides(),
        *listed.strides(), 0 if chosen is None else chosen.shape[1], HEADS=heads, DIM=dim,
        DIM_2=max(16, triton.next_power_of_2(dim)), WINDOW=attention.window,
        RATIO=0 if entries is None or attention.compressor is None else attention.compressor.ratio,
        RAW_SIZE=raw.data.shape[1], SIZE=listed.data.shape[1], TILE_M=rows, TILE_N=16 if wide else 32, STAGES=2,
        PRECISION="ieee" if wide else "tf32", num_warps=8 if rows >= 32 else 4,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["table_stride", "most", "first_row"])
def scores_kernel(
    q_ptr, weights_ptr, data_ptr, tables_ptr, positions_ptr, requests_ptr, contexts_ptr, out_ptr, scale, weights_stride,
    block_stride, entry_stride, table_stride, most, first_row, HEADS: tl.constexpr, HEADS_2: tl.constexpr,
    DIM: tl.constexpr, DIM_2: tl.constexpr, RATIO: tl.constexpr, SIZE: tl.constexpr, LIMIT: tl.constexpr,
    TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out (rows, most) int64: numbers in the order of Σ weight · max(0, q · key), among equals the lowest entry first.
    Where a row reads all entries that there are, they count alike."""
    mine, n = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    row = first_row + mine
    position, request = tl.load(positions_ptr + row), tl.load(requests_ptr + row)
    count = tl.where(position < tl.load(contexts_ptr + request), (position + 1) // RATIO, 0)
    scores = tl.zeros((TILE,), tl.float32)
    if (count > LIMIT) & (tl.program_id(1) * TILE < count):
        head, dims = tl.arange(0, HEADS_2), tl.arange(0, DIM_2)
        inside = (dims < DIM)[None, :]
        at = (row * HEADS + head)[:, None] * DIM + dims[None, :]
        q = tl.load(q_ptr + at, mask=(head < HEADS)[:, None] & inside, other=0.0)
        weights = tl.load(weights_ptr + row * weights_stride + head, mask=head < HEADS, other=0.0).to(tl.float32)
        tables = tables_ptr + request.to(tl.int64) * table_stride
        blocks = tl.load(tables + n // SIZE, mask=n < count, other=0).to(tl.int64)
        keys = data_ptr + (blocks * block_stride + n % SIZE * entry_stride)[:, None] + dims[None, :]
        keys = tl.load(keys, mask=(n < count)[:, None] & inside, other=0.0).to(q.dtype)
        s = tl.maximum(tl.dot(q, tl.trans(keys), input_precision=PRECISION), 0.0)
        scores = tl.sum(s * (weights * scale)[:, None], axis=0)
    bits = (scores + 0.0).to(tl.int32, bitcast=True)  # 0 and -0 alike
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    key = tl.where(n < count, ordered * 4294967296 + (most - n), NEVER)
    tl.store(out_ptr + mine * most + n, key, mask=n < most)


def chosen_entries(
    q: Tensor, weights: Tensor, indexer: Indexer, keys: EntryPlaces, most: int, owners: Owners
) -> Tensor:
    """q (T, heads · dim), rotated, weights (T, heads) -> (T, chosen) int32: the numbers of the best entries of each
    row, in order. most: entries that a request may have, more than are chosen."""
    rows, ratio = q.shape[0], indexer.compressor.ratio
    wide, step = q.dtype == torch.float32, max(1, MOST_KEYS // most)
    out = torch.empty(rows, indexer.chosen, dtype=torch.int32, device=q.device)
    for first in range(0, rows, step):
        count = min(step, rows - first)
        scores = torch.empty(count, most, dtype=torch.int64, device=q.device)
        scores_kernel[(count, triton.cdiv(most, SCORED))](
            q, weights, *keys, *owners, scores, indexer.dim**-0.5 * indexer.heads**-0.5, weights.stride(0),
            *keys.strides(), most, first, HEADS=indexer.heads, HEADS_2=max(16, triton.next_power_of_2(indexer.heads)),
            DIM=indexer.dim, DIM_2=max(16, triton.next_power_of_2(indexer.dim)), RATIO=ratio, SIZE=keys.data.shape[1],
            LIMIT=indexer.chosen, TILE=SCORED, PRECISION="ieee" if wide else "tf32", num_warps=4,
        )  # fmt: skip
        best = scores.topk(indexer.chosen, dim=1, sorted=False)
        numbers = torch.where(best.values > NEVER.value, best.indices, most)  # those that are not there come last
        out[first : first + count] = numbers.sort(dim=1).values
    return out
