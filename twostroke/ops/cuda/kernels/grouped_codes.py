"""Many rows through experts of four bits: the two products of grouped.py, for four_bits.py.

The weights are the tensor cores' tall side, which may lie in registers: codes become bfloat16 where they were loaded.
A tile has 16 outputs for each warp. With a gate these are eight of gate and the same eight of up, so that both of an
output lie in one lane. Every output adds its products along K from the first column to the last, whatever the tile's
shape.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from twostroke.ops.cuda.kernels.four_bits import slice_scales, slice_words, weights_of, word_scales
from twostroke.ops.cuda.kernels.grouping import tile_of
from twostroke.ops.cuda.kernels.launch import INTERPRETED, gdc_launch_dependents, gdc_wait
from twostroke.ops.cuda.kernels.rows import gated_pair


@triton.jit
def code_sums(
    x_rows, mine, codes_ptr, start, scales_ptr, scales, row, there, K: tl.constexpr, FORMAT: tl.constexpr,
    W: tl.constexpr, BLOCK_M: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """(16 W, BLOCK_M): a tile's outputs. row, there: of the matrix, for the tile's rows (half, warp, output)."""
    SLICES: tl.constexpr = (K + 127) // 128
    k = tl.arange(0, 128)
    acc = tl.zeros((16 * W, BLOCK_M), tl.float32)
    scale = slice_scales(scales_ptr, scales, row, 0, SLICES, FORMAT, FAST)
    for part in tl.range(0, SLICES, num_stages=STAGES):
        words = slice_words(codes_ptr, start, row, there, part, SLICES)
        here = part * 128 + k
        if K % 128 == 0:
            x = tl.load(x_rows[None, :] + here[:, None], mask=mine[None, :], other=0.0)
        else:
            x = tl.load(x_rows[None, :] + here[:, None], mask=mine[None, :] & (here < K)[:, None], other=0.0)
        weights = as_tall_side(weights_of(words, word_scales(scale, FORMAT), FORMAT, FAST), W, x.dtype)
        scale = slice_scales(scales_ptr, scales, row, part + 1, SLICES, FORMAT, FAST)
        acc = tl.dot(weights, x, acc, input_precision=PRECISION)
    return acc


@triton.jit
def as_tall_side(weights, W: tl.constexpr, dtype: tl.constexpr):
    """(16 W, 128): rows (half, warp, output) of weights_of become (warp, half, output)."""
    weights = tl.reshape(weights.to(dtype), (2, W, 8, 4, 4, 2, 2, 2))
    return tl.reshape(tl.permute(weights, (1, 0, 2, 4, 5, 6, 3, 7)), (16 * W, 128))


@triton.jit
def grouped_gate_codes_kernel(
    x_ptr, codes_ptr, places_ptr, scales_ptr, scale_places_ptr, bias_ptr, counts_ptr, order_ptr, out_ptr,
    EXPERTS: tl.constexpr, EXPERTS_2: tl.constexpr, CHOSEN: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr,
    FORMAT: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr, W: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """out (pairs in order, WIDTH) = activation(gate) · up. A tile has 8 W outputs."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    expert, first, end = tile_of(counts_ptr, tl.program_id(1), EXPERTS, EXPERTS_2, BLOCK_M)
    if expert >= EXPERTS:
        return
    place = first + tl.arange(0, BLOCK_M)
    mine = place < end
    pair = tl.load(order_ptr + place, mask=mine, other=0)
    index = tl.arange(0, 16 * W)
    n = tl.program_id(0) * (8 * W) + index % (8 * W)
    row = tl.minimum(n, WIDTH - 1) + index // (8 * W) * WIDTH
    acc = code_sums(
        x_ptr + (pair // CHOSEN).to(tl.int64) * K, mine, codes_ptr, tl.load(places_ptr + expert), scales_ptr,
        tl.load(scale_places_ptr + expert), row, n < WIDTH, K, FORMAT, W, BLOCK_M, STAGES, PRECISION, FAST,
    )  # fmt: skip
    both = tl.permute(tl.reshape(acc, (W, 2, 8, BLOCK_M)), (0, 2, 3, 1))
    gate, up = tl.split(both)
    gate, up = tl.reshape(gate, (8 * W, BLOCK_M)), tl.reshape(up, (8 * W, BLOCK_M))
    n = tl.program_id(0) * (8 * W) + tl.arange(0, 8 * W)
    inside = n < WIDTH
    if bias_ptr is not None:
        bias = bias_ptr + expert * (2 * WIDTH) + n
        gate += tl.load(bias, mask=inside, other=0.0)[:, None]
        up += tl.load(bias + WIDTH, mask=inside, other=0.0)[:, None]
    out = tl.trans(gated_pair(gate, up, ACTIVATION))
    to = out_ptr + place.to(tl.int64)[:, None] * WIDTH + n[None, :]
    tl.store(to, out.to(out_ptr.dtype.element_ty), mask=mine[:, None] & inside[None, :])


@triton.jit
def grouped_down_codes_kernel(
    inner_ptr, codes_ptr, places_ptr, scales_ptr, scale_places_ptr, bias_ptr, counts_ptr, order_ptr, out_ptr,
    EXPERTS: tl.constexpr, EXPERTS_2: tl.constexpr, K: tl.constexpr, N: tl.constexpr, FORMAT: tl.constexpr,
    BLOCK_M: tl.constexpr, W: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """out (pairs, N), each pair at its own number. A tile has 16 W outputs."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    expert, first, end = tile_of(counts_ptr, tl.program_id(1), EXPERTS, EXPERTS_2, BLOCK_M)
    if expert >= EXPERTS:
        return
    place = first + tl.arange(0, BLOCK_M)
    mine = place < end
    index = tl.arange(0, 16 * W)
    n = tl.program_id(0) * (16 * W) + index // 8 % W * 16 + index // (8 * W) * 8 + index % 8
    acc = code_sums(
        inner_ptr + place.to(tl.int64) * K, mine, codes_ptr, tl.load(places_ptr + expert), scales_ptr,
        tl.load(scale_places_ptr + expert), tl.minimum(n, N - 1), n < N, K, FORMAT, W, BLOCK_M, STAGES, PRECISION, FAST,
    )  # fmt: skip
    n = tl.program_id(0) * (16 * W) + index
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + expert * N + n, mask=n < N, other=0.0)[:, None]
    pair = tl.load(order_ptr + place, mask=mine, other=0).to(tl.int64)
    to = out_ptr + pair[:, None] * N + n[None, :]
    tl.store(to, tl.trans(acc).to(out_ptr.dtype.element_ty), mask=mine[:, None] & (n < N)[None, :])


class CodeTile(NamedTuple):
    m: int  # rows
    warps: int  # of 16 outputs each
    stages: int


def code_tile(rows: float, dtype: torch.dtype, borders: tuple[int, ...]) -> CodeTile:
    """For so many rows of each expert on average. No choice here changes a bit. Chosen by what fits a multiprocessor's
    registers and memory, not measured."""
    if INTERPRETED or dtype == torch.float32:
        return CodeTile(16, 4, 2)
    if rows <= borders[0]:
        return CodeTile(16, 4, 5)
    if rows <= borders[1]:
        return CodeTile(32, 4, 4)
    if rows <= borders[2]:
        return CodeTile(64, 4, 3)
    return CodeTile(128, 8, 3)
