"""A few rows times a matrix of few bits: weights go from memory into the operands of the tensor cores directly.

The weights are the product's tall side (16 outputs for an instruction), the rows of x its narrow side, so that one row
costs as much as four. A lane loads 16 bytes of the matrix at a time, and they are the elements that it must hold as an
operand: the order of the inputs along the product is free as long as x has the same, so nothing moves through shared
memory. Each warp takes its own slices of 64 bytes along the inputs; the sums of the warps are added at the end.

x is divided into slices too, each scaled by its largest element, and every element into two parts: int8 and int4
matrices are multiplied as integers and keep sixteen bits of x, fp8 ones as float16. A kernel before this one does that,
and the norm or gate. Inside this kernel every program would do it again, which costs more than it saves (docs/gpu.md).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from twostroke.ops.cuda.kernels.launch import EARLY, INTERPRETED, PDL, gdc_launch_dependents, gdc_wait
from twostroke.ops.cuda.kernels.narrow_tiles import FINE, WHOLE, WHOLE_BITS, codes_of, high_nibbles, low_nibbles
from twostroke.ops.cuda.kernels.rows import activated

INT8, INT4, FP8 = 1, 2, 3
NOTHING, NORM, SILU, GELU = 0, 1, 2, 3  # what happens to x before the product
BYTES = 64  # of a row of the matrix in a slice


@triton.jit
def parts_of(x, FORMAT: tl.constexpr):
    """x, over its unit, as two parts: about first + second, in whole numbers first + second / FINE."""
    if FORMAT == 3:
        first = x.to(tl.float16)
        second = (x - first.to(tl.float32)).to(tl.float16)
    else:
        coarse = x + WHOLE
        first = coarse.to(tl.int32, bitcast=True).to(tl.int8)
        second = ((x - (coarse - WHOLE)) * FINE + WHOLE).to(tl.int32, bitcast=True).to(tl.int8)
    return first, second


@triton.jit
def largest_of(x):
    return tl.maximum(tl.max(tl.abs(x), axis=1), 1e-30)


@triton.jit(do_not_specialize=["tokens"])
def cut_kernel(
    x_ptr, norm_ptr, parts_ptr, units_ptr, eps, x_stride, tokens, K: tl.constexpr, K_2: tl.constexpr,
    BEFORE: tl.constexpr, S: tl.constexpr, SLICES: tl.constexpr, FORMAT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    slices = tl.program_id(1) * SLICES + tl.arange(0, SLICES)
    k = slices[:, None] * S + tl.arange(0, S)[None, :]
    inside = k < K
    row = x_ptr + token.to(tl.int64) * x_stride
    weight = tl.load(norm_ptr + k, mask=inside, other=0.0).to(tl.float32) if BEFORE == 1 else 1.0
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x = tl.load(row + k, mask=inside, other=0.0).to(tl.float32)
    if BEFORE == 1:
        every = tl.arange(0, K_2)
        whole = tl.load(row + every, mask=every < K, other=0.0).to(tl.float32)
        x *= weight * tl.rsqrt(tl.sum(whole * whole) / K + eps)
    elif BEFORE >= 2:
        x = activated(x, BEFORE == 2) * tl.load(row + K + k, mask=inside, other=0.0).to(tl.float32)
    unit = largest_of(x) / (16.0 if FORMAT == 3 else 127.0)
    first, second = parts_of(x / unit[:, None], FORMAT)
    at = parts_ptr + token.to(tl.int64) * K + k
    tl.store(at, first, mask=inside)
    tl.store(at + tokens * K, second, mask=inside)
    tl.store(units_ptr + token * (K // S) + slices, unit, mask=slices * S < K)


@triton.jit
def weight_words(
    w_ptr, n0, n_rows, first, SLICES: tl.constexpr, W: tl.constexpr, G: tl.constexpr, EIGHTS: tl.constexpr
):  # fmt: skip
    """(G · EIGHTS · W · 8, 16) words: slices first + g W + w of outputs n0 on, in the order (g, eight, w, output)."""
    index = tl.arange(0, G * EIGHTS * W * 8)
    n = n0 + index // (W * 8) % EIGHTS * 8 + index % 8
    part = first + index // (W * 8 * EIGHTS) * W + index // 8 % W
    at = tl.multiple_of(n.to(tl.int64) * (SLICES * 16) + part * 16, 4)
    there = (n < n_rows) & (part < SLICES)
    return tl.load(w_ptr + at[:, None] + tl.arange(0, 16)[None, :], mask=there[:, None], other=0)


@triton.jit
def as_tall(
    words, W: tl.constexpr, G: tl.constexpr, EIGHTS: tl.constexpr, FORMAT: tl.constexpr, RUN: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """(G · W, 8 EIGHTS, 64) operands of a product, inputs in the lanes' order."""
    codes = tl.reshape(codes_of(words, FORMAT, FAST), (G, EIGHTS, W, 8, 4, 16 // RUN, RUN))
    return tl.reshape(tl.permute(codes, (0, 2, 1, 3, 5, 4, 6)), (G * W, EIGHTS * 8, 64))


@triton.jit
def products(
    words, x, y, W: tl.constexpr, G: tl.constexpr, EIGHTS: tl.constexpr, COLUMNS: tl.constexpr, FORMAT: tl.constexpr,
    RUN: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Slices of the matrix times x (G · W, 64, COLUMNS), whose columns are the two parts of each token in turn: sums
    (G · W, 8 EIGHTS, COLUMNS / 2) float32. y: the part of x that is multiplied with the high nibbles of int4."""
    if FORMAT == 3:
        zero = tl.zeros((G * W, EIGHTS * 8, COLUMNS), tl.float32)
        found = tl.dot(as_tall(words, W, G, EIGHTS, FORMAT, RUN, FAST), x, zero)
    else:
        found = tl.full((G * W, EIGHTS * 8, COLUMNS), WHOLE_BITS, tl.int32)
        if FORMAT == 2:
            low = as_tall(low_nibbles(words), W, G, EIGHTS, FORMAT, RUN, FAST)
            high = as_tall(high_nibbles(words), W, G, EIGHTS, FORMAT, RUN, FAST)
            found = tl.dot(low, x, found, out_dtype=tl.int32)
            found = tl.dot(high, y, found, out_dtype=tl.int32)
        else:
            found = tl.dot(as_tall(words, W, G, EIGHTS, FORMAT, RUN, FAST), x, found, out_dtype=tl.int32)
        found = found.to(tl.float32, bitcast=True) - WHOLE
    one, two = tl.split(tl.reshape(found, (G * W, EIGHTS * 8, COLUMNS // 2, 2)))
    return one + two if FORMAT == 3 else one + two * (1.0 / FINE)


@triton.jit
def group_scales(
    scales_ptr, n0, n_rows, first, SLICES: tl.constexpr, B: tl.constexpr, HEIGHT: tl.constexpr
):  # fmt: skip
    """(B, HEIGHT, 1): int4's scales, over sixteen (low_nibbles)."""
    n, part = n0 + tl.arange(0, HEIGHT), first + tl.arange(0, B)
    at = scales_ptr + part[:, None] * n_rows + n[None, :]
    scale = tl.load(at, mask=(part < SLICES)[:, None] & (n < n_rows)[None, :], other=0.0)
    return (scale * (1.0 / 16.0))[:, :, None]


@triton.jit
def int8_parts(
    parts_ptr, first, tokens, shift, K: tl.constexpr, S: tl.constexpr, W: tl.constexpr, G: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """(G · W, 64, 8 TILES) of x: column 2 t + p is part p of token t; `shift`: where in the slice of S elements."""
    index = tl.arange(0, G * TILES * W * 8)  # (G, TILES, W, 8)
    column = index // (W * 8) % TILES * 8 + index % 8
    part = first + index // (W * 8 * TILES) * W + index // 8 % W
    token = column // 2
    at = (column % 2 * tokens + token).to(tl.int64) * (K // 4) + (part * S + shift) // 4
    there = (token < tokens) & (part < K // S)
    words = parts_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    words = tl.load(words + tl.multiple_of(at, 4)[:, None] + tl.arange(0, 16)[None, :], mask=there[:, None], other=0)
    x = tl.reshape(codes_of(words, 1, False), (G, TILES, W, 8, 4, 2, 8))
    return tl.reshape(tl.permute(x, (0, 2, 5, 4, 6, 1, 3)), (G * W, 64, 8 * TILES))


@triton.jit
def float_parts(
    parts_ptr, first, tokens, K: tl.constexpr, W: tl.constexpr, G: tl.constexpr, TILES: tl.constexpr
):  # fmt: skip
    """The same of float16: a lane loads its 16 elements with two instructions."""
    index = tl.arange(0, G * 2 * TILES * W * 32)  # (G, 2, TILES, W, 8, 4)
    column = index // (W * 32) % TILES * 8 + index // 4 % 8
    part = first + index // (W * 64 * TILES) * W + index // 32 % W
    token = column // 2
    at = (column % 2 * tokens + token).to(tl.int64) * K + part * 64
    at = tl.multiple_of(at + index % 4 * 16 + index // (W * 32 * TILES) % 2 * 8, 8)
    there = (token < tokens) & (part < K // 64)
    x = tl.load(parts_ptr + at[:, None] + tl.arange(0, 8)[None, :], mask=there[:, None], other=0.0)
    x = tl.reshape(x, (G, 2, TILES, W, 8, 4, 2, 4))
    return tl.reshape(tl.permute(x, (0, 3, 1, 6, 5, 7, 2, 4)), (G * W, 64, 8 * TILES))


@triton.jit
def rows_step(
    words, parts_ptr, units_ptr, scales_ptr, n0, n_rows, tokens, first, K: tl.constexpr, S: tl.constexpr,
    W: tl.constexpr, G: tl.constexpr, EIGHTS: tl.constexpr, TILES: tl.constexpr, FORMAT: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    if FORMAT == 3:
        x = float_parts(parts_ptr, first, tokens, K, W, G, TILES)
    else:
        x = int8_parts(parts_ptr, first, tokens, 0, K, S, W, G, TILES)
    y = int8_parts(parts_ptr, first, tokens, 64, K, S, W, G, TILES) if FORMAT == 2 else x
    found = products(words, x, y, W, G, EIGHTS, 8 * TILES, FORMAT, 4 if FORMAT == 3 else 8, FAST)
    part, token = first + tl.arange(0, G * W), tl.arange(0, 4 * TILES)
    there = (part < K // S)[:, None] & (token < tokens)[None, :]
    unit = tl.load(units_ptr + token[None, :] * (K // S) + part[:, None], mask=there, other=0.0)
    found *= unit[:, None, :]
    if FORMAT == 2:
        found *= group_scales(scales_ptr, n0, n_rows, first, K // S, G * W, EIGHTS * 8)
    return found


@triton.jit(do_not_specialize=["tokens"])
def rows_kernel(
    parts_ptr, units_ptr, w_ptr, scales_ptr, bias_ptr, out_ptr, n_rows, tokens,
    K: tl.constexpr, S: tl.constexpr, FORMAT: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, W: tl.constexpr,
    G: tl.constexpr, EIGHTS: tl.constexpr, TILES: tl.constexpr, PDL: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    SLICES: tl.constexpr = K // S
    n0 = tl.program_id(0) * (EIGHTS * 8)
    w_ptr = w_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    words = weight_words(w_ptr, n0, n_rows, 0, SLICES, W, G, EIGHTS)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    total = tl.zeros((G * W, EIGHTS * 8, 4 * TILES), tl.float32)
    for first in tl.range(0, SLICES, G * W, num_stages=1):
        following = weight_words(w_ptr, n0, n_rows, first + G * W, SLICES, W, G, EIGHTS)
        total += rows_step(
            words, parts_ptr, units_ptr, scales_ptr, n0, n_rows, tokens, first, K, S, W, G, EIGHTS, TILES, FORMAT, FAST
        )
        words = following
    out = tl.sum(total, axis=0)  # (8 EIGHTS, 4 TILES)
    n, token = n0 + tl.arange(0, EIGHTS * 8), tl.arange(0, 4 * TILES)
    if FORMAT != 2:
        out *= tl.load(scales_ptr + n, mask=n < n_rows, other=0.0)[:, None]
    if BIAS:
        out += tl.load(bias_ptr + n, mask=n < n_rows, other=0.0)[:, None]
    place = out_ptr + token.to(tl.int64)[None, :] * n_rows + n[:, None]
    inside = (n < n_rows)[:, None] & (token < tokens)[None, :]
    if ADD:
        out += tl.load(place, mask=inside, other=0.0).to(tl.float32)
    tl.store(place, out.to(out_ptr.dtype.element_ty), mask=inside)


def cut(x: Tensor, fmt: int, before: int, norm: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """before(x) in two parts, (2, rows, K), and the units of its slices, (rows, slices)."""
    tokens, k = x.shape[0], x.shape[1] // (2 if before >= SILU else 1)
    s = 128 if fmt == INT4 else 64
    parts = torch.empty(2, tokens, k, dtype=torch.float16 if fmt == FP8 else torch.int8, device=x.device)
    units = torch.empty(tokens, k // s, device=x.device)
    slices = 2048 // s
    cut_kernel[(tokens, triton.cdiv(k // s, slices))](
        x, x if norm is None else norm, parts, units, eps, x.stride(0), tokens, K=k, K_2=triton.next_power_of_2(k),
        BEFORE=before, S=s, SLICES=slices, FORMAT=fmt, PDL=PDL, num_warps=8, **EARLY,
    )  # fmt: skip
    return parts, units


SkinnyShape = tuple[int, int, int]  # warps, slices each of them takes at a time, eights of outputs of a program


def skinny(
    x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, out: Tensor, fmt: int, *, before: int = NOTHING,
    norm: Tensor | None = None, eps: float = 0.0, add: bool = False, shape: SkinnyShape | None = None,
) -> Tensor:  # fmt: skip
    """out (rows, N) = before(x) @ matrix.T · scales + bias, added to what `out` holds with `add`."""
    n, tokens = codes.shape[0], x.shape[0]
    s = 128 if fmt == INT4 else 64
    k = codes.shape[1] * s // BYTES
    warps, groups, eighths = shape or shape_for(n, k // s, fmt, tokens)
    parts, units = cut(x, fmt, before, norm, eps)
    rows_kernel[(triton.cdiv(n, 8 * eighths),)](
        parts, units, codes, scales, scales if bias is None else bias, out, n, tokens, K=k, S=s, FORMAT=fmt,
        BIAS=bias is not None, ADD=add, W=warps, G=groups, EIGHTS=eighths,
        TILES=triton.next_power_of_2(triton.cdiv(tokens, 4)), PDL=PDL, FAST=not INTERPRETED, num_warps=warps,
        num_stages=1, **EARLY,
    )  # fmt: skip
    return out


def shape_for(n: int, slices: int, fmt: int, tokens: int) -> SkinnyShape:
    """As measured on an H200."""
    most = 4 if fmt == INT4 and (n > 8192 or slices > 64 or tokens > 8) else 8
    warps = max(1, min(most, triton.next_power_of_2(slices)))
    return warps, next((g for g in (4, 2) if slices % (g * warps) == 0), 1), 2
