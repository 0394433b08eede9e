"""Many rows through the experts they chose: pairs of row and expert are grouped by expert, and tiles of a group are
multiplied with its expert's matrices, so that each chosen expert is read about once.

The order of pairs within a group is any. It does not matter: an output adds its products in one order, along K from the
first column to the last as in exact_matmul.py, wherever its row lies in a tile and whatever the tile's shape.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from twostroke.ops.cuda.kernels.experts import ExpertMatrices, as_weights
from twostroke.ops.cuda.kernels.grouped_codes import (
    code_tile,
    grouped_down_codes_kernel,
    grouped_gate_codes_kernel,
)
from twostroke.ops.cuda.kernels.grouping import GroupedRows, group, most_tiles, tile_of
from twostroke.ops.cuda.kernels.launch import EARLY, INTERPRETED, PDL, gdc_launch_dependents, gdc_wait
from twostroke.ops.cuda.kernels.rows import gated_pair

TILE_BORDERS = (12, 24, 64)  # rows of each expert on average from which on tiles are larger


@triton.jit
def grouped_gate_kernel(
    x_ptr, w_ptr, places_ptr, scales_ptr, scale_places_ptr, bias_ptr, counts_ptr, order_ptr, out_ptr,
    EXPERTS: tl.constexpr, EXPERTS_2: tl.constexpr, CHOSEN: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr,
    FORMAT: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, WEIGHTS_FIRST: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
    SHARED: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out (pairs in order, WIDTH) = activation(gate) · up. The last PARTS matrices are parts of one of width SHARED."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
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
    between = WIDTH  # rows from gate to up
    if PARTS > 0:
        between = tl.where(expert < EXPERTS - PARTS, WIDTH // 16, SHARED // 16) * 16
    ups = gates + between * K
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
            u = as_weights(u, scales, between + n, there, FORMAT).to(x.dtype)
        if WEIGHTS_FIRST:
            gate = tl.dot(g, tl.trans(x), gate, input_precision=PRECISION)
            up = tl.dot(u, tl.trans(x), up, input_precision=PRECISION)
        else:
            gate = tl.dot(x, tl.trans(g), gate, input_precision=PRECISION)
            up = tl.dot(x, tl.trans(u), up, input_precision=PRECISION)
    if bias_ptr is not None:
        side = bias_ptr + expert * (2 * WIDTH) + n
        gate_bias, up_bias = tl.load(side, mask=there, other=0.0), tl.load(side + WIDTH, mask=there, other=0.0)
        if WEIGHTS_FIRST:
            gate, up = gate + gate_bias[:, None], up + up_bias[:, None]
        else:
            gate, up = gate + gate_bias[None, :], up + up_bias[None, :]
    out = gated_pair(gate, up, ACTIVATION)
    if WEIGHTS_FIRST:
        out = tl.trans(out)
    to = out_ptr + place.to(tl.int64)[:, None] * WIDTH + n[None, :]
    tl.store(to, out.to(out_ptr.dtype.element_ty), mask=mine[:, None] & (n < WIDTH)[None, :])


@triton.jit
def grouped_down_kernel(
    inner_ptr, w_ptr, places_ptr, scales_ptr, scale_places_ptr, bias_ptr, counts_ptr, order_ptr, out_ptr,
    EXPERTS: tl.constexpr, EXPERTS_2: tl.constexpr, K: tl.constexpr, N: tl.constexpr, FORMAT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WEIGHTS_FIRST: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr, SHARED: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out (pairs, N), each pair at its own number."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
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
    width = K  # from row to row
    if PARTS > 0:
        width = tl.where(expert < EXPERTS - PARTS, K // 16, SHARED // 16) * 16
    w_rows = base + tl.where(n < N, n, 0).to(tl.int64) * width
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
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + expert * N + n, mask=n < N, other=0.0)[None, :]
    pair = tl.load(order_ptr + place, mask=mine, other=0).to(tl.int64)
    to = out_ptr + pair[:, None] * N + n[None, :]
    tl.store(to, acc.to(out_ptr.dtype.element_ty), mask=mine[:, None] & (n < N)[None, :])


@triton.jit
def sum_kernel(
    y_ptr, weights_ptr, out_ptr, N: tl.constexpr, CHOSEN: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out (T, N): a row's pairs, each times its weight, added in the order of choice; ADD: to what `out` holds."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    total = tl.zeros((BLOCK,), tl.float32)
    for place in tl.static_range(CHOSEN):
        pair = row * CHOSEN + place
        y = tl.load(y_ptr + pair * N + n, mask=n < N, other=0.0).to(tl.float32)
        total += y * tl.load(weights_ptr + pair)
    if ADD:
        total += tl.load(out_ptr + row * N + n, mask=n < N, other=0.0).to(tl.float32)
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
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: ExpertMatrices, down: ExpertMatrices, activation: int, *,
    shared: int = 0, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """x (T, hidden) normed -> (T, hidden); with `out` that is added to it. activation: as in rows.py. shared: width of
    an expert whose parts, as wide as the others, are the last matrices."""
    (rows, hidden), add = x.shape, out is not None
    grouped, width = group(ids, len(down.places)), gate_up.outputs // 2
    inner = torch.empty(ids.numel(), width, dtype=x.dtype, device=x.device)
    each = torch.empty(ids.numel(), hidden, dtype=x.dtype, device=x.device)
    launch(GATE, x, gate_up, grouped, inner, shared // width, shared, CHOSEN=ids.shape[1], WIDTH=width,
           ACTIVATION=activation)  # fmt: skip
    launch(DOWN, inner, down, grouped, each, shared // width, shared, N=hidden)
    if out is None:
        out = torch.empty(rows, hidden, dtype=x.dtype, device=x.device)
    block = min(1024, triton.next_power_of_2(hidden))
    sum_kernel[(rows, triton.cdiv(hidden, block))](
        each, weights, out, N=hidden, CHOSEN=ids.shape[1], ADD=add, BLOCK=block, PDL=PDL, num_warps=4,
        **EARLY,
    )  # fmt: skip
    return out


class Kernels(NamedTuple):
    """The kernels of one of the two products."""

    floats: Any  # and codes of 8 bits
    codes: Any  # of 4 bits
    outputs: int  # of a warp that multiplies these
    two: bool  # matrices at once


GATE = Kernels(grouped_gate_kernel, grouped_gate_codes_kernel, 8, True)
DOWN = Kernels(grouped_down_kernel, grouped_down_codes_kernel, 16, False)


def launch(
    kernels: Kernels, x: Tensor, matrices: ExpertMatrices, grouped: GroupedRows, out: Tensor, parts: int, shared: int,
    **constants: int,
) -> None:  # fmt: skip
    """out (pairs, outputs). constants: of this product alone."""
    (pairs, width), experts = out.shape, len(matrices.places)
    given = x, *matrices[:5], *grouped, out
    common = {
        **constants, "K": x.shape[1], "EXPERTS": experts, "EXPERTS_2": triton.next_power_of_2(experts),
        "FORMAT": matrices.format, "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32", "PDL": PDL,
        **EARLY,
    }  # fmt: skip
    if matrices.four_bits:
        cut = code_tile(pairs / experts, x.dtype, TILE_BORDERS)
        kernels.codes[(triton.cdiv(width, kernels.outputs * cut.warps), most_tiles(pairs, experts, cut.m))](
            *given, **common, BLOCK_M=cut.m, W=cut.warps, STAGES=cut.stages, FAST=not INTERPRETED, num_warps=cut.warps
        )
        return
    tile = fitted(tile_for(pairs / experts, x.dtype, kernels.two, matrices.format > 0), x.shape[1])
    kernels.floats[(triton.cdiv(width, tile.n), most_tiles(pairs, experts, tile.m))](
        *given, **common, BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=tile.k, WEIGHTS_FIRST=tile.weights_first,
        STAGES=tile.stages, SHARED=shared, PARTS=parts, num_warps=tile.warps,
    )  # fmt: skip


def fitted(tile: Tile, inputs: int) -> Tile:
    """A tile of 128 inputs with half as many, where those divide the inputs and 128 do not: no load has a mask."""
    halved = tile.k == 128 and inputs % 128 and inputs % 64 == 0
    return tile._replace(k=64, stages=tile.stages + 2) if halved else tile
