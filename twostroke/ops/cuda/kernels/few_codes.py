"""A few rows through experts of four bits: the gate's and the last product of few_rows.py, for four_bits.py.

A tensor-core instruction multiplies 16 rows by 8 columns. The 16 rows are two outputs times eight neighbouring slices
of the weights, the columns are the same eight slices of x. Only products of a slice with itself are needed; the others
are dropped, and cost nothing. So a warp reads 512 neighbouring bytes of an output.

gate    the two outputs are gate and up; warps have outputs of their own
down    the two outputs are neighbours; warps have pairs of their own, and their sums are added
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from twostroke.ops.cuda.kernels.four_bits import slice_scales, slice_words, weights_of, word_scales
from twostroke.ops.cuda.kernels.launch import gdc_launch_dependents, gdc_wait
from twostroke.ops.cuda.kernels.narrow_tiles import JOINED
from twostroke.ops.cuda.kernels.rows import gated_pair

EIGHT = tl.constexpr(8)  # slices that an instruction multiplies


@triton.jit
def as_eights(weights, TURNS: tl.constexpr, W: tl.constexpr, dtype: tl.constexpr):
    """(TURNS · W, 16, 128): rows (turn, output, warp, slice) of weights_of as operands of a product."""
    weights = tl.reshape(weights.to(dtype), (TURNS, 2, W, 8, 4, 4, 2, 2, 2))
    if JOINED == 2:
        weights = tl.permute(weights, (0, 2, 1, 3, 5, 6, 4, 7, 8))
    else:
        weights = tl.permute(weights, (0, 2, 1, 3, 5, 6, 7, 4, 8))
    return tl.reshape(weights, (TURNS * W, 16, 128))


@triton.jit
def slices_of_x(x_rows, first, K: tl.constexpr):
    """(rows, 128, 8): eight slices of each row of x, from slice `first` on, in the order of as_eights; zeros past the
    end. x_rows: pointers."""
    at = (first + tl.arange(0, 8))[None, :] * 128 + tl.arange(0, 128)[:, None]
    x = tl.load(x_rows[:, None, None] + at[None, :, :], mask=(at < K)[None, :, :], other=0.0)
    if JOINED == 2:
        x = tl.reshape(x, (x.shape[0], 8, 2, 4, 2, 8))
        x = tl.reshape(tl.permute(x, (0, 1, 3, 2, 4, 5)), (x.shape[0], 128, 8))
    return x


@triton.jit
def for_all(x, TURNS: tl.constexpr, W: tl.constexpr):
    """slices_of_x, of one row or of W, as the other operand: (TURNS · W, 128, 8)."""
    return tl.reshape(tl.broadcast_to(x[None, :, :, :], (TURNS, W, 128, 8)), (TURNS * W, 128, 8))


@triton.jit
def same_slices(found, TURNS: tl.constexpr, W: tl.constexpr):
    """(TURNS, W, 2): the products of `found` that are needed, summed over slices."""
    eight = tl.arange(0, 8)
    same = (eight[:, None] == eight[None, :])[None, None, None, :, :]
    found = tl.where(same, tl.reshape(found, (TURNS, W, 2, 8, 8)), 0.0)
    return tl.sum(tl.reshape(found, (TURNS, W, 2, 64)), axis=3)


@triton.jit
def chosen_place(places, every, expert):
    return tl.sum(tl.where(every == expert, places, 0), axis=0)


@triton.jit
def gate_codes_kernel(
    x_ptr, codes_ptr, places_ptr, scales_ptr, scale_places_ptr, bias_ptr, ids_ptr, weights_ptr, out_ptr,
    K: tl.constexpr, WIDTH: tl.constexpr, EXPERTS: tl.constexpr, EXPERTS_2: tl.constexpr, PAIRS: tl.constexpr,
    FORMAT: tl.constexpr, ACTIVATION: tl.constexpr, W: tl.constexpr, TURNS: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """out (pairs, WIDTH) from x (T, K), normed. A program has TURNS · W outputs, and loads the next words before it
    multiplies. All matrices' places are loaded before the choice is known."""
    SLICES: tl.constexpr = (K + 127) // 128
    pair = tl.program_id(1).to(tl.int64)
    first, every = tl.program_id(0) * (TURNS * W), tl.arange(0, EXPERTS_2)
    places = tl.load(places_ptr + every, mask=every < EXPERTS, other=0) // 16
    scale_places = tl.load(scale_places_ptr + every, mask=every < EXPERTS, other=0)
    index = tl.arange(0, TURNS * W * 16)
    n = first + index // (16 * W) * W + index // 8 % W
    part, up_rows = index % 8, index // (8 * W) % 2 * WIDTH
    x_rows = x_ptr + pair // PAIRS * K + tl.arange(0, 1)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x = slices_of_x(x_rows, 0, K)
    expert = tl.load(ids_ptr + pair)
    start, scales = chosen_place(places, every, expert) * 16, chosen_place(scale_places, every, expert)
    row = tl.minimum(n, WIDTH - 1) + up_rows
    words = slice_words(codes_ptr, start, row, n < WIDTH, part, SLICES)
    scale = slice_scales(scales_ptr, scales, row, part, SLICES, FORMAT, FAST)
    count = tl.load(weights_ptr + pair)
    acc = tl.zeros((TURNS * W, 16, 8), tl.float32)
    for eight in tl.static_range(0, SLICES, EIGHT):  # unrolled: words that are on their way move to no other register
        next_x = slices_of_x(x_rows, eight + 8, K)
        next_words = slice_words(codes_ptr, start, row, n < WIDTH, eight + 8 + part, SLICES)
        next_scale = slice_scales(scales_ptr, scales, row, eight + 8 + part, SLICES, FORMAT, FAST)
        weights = as_eights(weights_of(words, word_scales(scale, FORMAT), FORMAT, FAST), TURNS, W, x.dtype)
        acc = tl.dot(weights, for_all(x, TURNS, W), acc, input_precision=PRECISION)
        words, scale, x = next_words, next_scale, next_x
    store_gated(acc, first, expert, count, bias_ptr, out_ptr + pair * WIDTH, WIDTH, ACTIVATION, TURNS, W)


