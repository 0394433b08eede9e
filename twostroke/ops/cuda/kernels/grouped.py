"""Many rows through the experts they chose: pairs of row and expert are grouped by expert, and tiles of a group are
multiplied with its expert's matrices, so that each chosen expert is read about once.

Everything is decided on the device. The host does not know the number of tiles: enough programs for the worst case are
launched, and those without a tile end at once. So a step of fixed size can be captured.

The order of pairs within a group is any. It does not matter: an output adds its products in one order, along K from the
first column to the last as in exact_matmul.py, wherever its row lies in a tile and whatever the tile's shape.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from twostroke.ops.cuda.kernels.experts import ExpertMatrices, as_weights
from twostroke.ops.cuda.kernels.launch import INTERPRETED
from twostroke.ops.cuda.kernels.rows import activated

TILE_BORDERS = (12, 24, 64)  # rows of each expert on average from which on tiles are larger
COUNTED = 256  # pairs that a program counts or sorts at a time


@triton.jit(do_not_specialize=["pairs"])
def count_kernel(ids_ptr, counts_ptr, ranks_ptr, pairs, BLOCK: tl.constexpr):
    """Pairs of each expert, and each pair's number among them."""
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = pair < pairs
    expert = tl.load(ids_ptr + pair, mask=inside, other=0)
    rank = tl.atomic_add(counts_ptr + expert, 1, mask=inside)
    tl.store(ranks_ptr + pair, rank, mask=inside)


