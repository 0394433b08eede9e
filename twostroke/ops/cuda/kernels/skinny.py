"""A few rows times an int8 matrix: weights go from memory into the operands of the tensor cores directly.

The weights are the product's tall side (16 outputs for an instruction), the rows of x its narrow side, so that one row
costs as much as four. A lane loads 16 bytes of the matrix at a time, and they are the elements that it must hold as an
operand: the order of the inputs along the product is free as long as x has the same, so nothing moves through shared
memory. Each warp takes its own slices of 64 bytes along the inputs; the sums of the warps are added at the end.

x is divided into slices too, each scaled by its largest element, and every element into two parts of eight bits. A
kernel before this one does that, and the norm or gate. Inside this kernel every program would do it again, which costs
more than it saves (docs/gpu.md).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from twostroke.ops.cuda.kernels.launch import EARLY, PDL, gdc_launch_dependents, gdc_wait
from twostroke.ops.cuda.kernels.narrow_tiles import FINE, WHOLE, WHOLE_BITS, bytes_of
from twostroke.ops.cuda.kernels.rows import activated

INT8, INT4, FP8 = 1, 2, 3
NOTHING, NORM, SILU, GELU = 0, 1, 2, 3  # what happens to x before the product
BYTES = 64  # of a row of the matrix in a slice


@triton.jit
def whole_parts(x):
    """x, over its unit, as two parts: about first + second / FINE."""
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
    BEFORE: tl.constexpr, S: tl.constexpr, SLICES: tl.constexpr, PDL: tl.constexpr,
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
    unit = largest_of(x) / 127.0
    first, second = whole_parts(x / unit[:, None])
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
def as_tall(codes, W: tl.constexpr, G: tl.constexpr, EIGHTS: tl.constexpr, RUN: tl.constexpr):
    """(G · W, 8 EIGHTS, 64) operands of a product, inputs in the lanes' order."""
    codes = tl.reshape(codes, (G, EIGHTS, W, 8, 4, 16 // RUN, RUN))
    return tl.reshape(tl.permute(codes, (0, 2, 1, 3, 5, 4, 6)), (G * W, EIGHTS * 8, 64))


@triton.jit
def int8_parts(
    parts_ptr, first, tokens, K: tl.constexpr, S: tl.constexpr, W: tl.constexpr, G: tl.constexpr, TILES: tl.constexpr
):  # fmt: skip
    """(G · W, 64, 8 TILES) of x: column 2 t + p is part p of token t."""
    index = tl.arange(0, G * TILES * W * 8)  # (G, TILES, W, 8)
    column = index // (W * 8) % TILES * 8 + index % 8
    part = first + index // (W * 8 * TILES) * W + index // 8 % W
    token = column // 2
    at = (column % 2 * tokens + token).to(tl.int64) * (K // 4) + part * S // 4
    there = (token < tokens) & (part < K // S)
    words = parts_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    words = tl.load(words + tl.multiple_of(at, 4)[:, None] + tl.arange(0, 16)[None, :], mask=there[:, None], other=0)
    x = tl.reshape(bytes_of(words), (G, TILES, W, 8, 4, 2, 8))
    return tl.reshape(tl.permute(x, (0, 2, 5, 4, 6, 1, 3)), (G * W, 64, 8 * TILES))


@triton.jit
def rows_step(
    words, parts_ptr, units_ptr, tokens, first, K: tl.constexpr, S: tl.constexpr, W: tl.constexpr, G: tl.constexpr,
    EIGHTS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Slices of the matrix times both parts of each token: sums (G · W, 8 EIGHTS, 4 TILES) float32."""
    x = int8_parts(parts_ptr, first, tokens, K, S, W, G, TILES)
    found = tl.full((G * W, EIGHTS * 8, 8 * TILES), WHOLE_BITS, tl.int32)
    found = tl.dot(as_tall(bytes_of(words), W, G, EIGHTS, 8), x, found, out_dtype=tl.int32)
    found = found.to(tl.float32, bitcast=True) - WHOLE
    one, two = tl.split(tl.reshape(found, (G * W, EIGHTS * 8, 4 * TILES, 2)))
    part, token = first + tl.arange(0, G * W), tl.arange(0, 4 * TILES)
    there = (part < K // S)[:, None] & (token < tokens)[None, :]
    unit = tl.load(units_ptr + token[None, :] * (K // S) + part[:, None], mask=there, other=0.0)
    return (one + two * (1.0 / FINE)) * unit[:, None, :]


@triton.jit(do_not_specialize=["tokens"])
def rows_kernel(
    parts_ptr, units_ptr, w_ptr, scales_ptr, bias_ptr, out_ptr, n_rows, tokens,
    K: tl.constexpr, S: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, W: tl.constexpr, G: tl.constexpr,
    EIGHTS: tl.constexpr, TILES: tl.constexpr, PDL: tl.constexpr,
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
        total += rows_step(words, parts_ptr, units_ptr, tokens, first, K, S, W, G, EIGHTS, TILES)
        words = following
    out = tl.sum(total, axis=0)  # (8 EIGHTS, 4 TILES)
    n, token = n0 + tl.arange(0, EIGHTS * 8), tl.arange(0, 4 * TILES)
    out *= tl.load(scales_ptr + n, mask=n < n_rows, other=0.0)[:, None]
    if BIAS:
        out += tl.load(bias_ptr + n, mask=n < n_rows, other=0.0)[:, None]
    place = out_ptr + token.to(tl.int64)[None, :] * n_rows + n[:, None]
    inside = (n < n_rows)[:, None] & (token < tokens)[None, :]
    if ADD:
        out += tl.load(place, mask=inside, other=0.0).to(tl.float32)
    tl.store(place, out.to(out_ptr.dtype.element_ty), mask=inside)


def cut(x: Tensor, before: int, norm: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """before(x) in two parts, (2, rows, K), and the units of its slices, (rows, slices)."""
    tokens, k = x.shape[0], x.shape[1] // (2 if before >= SILU else 1)
    parts = torch.empty(2, tokens, k, dtype=torch.int8, device=x.device)
    units = torch.empty(tokens, k // BYTES, device=x.device)
    slices = 2048 // BYTES
    cut_kernel[(tokens, triton.cdiv(k // BYTES, slices))](
        x, x if norm is None else norm, parts, units, eps, x.stride(0), tokens, K=k, K_2=triton.next_power_of_2(k),
        BEFORE=before, S=BYTES, SLICES=slices, PDL=PDL, num_warps=8, **EARLY,
    )  # fmt: skip
    return parts, units


SkinnyShape = tuple[int, int, int]  # warps, slices each of them takes at a time, eights of outputs of a program


def skinny(
    x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, out: Tensor, *, before: int = NOTHING,
    norm: Tensor | None = None, eps: float = 0.0, add: bool = False, shape: SkinnyShape | None = None,
) -> Tensor:  # fmt: skip
    """out (rows, N) = before(x) @ matrix.T · scales + bias, added to what `out` holds with `add`."""
    (n, k), tokens = codes.shape, x.shape[0]
    warps, groups, eighths = shape or shape_for(k // BYTES)
    parts, units = cut(x, before, norm, eps)
    rows_kernel[(triton.cdiv(n, 8 * eighths),)](
        parts, units, codes, scales, scales if bias is None else bias, out, n, tokens, K=k, S=BYTES,
        BIAS=bias is not None, ADD=add, W=warps, G=groups, EIGHTS=eighths,
        TILES=triton.next_power_of_2(triton.cdiv(tokens, 4)), PDL=PDL, num_warps=warps, num_stages=1, **EARLY,
    )  # fmt: skip
    return out


def shape_for(slices: int) -> SkinnyShape:
    """As measured on an H200."""
    warps = max(1, min(8, triton.next_power_of_2(slices)))
    return warps, next((g for g in (4, 2) if slices % (g * warps) == 0), 1), 2