@triton.jit
def store_gated(
    acc, first, expert, count, bias_ptr, out_ptr, WIDTH: tl.constexpr, ACTIVATION: tl.constexpr, TURNS: tl.constexpr,
    W: tl.constexpr,
):  # fmt: skip
    """A tile's outputs: activation(gate) · up, times what the expert counts."""
    gate, up = tl.split(same_slices(acc, TURNS, W))
    gate, up = tl.reshape(gate, (TURNS * W,)), tl.reshape(up, (TURNS * W,))
    n = first + tl.arange(0, TURNS * W)
    if bias_ptr is not None:
        bias = bias_ptr + expert * (2 * WIDTH) + n
        gate += tl.load(bias, mask=n < WIDTH, other=0.0)
        up += tl.load(bias + WIDTH, mask=n < WIDTH, other=0.0)
    out = gated_pair(gate, up, ACTIVATION) * count
    tl.store(out_ptr + n, out.to(out_ptr.dtype.element_ty), mask=n < WIDTH)


@triton.jit
def down_codes_kernel(
    inner_ptr, codes_ptr, places_ptr, scales_ptr, scale_places_ptr, bias_ptr, ids_ptr, weights_ptr, out_ptr,
    N: tl.constexpr, K: tl.constexpr, PAIRS: tl.constexpr, FORMAT: tl.constexpr, ADD: tl.constexpr, W: tl.constexpr,
    TURNS: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """out (T, N): the sum of a row's pairs; ADD: added to what `out` holds. The first words are loaded before the
    kernel in front has ended."""
    SLICES: tl.constexpr = (K + 127) // 128
    token = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * (2 * TURNS)
    index, mine = tl.arange(0, TURNS * W * 16), tl.arange(0, W)
    n = first + index // (16 * W) * 2 + index // (8 * W) % 2
    row, part, pair = tl.minimum(n, N - 1), index % 8, index // 8 % W
    outputs = first + tl.arange(0, 2 * TURNS)
    sums = tl.zeros((2 * TURNS,), tl.float32)
    for turn in tl.static_range(0, PAIRS, W):
        # Not from the L1 cache: it may hold what lay there before, and nothing was waited for yet.
        ids = ids_ptr + token * PAIRS + turn
        expert = tl.load(ids + pair, mask=turn + pair < PAIRS, other=0, cache_modifier=".cg")
        there = (n < N) & (turn + pair < PAIRS)
        start, scales = tl.load(places_ptr + expert), tl.load(scale_places_ptr + expert)
        words = slice_words(codes_ptr, start, row, there, part, SLICES)
        scale = slice_scales(scales_ptr, scales, row, part, SLICES, FORMAT, FAST)
        if bias_ptr is not None:
            listed = turn + mine < PAIRS
            theirs = tl.load(ids + mine, mask=listed, other=0, cache_modifier=".cg")
            counts = tl.load(weights_ptr + token * PAIRS + turn + mine, mask=listed, other=0.0, cache_modifier=".cg")
            at = theirs[None, :] * N + outputs[:, None]
            bias = tl.load(bias_ptr + at, mask=listed[None, :] & (outputs < N)[:, None], other=0.0)
            sums += tl.sum(bias * counts[None, :], axis=1)
        if PDL and turn == 0:
            gdc_wait()
            gdc_launch_dependents()
        x_rows = inner_ptr + (token * PAIRS + tl.minimum(turn + mine, PAIRS - 1)) * K
        x = slices_of_x(x_rows, 0, K)
        acc = tl.zeros((TURNS * W, 16, 8), tl.float32)
        for eight in tl.static_range(0, SLICES, EIGHT):
            next_x = slices_of_x(x_rows, eight + 8, K)
            next_words = slice_words(codes_ptr, start, row, there, eight + 8 + part, SLICES)
            next_scale = slice_scales(scales_ptr, scales, row, eight + 8 + part, SLICES, FORMAT, FAST)
            weights = as_eights(weights_of(words, word_scales(scale, FORMAT), FORMAT, FAST), TURNS, W, x.dtype)
            acc = tl.dot(weights, for_all(x, TURNS, W), acc, input_precision=PRECISION)
            words, scale, x = next_words, next_scale, next_x
        found = tl.where((turn + mine < PAIRS)[None, :, None], same_slices(acc, TURNS, W), 0.0)
        sums += tl.reshape(tl.sum(found, axis=1), (2 * TURNS,))
    to, inside = out_ptr + token * N + outputs, outputs < N
    if ADD:
        sums += tl.load(to, mask=inside, other=0.0).to(tl.float32)
    tl.store(to, sums.to(out_ptr.dtype.element_ty), mask=inside)


class CodeForm(NamedTuple):
    """How the work is divided."""

    warps: int
    turns: int  # tiles of 16 rows of weights that a warp multiplies side by side


GATE = CodeForm(4, 1)  # as measured on an H200 with gpt-oss-20b's shape, like the two turns below


def down_form(pairs: int) -> CodeForm:
    """A warp for each pair."""
    return CodeForm(min(8, triton.next_power_of_2(pairs)), 2)