@triton.jit(do_not_specialize=["pairs"])
def place_kernel(
    ids_ptr, counts_ptr, ranks_ptr, order_ptr, pairs, EXPERTS: tl.constexpr, EXPERTS_2: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """order: the pairs, those of the first expert first."""
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = pair < pairs
    expert = tl.load(ids_ptr + pair, mask=inside, other=0)
    every = tl.arange(0, EXPERTS_2)
    counts = tl.load(counts_ptr + every, mask=every < EXPERTS, other=0)
    before = tl.sum(tl.where(every[None, :] < expert[:, None], counts[None, :], 0), axis=1)
    tl.store(order_ptr + before + tl.load(ranks_ptr + pair, mask=inside, other=0), pair, mask=inside)


@triton.jit
def tile_of(counts_ptr, tile, EXPERTS: tl.constexpr, EXPERTS_2: tl.constexpr, BLOCK_M: tl.constexpr):
    """The expert of a tile, its first place in `order`, and one past the last of the expert's places. Past the last
    tile the expert is EXPERTS or more."""
    every = tl.arange(0, EXPERTS_2)
    counts = tl.load(counts_ptr + every, mask=every < EXPERTS, other=0)
    tiles = (counts + BLOCK_M - 1) // BLOCK_M
    ends = tl.cumsum(tiles, axis=0)
    expert = tl.sum((ends <= tile).to(tl.int32), axis=0)
    before = every < expert
    start = tl.sum(tl.where(before, counts, 0), axis=0)
    first = start + (tile - tl.sum(tl.where(before, tiles, 0), axis=0)) * BLOCK_M
    return expert, first, start + tl.sum(tl.where(every == expert, counts, 0), axis=0)


@triton.jit
def grouped_gate_kernel(
    x_ptr, w_ptr, places_ptr, scales_ptr, scale_places_ptr, counts_ptr, order_ptr, out_ptr,
    EXPERTS: tl.constexpr, EXPERTS_2: tl.constexpr, CHOSEN: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr,
    FORMAT: tl.constexpr, SILU: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out (pairs in order, WIDTH) = activation(gate) · up."""
    expert, first, end = tile_of(counts_ptr, tl.program_id(1), EXPERTS, EXPERTS_2, BLOCK_M)
    if expert >= EXPERTS:
        return
    EVEN: tl.constexpr = K % BLOCK_K == 0
    place = first + tl.arange(0, BLOCK_M)
    mine = place < end
    row = tl.load(order_ptr + place, mask=mine, other=0) // CHOSEN
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    base = w_ptr + tl.multiple_of(tl.load(places_ptr + expert), 16)
    scales = scales_ptr + tl.load(scale_places_ptr + expert)
    there = n < WIDTH
    gates = base + tl.where(n < WIDTH, n, 0).to(tl.int64) * K
    ups = gates + WIDTH * K
    x_rows = x_ptr + row.to(tl.int64) * K
    if WEIGHTS_FIRST:
        gate, up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32), tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        gate, up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32), tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k0 in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        here = k0 + k
        if EVEN:
            x = tl.load(x_rows[:, None] + here[None, :], mask=mine[:, None], other=0.0)
            g = tl.load(gates[:, None] + here[None, :])
            u = tl.load(ups[:, None] + here[None, :])
        else:
            x = tl.load(x_rows[:, None] + here[None, :], mask=mine[:, None] & (here < K)[None, :], other=0.0)
            g = tl.load(gates[:, None] + here[None, :], mask=(here < K)[None, :], other=0.0)
            u = tl.load(ups[:, None] + here[None, :], mask=(here < K)[None, :], other=0.0)
        if FORMAT > 0:
            g = as_weights(g, scales, n, there, FORMAT).to(x.dtype)
            u = as_weights(u, scales, WIDTH + n, there, FORMAT).to(x.dtype)
        if WEIGHTS_FIRST:
            gate = tl.dot(g, tl.trans(x), gate, input_precision=PRECISION)
            up = tl.dot(u, tl.trans(x), up, input_precision=PRECISION)
        else:
            gate = tl.dot(x, tl.trans(g), gate, input_precision=PRECISION)
            up = tl.dot(x, tl.trans(u), up, input_precision=PRECISION)
    out = activated(gate, SILU) * up
    if WEIGHTS_FIRST:
        out = tl.trans(out)
    to = out_ptr + place.to(tl.int64)[:, None] * WIDTH + n[None, :]
    tl.store(to, out.to(out_ptr.dtype.element_ty), mask=mine[:, None] & (n < WIDTH)[None, :])


@triton.jit
def grouped_down_kernel(
    inner_ptr, w_ptr, places_ptr, scales_ptr, scale_places_ptr, counts_ptr, order_ptr, out_ptr,
    EXPERTS: tl.constexpr, EXPERTS_2: tl.constexpr, K: tl.constexpr, N: tl.constexpr, FORMAT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WEIGHTS_FIRST: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """out (pairs, N), each pair at its own number."""
    expert, first, end = tile_of(counts_ptr, tl.program_id(1), EXPERTS, EXPERTS_2, BLOCK_M)
    if expert >= EXPERTS:
        return
    EVEN: tl.constexpr = K % BLOCK_K == 0
    place = first + tl.arange(0, BLOCK_M)
    mine = place < end
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    base = w_ptr + tl.multiple_of(tl.load(places_ptr + expert), 16)
    scales = scales_ptr + tl.load(scale_places_ptr + expert)
    w_rows = base + tl.where(n < N, n, 0).to(tl.int64) * K
    x_rows = inner_ptr + place.to(tl.int64) * K
    if WEIGHTS_FIRST:
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k0 in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        here = k0 + k
        if EVEN:
            x = tl.load(x_rows[:, None] + here[None, :], mask=mine[:, None], other=0.0)
            w = tl.load(w_rows[:, None] + here[None, :])
        else:
            x = tl.load(x_rows[:, None] + here[None, :], mask=mine[:, None] & (here < K)[None, :], other=0.0)
            w = tl.load(w_rows[:, None] + here[None, :], mask=(here < K)[None, :], other=0.0)
        if FORMAT > 0:
            w = as_weights(w, scales, n, n < N, FORMAT).to(x.dtype)
        if WEIGHTS_FIRST:
            acc = tl.dot(w, tl.trans(x), acc, input_precision=PRECISION)
        else:
            acc = tl.dot(x, tl.trans(w), acc, input_precision=PRECISION)
    if WEIGHTS_FIRST:
        acc = tl.trans(acc)
    pair = tl.load(order_ptr + place, mask=mine, other=0).to(tl.int64)
    to = out_ptr + pair[:, None] * N + n[None, :]
    tl.store(to, acc.to(out_ptr.dtype.element_ty), mask=mine[:, None] & (n < N)[None, :])


@triton.jit
def sum_kernel(y_ptr, weights_ptr, out_ptr, N: tl.constexpr, CHOSEN: tl.constexpr, BLOCK: tl.constexpr):
    """out (T, N): a row's pairs, each times its weight, added in the order of choice."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for place in tl.static_range(CHOSEN):
        pair = row * CHOSEN + place
        y = tl.load(y_ptr + pair * N + n, mask=n < N, other=0.0).to(tl.float32)
        total += y * tl.load(weights_ptr + pair)
    tl.store(out_ptr + row * N + n, total.to(out_ptr.dtype.element_ty), mask=n < N)


class Tile(NamedTuple):
    m: int
    n: int
    k: int
    stages: int
    warps: int
    weights_first: bool


def tile_for(rows: float, dtype: torch.dtype, two: bool, narrow: bool = False) -> Tile:
    """For so many rows of each expert on average. two: two matrices at once. narrow: of codes, which are decoded on the
    way. No choice here changes a bit."""
    if INTERPRETED:
        return Tile(16, 32, 64, 2, 4, False)  # the interpreter multiplies with a library: one shape for all
    if narrow and dtype == torch.float32:
        return Tile(16, 32, 64, 2, 4, False)
    if dtype == torch.float32:
        return Tile(16, 64, 32, 2, 4, False) if rows <= 32 else Tile(64, 32 if two else 64, 32, 2, 8, False)
    if rows <= TILE_BORDERS[0]:
        return Tile(16, 64, 128, 3 if two else 5, 4, True)
    if rows <= TILE_BORDERS[1]:
        return Tile(32, 64, 128, 3 if two else 4, 4, True)
    if rows <= TILE_BORDERS[2]:
        return Tile(64, 64, 128, 3 if two else 4, 4, False)
    return Tile(128, 128, 64, 3, 8, False) if two else Tile(128, 128, 64, 4, 8, False)


def grouped_experts(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: ExpertMatrices, down: ExpertMatrices, silu: bool
) -> Tensor:
    """x (T, hidden) normed -> (T, hidden)."""
    rows, hidden = x.shape
    experts, width = len(down.places), down.codes.shape[1]
    pairs, experts_2 = ids.numel(), triton.next_power_of_2(experts)
    counts, order = torch.zeros(experts, dtype=torch.int32, device=x.device), torch.empty_like(ids)
    ranks, blocks = torch.empty_like(ids), (triton.cdiv(pairs, COUNTED),)
    count_kernel[blocks](ids, counts, ranks, pairs, BLOCK=COUNTED)
    place_kernel[blocks](ids, counts, ranks, order, pairs, EXPERTS=experts, EXPERTS_2=experts_2, BLOCK=COUNTED)
    inner = torch.empty(pairs, width, dtype=x.dtype, device=x.device)
    each = torch.empty(pairs, hidden, dtype=x.dtype, device=x.device)
    common = {"EXPERTS": experts, "EXPERTS_2": experts_2, "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32"}
    tile = tile_for(pairs / experts, x.dtype, True, gate_up.format > 0)
    grouped_gate_kernel[(triton.cdiv(width, tile.n), most_tiles(pairs, experts, tile.m))](
        x, *gate_up[:4], counts, order, inner, CHOSEN=ids.shape[1], K=hidden, WIDTH=width, FORMAT=gate_up.format,
        SILU=silu, **common,
        BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=tile.k, WEIGHTS_FIRST=tile.weights_first, STAGES=tile.stages,
        num_warps=tile.warps,
    )  # fmt: skip
    tile = tile_for(pairs / experts, x.dtype, False, down.format > 0)
    grouped_down_kernel[(triton.cdiv(hidden, tile.n), most_tiles(pairs, experts, tile.m))](
        inner, *down[:4], counts, order, each, K=width, N=hidden, FORMAT=down.format, **common,
        BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=tile.k, WEIGHTS_FIRST=tile.weights_first, STAGES=tile.stages,
        num_warps=tile.warps,
    )  # fmt: skip
    out = torch.empty(rows, hidden, dtype=x.dtype, device=x.device)
    block = min(1024, triton.next_power_of_2(hidden))
    sum_kernel[(rows, triton.cdiv(hidden, block))](
        each, weights, out, N=hidden, CHOSEN=ids.shape[1], BLOCK=block, num_warps=4
    )
    return out


def most_tiles(pairs: int, experts: int, size: int) -> int:
    """Every expert may have a tile that is not full."""
    return min(pairs, pairs // size + experts)
