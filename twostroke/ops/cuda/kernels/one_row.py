"""One row times a matrix of eight bits, norm or gate included: x stays in registers while the matrix is read once.

A tensor-core instruction multiplies 16 rows by 8 columns. One row of x would use one column, so the product is arranged
differently: the 16 rows are four outputs times four neighbouring segments of 64 bytes, the columns are the same four
segments of x in two parts each (narrow_tiles.py says why two). Only products of a segment with itself are needed; the
others are dropped, and cost nothing, because the tensor cores are not the limit. So a warp reads 256 neighbouring bytes
of an output and needs x only for its own segments. It prepares them once and keeps them: no kernel before has to split
x, and the loop reads nothing but the matrix.

Programs take tiles of outputs in turn. A program loads its next tile as soon as the registers of the tile before are
free. The sum over the warps at the end of a tile is a barrier, which keeps the compiler from moving those loads behind
it. Between the last loads of one kernel and the first of the next, the
memory would be idle for two microseconds or more: so a program that has loaded its last tile prefetches the beginning
of the next matrix into the L2 cache.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from twostroke.ops.cuda.kernels.launch import (
    EARLY,
    FETCH_BYTES,
    INTERPRETED,
    PDL,
    ask_ahead,
    gdc_launch_dependents,
    gdc_wait,
)
from twostroke.ops.cuda.kernels.narrow_tiles import (
    BYTES,
    FINE,
    JOINED,
    WHOLE,
    WHOLE_BITS,
    as_tall,
    codes_of,
    whole_parts,
)
from twostroke.ops.cuda.kernels.rows import NORM, NOTHING, gated_pair


@triton.jit
def output_rows(tile, within, n_rows, TALL: tl.constexpr, GATE: tl.constexpr):
    """Rows of the matrix for a tile's outputs. With a gate they are pairs, one row of each half of the matrix. Past the
    last output the result is n_rows."""
    if GATE == 0:
        return tile * TALL + within
    else:
        pair = tile * (TALL // 2) + within // 2
        return tl.where(pair < n_rows // 2, pair + within % 2 * (n_rows // 2), n_rows)


@triton.jit
def tile_words(
    w_ptr, tile, n_rows, SEGMENTS: tl.constexpr, W: tl.constexpr, ROUNDS: tl.constexpr, FOURS: tl.constexpr,
    GATE: tl.constexpr,
):  # fmt: skip
    """(FOURS · ROUNDS · 2 · W · 8, 16) words of a tile's 4 FOURS outputs: rows (four, round, pair, warp, output of the
    pair, segment)."""
    index = tl.arange(0, FOURS * ROUNDS * 2 * W * 8)
    within = index // (ROUNDS * 2 * W * 8) * 4 + index // (W * 8) % 2 * 2 + index // 4 % 2
    n = output_rows(tile, within, n_rows, 4 * FOURS, GATE)
    segment = (index // (2 * W * 8) % ROUNDS * W + index // 8 % W) * 4 + index % 4
    at = tl.multiple_of(n.to(tl.int64) * (SEGMENTS * 16) + segment * 16, 4)
    there = n < n_rows
    if ROUNDS * W * 4 != SEGMENTS:
        there = there & (segment < SEGMENTS)
    return tl.load(w_ptr + at[:, None] + tl.arange(0, 16)[None, :], mask=there[:, None], other=0)


@triton.jit
def row_places(W: tl.constexpr, ROUNDS: tl.constexpr):
    """(ROUNDS · W · 32, 8): which elements of x each lane of each warp prepares: rows (round, warp, segment, half,
    quarter). It will hold one part of both halves, and prepares both parts of one."""
    index = tl.arange(0, ROUNDS * W * 32)
    within = index % 4 * 16 + index // 4 % 2 * 8
    return tl.multiple_of(index // 8 * 64 + within, 8)[:, None] + tl.arange(0, 8)[None, :]


@triton.jit
def raw_row(x_ptr, k, K: tl.constexpr, BEFORE: tl.constexpr):
    x = tl.load(x_ptr + k, mask=k < K, other=0.0).to(tl.float32)
    if BEFORE >= 2:
        x = gated_pair(x, tl.load(x_ptr + K + k, mask=k < K, other=0.0).to(tl.float32), BEFORE)
    return x


@triton.jit
def parts_of(x, FORMAT: tl.constexpr):
    """x, over its unit, as two parts: about first + second, in whole numbers first + second / FINE."""
    if FORMAT == 1:
        first, second = whole_parts(x)
    else:
        first = x.to(tl.float16)
        second = (x - first.to(tl.float32)).to(tl.float16)
    return first, second


@triton.jit
def as_narrow(x, W: tl.constexpr, ROUNDS: tl.constexpr, FOURS: tl.constexpr, FORMAT: tl.constexpr, RUN: tl.constexpr):
    """x (rows, 8) as the other operand, (FOURS · ROUNDS · W, 64, 8): column 2 s + p is part p of segment s."""
    first, second = parts_of(x, FORMAT)
    x = tl.reshape(tl.join(first, second), (ROUNDS * W, 4, 2, 4, 8 // RUN, RUN, 2))
    x = tl.reshape(tl.permute(x, (0, 2, 4, 3, 5, 1, 6)), (1, ROUNDS * W, 64, 8))
    return tl.reshape(tl.broadcast_to(x, (FOURS, ROUNDS * W, 64, 8)), (FOURS * ROUNDS * W, 64, 8))


@triton.jit
def largest_of(x, W: tl.constexpr, ROUNDS: tl.constexpr):
    """The largest magnitude of every segment, (ROUNDS · W · 4,)."""
    return tl.maximum(tl.max(tl.reshape(tl.abs(x), (ROUNDS * W * 4, 64)), axis=1), 1e-30)


@triton.jit
def over(x, unit, W: tl.constexpr, ROUNDS: tl.constexpr):
    x = tl.reshape(x, (ROUNDS * W * 4, 64)) * (1.0 / unit)[:, None]
    return tl.reshape(x, (ROUNDS * W * 32, 8))


@triton.jit
def tile_start(x, BATCH: tl.constexpr, FORMAT: tl.constexpr):
    """The starting values of a tile's sums. For floats they are zero, computed from x so that x is in its lanes before
    the loop."""
    if FORMAT == 1:
        return tl.full((BATCH, 16, 8), WHOLE_BITS, tl.int32)
    else:
        return tl.dot(tl.zeros((BATCH, 16, 64), x.dtype), x, tl.zeros((BATCH, 16, 8), tl.float32))


@triton.jit
def tile_products(
    words, x, start, W: tl.constexpr, ROUNDS: tl.constexpr, FOURS: tl.constexpr, FORMAT: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """(FOURS · ROUNDS · W, 16, 4): every output's segment times every segment of x."""
    BATCH: tl.constexpr = FOURS * ROUNDS * W
    RUN: tl.constexpr = (4 if FORMAT == 1 else 2) * JOINED
    if FORMAT == 1:
        codes = as_tall(codes_of(words, FORMAT, FAST), W, FOURS * ROUNDS, 2, RUN)
        found = tl.dot(codes, x, start, out_dtype=tl.int32).to(tl.float32, bitcast=True) - WHOLE
    else:
        found = tl.dot(as_tall(codes_of(words, FORMAT, FAST), W, FOURS * ROUNDS, 2, RUN), x, start)
    one, two = tl.split(tl.reshape(found, (BATCH, 16, 4, 2)))
    return one + two * (1.0 / FINE) if FORMAT == 1 else one + two


