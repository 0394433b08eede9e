"""One row times an int4 matrix: groups of 32 inputs have scales of their own, and the codes are multiplied as integers.

A lane holds 16 bytes of an output, which are one group (quantized.py). So the columns of the other operand are the four
groups of a segment in two parts each, and a column is zero in the lanes of the other groups: what the tensor cores add
up for a column is one group's sum. It is a whole number, and needs one scale and one least value for every 32 codes.
That is less than two instructions for a code, where codes that become bfloat16 one by one take four.

    sum over inputs of weight · x = sum over groups of scale · (sum of code · x) + least · (sum of x)

Programs take tiles of 16 outputs in turn, as in one_row.py. Where there are few outputs, or many inputs, programs share
the inputs of a tile, and the last of them to finish adds their sums in order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from twostroke.ops.cuda.kernels.decoded import counters
from twostroke.ops.cuda.kernels.launch import (
    EARLY,
    FETCH_BYTES,
    INTERPRETED,
    PDL,
    ask_ahead,
    gdc_launch_dependents,
    gdc_wait,
)
from twostroke.ops.cuda.kernels.narrow_tiles import FINE, JOINED, WHOLE, WHOLE_BITS, as_tall, bytes_of
from twostroke.ops.cuda.kernels.one_row import processors, raw_row
from twostroke.ops.cuda.kernels.rows import NORM, NOTHING, gated_pair

RUN = tl.constexpr(4 * JOINED.value)  # neighbouring bytes of an output along the product's inner side


@triton.jit
def tile_outputs(tile, within, N: tl.constexpr, GATE: tl.constexpr):
    """Rows of the matrix for a tile's outputs. With a gate they are pairs, one row of each half of the matrix."""
    if GATE == 0:
        return tile * 16 + within
    else:
        return tile * 8 + within // 2 + within % 2 * (N // 2)


@triton.jit
def outputs_there(tile, within, N: tl.constexpr, GATE: tl.constexpr):
    """Whether there are such outputs."""
    if N % 16 == 0:
        return within * 0 + tile < N // 16
    elif GATE == 0:
        return tile * 16 + within < N
    else:
        return tile * 8 + within // 2 < N // 2