@triton.jit
def same_segment():
    """(1, 4, 4, 4): whether a row (output, segment) and a column have the same segment."""
    four = tl.arange(0, 4)
    return (four[:, None] == four[None, :])[None, None, :, :]


@triton.jit
def tile_sums(found, W: tl.constexpr, ROUNDS: tl.constexpr, FOURS: tl.constexpr):
    """(4 FOURS,): the products of `found` that are needed, summed over segments."""
    found = tl.sum(tl.reshape(found, (FOURS, ROUNDS, W, 16, 4)), axis=1)
    found = tl.where(same_segment(), tl.reshape(found, (FOURS * W, 4, 4, 4)), 0.0)
    found = tl.sum(tl.reshape(found, (FOURS, W, 4, 16)), axis=3)
    return tl.reshape(tl.sum(found, axis=1), (4 * FOURS,))


@triton.jit
def load_tile(
    w_ptr, scales_ptr, tile, n_rows, SEGMENTS: tl.constexpr, W: tl.constexpr, ROUNDS: tl.constexpr,
    FOURS: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    words = tile_words(w_ptr, tile, n_rows, SEGMENTS, W, ROUNDS, FOURS, GATE)
    n = output_rows(tile, tl.arange(0, 4 * FOURS), n_rows, 4 * FOURS, GATE)
    return words, tl.load(scales_ptr + n, mask=n < n_rows, other=0.0)


@triton.jit
def do_tile(
    words, scale, x, start, units, unit, tile, following, w_ptr, scales_ptr, bias_ptr, out_ptr, n_rows,
    SEGMENTS: tl.constexpr, W: tl.constexpr, ROUNDS: tl.constexpr, FOURS: tl.constexpr, FORMAT: tl.constexpr,
    BIAS: tl.constexpr, ADD: tl.constexpr, GATE: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """A tile's outputs, and the next tile, which takes its registers."""
    n = output_rows(tile, tl.arange(0, 4 * FOURS), n_rows, 4 * FOURS, GATE)
    residual = tl.load(out_ptr + n, mask=n < n_rows, other=0.0).to(tl.float32) if ADD else 0.0
    found = tile_products(words, x, start, W, ROUNDS, FOURS, FORMAT, FAST)
    words, next_scale = load_tile(w_ptr, scales_ptr, following, n_rows, SEGMENTS, W, ROUNDS, FOURS, GATE)
    if FORMAT == 1:
        found = tl.reshape(tl.reshape(found, (FOURS, ROUNDS * W, 16, 4)) * units[None, :, None, :], found.shape)
    out = tile_sums(found, W, ROUNDS, FOURS)
    if FORMAT == 3:
        out *= unit
    out *= scale
    if BIAS:
        out += tl.load(bias_ptr + n, mask=n < n_rows, other=0.0)
    if GATE:
        gate, up = tl.split(tl.reshape(out, (2 * FOURS, 2)))
        out = gated_pair(gate, up, GATE)
        n = tile * (2 * FOURS) + tl.arange(0, 2 * FOURS)
        n_rows = n_rows // 2
    tl.store(out_ptr + n, (out + residual).to(out_ptr.dtype.element_ty), mask=n < n_rows)
    return words, next_scale


@triton.jit(do_not_specialize=["ask"])
def one_row_kernel(
    x_ptr, norm_ptr, w_ptr, scales_ptr, bias_ptr, out_ptr, next_ptr, eps, n_rows, ask,
    K: tl.constexpr, BEFORE: tl.constexpr, FORMAT: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr,
    GATE: tl.constexpr, W: tl.constexpr, ROUNDS: tl.constexpr, FOURS: tl.constexpr, BUFFERS: tl.constexpr,
    ASK: tl.constexpr, PDL: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    SEGMENTS: tl.constexpr = (K + 63) // 64
    TALL: tl.constexpr = 4 * FOURS
    RUN: tl.constexpr = (4 if FORMAT == 1 else 2) * JOINED
    w_ptr = w_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    mine, turn = tl.program_id(0), tl.num_programs(0)
    tiles = tl.cdiv(n_rows, TALL)
    words, scale = load_tile(w_ptr, scales_ptr, mine, n_rows, SEGMENTS, W, ROUNDS, FOURS, GATE)
    others, other = words, scale
    if BUFFERS == 2:
        others, other = load_tile(w_ptr, scales_ptr, mine + turn, n_rows, SEGMENTS, W, ROUNDS, FOURS, GATE)
    places = row_places(W, ROUNDS)
    if BEFORE == 1:
        norm = tl.load(norm_ptr + places, mask=places < K, other=0.0)
        most = tl.max(tl.abs(norm.to(tl.float32))) * tl.sqrt(K * 1.0)  # no element of a normed row is larger
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x = raw_row(x_ptr, places, K, BEFORE)
    if BEFORE == 1:
        x *= norm.to(tl.float32) * tl.rsqrt(tl.sum(x * x) / K + eps)
    unit = 0.0
    units = tl.zeros((ROUNDS * W, 4), tl.float32)
    if FORMAT == 3:
        if BEFORE != 1:
            most = tl.max(tl.abs(x))
        unit = tl.maximum(most, 1e-30) / 16384.0  # parts of float16 reach down to 2^-38 of the largest
        x *= 1.0 / unit
    elif FORMAT == 1:
        largest = largest_of(x, W, ROUNDS) / 127.0
        x = over(x, largest, W, ROUNDS)
        units = tl.reshape(largest, (ROUNDS * W, 4))
    x = as_narrow(x, W, ROUNDS, FOURS, FORMAT, RUN)
    start = tile_start(x, FOURS * ROUNDS * W, FORMAT)
    for tile in tl.range(mine, tiles, BUFFERS * turn, num_stages=1):
        if ASK and tile + BUFFERS * turn >= tiles:  # all of this matrix is being loaded
            ask_ahead(next_ptr, mine, turn, ask)
        words, scale = do_tile(
            words, scale, x, start, units, unit, tile, tile + BUFFERS * turn, w_ptr, scales_ptr, bias_ptr,
            out_ptr, n_rows, SEGMENTS, W, ROUNDS, FOURS, FORMAT, BIAS, ADD, GATE, FAST,
        )  # fmt: skip
        if BUFFERS == 2:
            others, other = do_tile(
                others, other, x, start, units, unit, tile + turn, tile + 3 * turn, w_ptr, scales_ptr, bias_ptr,
                out_ptr, n_rows, SEGMENTS, W, ROUNDS, FOURS, FORMAT, BIAS, ADD, GATE, FAST,
            )  # fmt: skip


FETCHES = 6  # of the next matrix by each program, FETCH_BYTES each; as measured on an H200


class RowForm(NamedTuple):
    """How the work is divided."""

    warps: int
    fours: int  # of outputs in a tile
    buffers: int  # tiles that a program loads at once
    programs: int  # on a multiprocessor


def form_for(fmt: int, segments: int) -> RowForm:
    """The fastest form, as measured on an H200 in whole steps (benchmarks/gpu_products.py)."""
    wide = segments <= 64
    return RowForm(8, 2, 1, 2) if wide else RowForm(16, 1, 1, 1)


@lru_cache
def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def one_row(
    x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, out: Tensor, fmt: int, *, before: int = NOTHING,
    norm: Tensor | None = None, eps: float = 0.0, add: bool = False, gate: int = NOTHING,
    following: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """out (1, N) = before(x) @ matrix.T · scales + bias, added to what `out` holds with `add`.

    gate: out (1, N / 2) is the first half of that, activated, times the second.
    following: the matrix that is read next, if its beginning is to be prefetched into the L2 cache.
    """
    n, segments, k = codes.shape[0], codes.shape[1] // BYTES, x.shape[1] // (2 if before > NORM else 1)
    assert triton.cdiv(k, BYTES) == segments and x.shape[0] == 1 and x.is_contiguous()
    form = form_for(fmt, segments)
    programs = min(triton.cdiv(n, 4 * form.fours), processors(x.device) * form.programs)
    ask = 0
    if following is not None and not INTERPRETED:
        ask = min(FETCHES, following.nbytes // (programs * FETCH_BYTES.value))
    one_row_kernel[(programs,)](
        x, x if norm is None else norm, codes, scales, scales if bias is None else bias, out,
        codes if following is None else following, eps, n, ask, K=k, BEFORE=before, FORMAT=fmt,
        BIAS=bias is not None, ADD=add, GATE=gate, W=form.warps,
        ROUNDS=triton.next_power_of_2(triton.cdiv(segments, 4 * form.warps)), FOURS=form.fours, BUFFERS=form.buffers,
        ASK=ask > 0, PDL=PDL, FAST=not INTERPRETED, num_warps=form.warps, num_stages=1, **EARLY,
    )  # fmt: skip
    return out