@triton.jit
def tile_words(
    w_ptr, tile, first, N: tl.constexpr, SEGMENTS: tl.constexpr, W: tl.constexpr, ROUNDS: tl.constexpr,
    SPLITS: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """(ROUNDS · 2 · W · 8, 16) words of a tile: rows (round, half of the outputs, warp, output of the half). first: the
    first segment of this program."""
    index = tl.arange(0, ROUNDS * 2 * W * 8)
    within = index // (W * 8) % 2 * 8 + index % 8
    n = tile_outputs(tile, within, N, GATE)
    segment = first + index // 8 % W * ROUNDS + index // (W * 16)
    at = tl.multiple_of(n.to(tl.int64) * (SEGMENTS * 16) + segment * 16, 4)
    there = outputs_there(tile, within, N, GATE)
    if SPLITS * W * ROUNDS != SEGMENTS:
        there = there & (segment < SEGMENTS)
    return tl.load(w_ptr + at[:, None] + tl.arange(0, 16)[None, :], mask=there[:, None], other=0)


@triton.jit
def tile_groups(
    scales_ptr, tile, first, N: tl.constexpr, SEGMENTS: tl.constexpr, W: tl.constexpr, ROUNDS: tl.constexpr,
    SPLITS: tl.constexpr, GATE: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """(ROUNDS · W, 16, 4) words: scale and least value of every group of a tile. Past the end they belong to another
    output or segment: their codes, or their x, are zero, or their sums are not stored. In assembly, so that they are
    loaded where they are used."""
    batch = tl.arange(0, ROUNDS * W)
    n = tile_outputs(tl.minimum(tile, (N - 1) // 16), tl.arange(0, 16), N, GATE)
    if N % 16:
        n = tl.minimum(n, N - 1)
    segment = first + batch % W * ROUNDS + batch // W
    if SPLITS * W * ROUNDS != SEGMENTS:
        segment = tl.minimum(segment, SEGMENTS - 1)
    at = scales_ptr + ((segment[:, None, None] * N + n[None, :, None]) * 4 + tl.arange(0, 4)[None, None, :])
    if FAST:
        return tl.inline_asm_elementwise(
            "ld.global.nc.b32 $0, [$1];", "=r,l", [at], dtype=tl.int32, is_pure=True, pack=1
        )  # fmt: skip
    else:
        return tl.load(at)


@triton.jit
def row_places(first, shift, W: tl.constexpr, ROUNDS: tl.constexpr):
    """(ROUNDS · W, 64): the inputs at the places of the products' inner side, of low nibbles and, `shift` by 16, of
    high ones."""
    batch, place = tl.arange(0, ROUNDS * W), tl.arange(0, 64)
    within = place // RUN % 4 * 32 + place // (4 * RUN) * RUN + place % RUN
    segment = first + batch % W * ROUNDS + batch // W
    return tl.max_contiguous(tl.multiple_of(segment[:, None] * 128 + within[None, :] + shift, (1, 8)), (1, 8))


@triton.jit
def words_of(x, ROWS: tl.constexpr):
    """(ROWS, 16) words of the lowest bytes of x (ROWS, 64)."""
    even, odd = tl.split(tl.reshape(x & 255, (ROWS, 16, 2, 2)))
    first, second = tl.split(even | odd << 8)
    return first | second << 16


@triton.jit
def by_group(x, W: tl.constexpr, ROUNDS: tl.constexpr):
    """x (ROUNDS · W, 64), in units, as the other operand's columns (ROUNDS · W, 8, 64): column 2 g + p is part p of
    group g. They are made word by word, so that a column lies in one piece."""
    coarse = x + WHOLE
    fine = (x - (coarse - WHOLE)) * FINE + WHOLE
    first = words_of(coarse.to(tl.int32, bitcast=True), ROUNDS * W)
    second = words_of(fine.to(tl.int32, bitcast=True), ROUNDS * W)
    column, word = tl.arange(0, 8), tl.arange(0, 16)
    own = (word // (RUN // 4) % 4)[None, :] == (column // 2)[:, None]
    part = (column % 2)[None, :, None] == 0
    words = tl.where(own[None, :, :], tl.where(part, first[:, None, :], second[:, None, :]), 0)
    return tl.reshape(bytes_of(words), (ROUNDS * W, 8, 64))


@triton.jit
def group_sums(x, W: tl.constexpr, ROUNDS: tl.constexpr):
    """(ROUNDS · W, 4): the sums of x over the places of each group."""
    x = tl.reshape(x, (ROUNDS * W, 64 // (4 * RUN), 4, RUN))
    return tl.sum(tl.sum(x, axis=3), axis=1)


@triton.jit
def nibbles(words, HIGH: tl.constexpr, FAST: tl.constexpr):
    """The low or the high nibbles of words of bytes, as bytes. In assembly, so that the compiler does not take the
    words apart before the product, only to put them together again."""
    if FAST:
        SHIFT: tl.constexpr = "4" if HIGH else "0"
        return tl.inline_asm_elementwise(
            "shr.u32 $0, $1, " + SHIFT + "; and.b32 $0, $0, 0x0f0f0f0f;", "=r,r", [words], dtype=tl.int32, is_pure=True,
            pack=1,
        )  # fmt: skip
    else:
        return (words >> (4 if HIGH else 0)) & 0x0F0F0F0F


@triton.jit
def tile_products(words, groups, low, high, units, sums, W: tl.constexpr, ROUNDS: tl.constexpr, FAST: tl.constexpr):
    """(W, 16, 4): a tile's outputs, of every warp and group."""
    start = tl.full((ROUNDS * W, 16, 8), WHOLE_BITS, tl.int32)
    codes = as_tall(bytes_of(nibbles(words, False, FAST)), W, ROUNDS, 2, RUN)
    found = tl.dot(codes, tl.permute(low, (0, 2, 1)), start, out_dtype=tl.int32)
    codes = as_tall(bytes_of(nibbles(words, True, FAST)), W, ROUNDS, 2, RUN)
    found = tl.dot(codes, tl.permute(high, (0, 2, 1)), found, out_dtype=tl.int32).to(tl.float32, bitcast=True) - WHOLE
    one, two = tl.split(tl.reshape(found, (ROUNDS * W, 16, 4, 2)))
    scale, least = (groups << 16).to(tl.float32, bitcast=True), (groups & -65536).to(tl.float32, bitcast=True)
    out = (one + two * (1.0 / FINE)) * units[:, None, None] * scale + least * sums[:, None, :]
    return tl.sum(tl.reshape(out, (ROUNDS, W, 16, 4)), axis=0)


@triton.jit
def store_tile(out, residual, tile, bias_ptr, out_ptr, N: tl.constexpr, BIAS: tl.constexpr, GATE: tl.constexpr):
    within = tl.arange(0, 16)
    if BIAS:
        there = outputs_there(tile, within, N, GATE)
        out += tl.load(bias_ptr + tile_outputs(tile, within, N, GATE), mask=there, other=0.0)
    if GATE:
        gate, up = tl.split(tl.reshape(out, (8, 2)))
        n = tile * 8 + tl.arange(0, 8)
        tl.store(out_ptr + n, gated_pair(gate, up, GATE).to(out_ptr.dtype.element_ty), mask=n < N // 2)
    else:
        n = tile * 16 + within
        tl.store(out_ptr + n, (out + residual).to(out_ptr.dtype.element_ty), mask=n < N)


@triton.jit(do_not_specialize=["ask"])
def int4_row_kernel(
    x_ptr, norm_ptr, w_ptr, scales_ptr, bias_ptr, out_ptr, next_ptr, sums_ptr, count_ptr, eps, ask,
    N: tl.constexpr, K: tl.constexpr, K_2: tl.constexpr, BEFORE: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr,
    GATE: tl.constexpr, W: tl.constexpr, ROUNDS: tl.constexpr, SPLITS: tl.constexpr, ASK: tl.constexpr,
    PDL: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    SEGMENTS: tl.constexpr = (K + 127) // 128
    w_ptr = w_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    split = tl.program_id(0) % SPLITS
    mine, turn = tl.program_id(0) // SPLITS, tl.num_programs(0) // SPLITS
    first = split * (W * ROUNDS)
    TILES: tl.constexpr = (N + 15) // 16
    words = tile_words(w_ptr, mine, first, N, SEGMENTS, W, ROUNDS, SPLITS, GATE)
    groups = tile_groups(scales_ptr, mine, first, N, SEGMENTS, W, ROUNDS, SPLITS, GATE, FAST)
    at_low, at_high = row_places(first, 0, W, ROUNDS), row_places(first, 16, W, ROUNDS)
    if BEFORE == 1:
        low_norm = tl.load(norm_ptr + at_low, mask=at_low < K, other=0.0)
        high_norm = tl.load(norm_ptr + at_high, mask=at_high < K, other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    low, high = raw_row(x_ptr, at_low, K, BEFORE), raw_row(x_ptr, at_high, K, BEFORE)
    if BEFORE == 1:
        if SPLITS == 1:
            squares = tl.sum(low * low + high * high)
        else:
            every = tl.arange(0, K_2)
            whole = tl.load(x_ptr + every, mask=every < K, other=0.0).to(tl.float32)
            squares = tl.sum(whole * whole)
        size = tl.rsqrt(squares / K + eps)
        low *= low_norm.to(tl.float32) * size
        high *= high_norm.to(tl.float32) * size
    units = tl.maximum(tl.max(tl.maximum(tl.abs(low), tl.abs(high)), axis=1), 1e-30) / 127.0
    sums = group_sums(low + high, W, ROUNDS)
    low = by_group(low * (1.0 / units)[:, None], W, ROUNDS)
    high = by_group(high * (1.0 / units)[:, None], W, ROUNDS)
    for tile in tl.range(mine, TILES, turn, num_stages=1):
        if ASK and tile + turn >= TILES:  # all of this matrix is being loaded
            ask_ahead(next_ptr, tl.program_id(0), tl.num_programs(0), ask)
        n = tile * 16 + tl.arange(0, 16)
        residual = tl.load(out_ptr + n, mask=n < N, other=0.0).to(tl.float32) if ADD else 0.0
        found = tile_products(words, groups, low, high, units, sums, W, ROUNDS, FAST)
        words = tile_words(w_ptr, tile + turn, first, N, SEGMENTS, W, ROUNDS, SPLITS, GATE)
        groups = tile_groups(scales_ptr, tile + turn, first, N, SEGMENTS, W, ROUNDS, SPLITS, GATE, FAST)
        out = tl.sum(tl.sum(found, axis=2), axis=0)  # a barrier: the loads stand in front of it
        if SPLITS == 1:
            store_tile(out, residual, tile, bias_ptr, out_ptr, N, BIAS, GATE)
        else:
            tl.store(sums_ptr + split * N + n, out, mask=n < N)
            tl.debug_barrier()
            if tl.atomic_add(count_ptr + tile, 1, sem="acq_rel") == SPLITS - 1:
                tl.store(count_ptr + tile, 0)
                out = tl.zeros((16,), tl.float32)
                for other in tl.static_range(SPLITS):
                    out += tl.load(sums_ptr + other * N + n, mask=n < N, other=0.0, cache_modifier=".cg")
                store_tile(out, residual, tile, bias_ptr, out_ptr, N, BIAS, GATE)


WIDEST = 128  # segments of a matrix whose gate can be applied at once


class Int4Form(NamedTuple):
    """How the work is divided."""

    warps: int
    rounds: int  # segments of a warp
    programs: int  # on a multiprocessor


FETCHES = 6  # of the next matrix by each program, FETCH_BYTES each


def form_for(segments: int, gated: bool) -> Int4Form:
    """The fastest form, as measured on an H200 in whole steps. The outputs of a gate are not divided among programs."""
    if segments <= 32:
        return Int4Form(4, triton.next_power_of_2(triton.cdiv(segments, 4)), 2)
    if gated:
        return Int4Form(16, triton.next_power_of_2(triton.cdiv(segments, 16)), 1)
    return Int4Form(8, 2, 3)


def one_row_int4(
    x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, out: Tensor, *, before: int = NOTHING,
    norm: Tensor | None = None, eps: float = 0.0, add: bool = False, gate: int = NOTHING,
    following: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """As one_row (one_row.py), for an int4 matrix."""
    n, segments, k = codes.shape[0], codes.shape[1] // 64, x.shape[1] // (2 if before > NORM else 1)
    assert triton.cdiv(k, 128) == segments and x.shape[0] == 1 and x.is_contiguous()
    form = form_for(segments, gate != NOTHING)
    splits = triton.cdiv(segments, form.warps * form.rounds)
    assert splits == 1 or not gate
    tiles = triton.cdiv(n, 16)
    programs = min(tiles, max(1, processors(x.device) * form.programs // splits)) * splits
    sums = scales if splits == 1 else torch.empty(splits, n, dtype=torch.float32, device=x.device)
    ask = 0
    if following is not None and not INTERPRETED:
        ask = min(FETCHES, following.nbytes // (programs * FETCH_BYTES.value))
    int4_row_kernel[(programs,)](
        x, x if norm is None else norm, codes, scales, scales if bias is None else bias, out,
        codes if following is None else following, sums, counters(x.device), eps, ask, N=n, K=k,
        K_2=triton.next_power_of_2(k), BEFORE=before, BIAS=bias is not None, ADD=add, GATE=gate, W=form.warps,
        ROUNDS=form.rounds, SPLITS=splits, ASK=ask > 0, PDL=PDL, FAST=not INTERPRETED, num_warps=form.warps,
        num_stages=1, **EARLY,
    )  # fmt: skip
    return out
