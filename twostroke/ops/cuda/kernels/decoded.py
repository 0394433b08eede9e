"""A few to some hundred rows times a matrix of int4 or fp8: codes become bfloat16 in registers, just before the
product.

The weights are the product's tall side, so that decoded tiles stay in registers. Where the outputs make too few tiles
to fill the device, programs share the inputs of a tile; their sums are added by a second kernel. From some hundred rows
on, a decoded copy and the vendor's product are faster.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from twostroke.ops.cuda.kernels.launch import EARLY, INTERPRETED, PDL, gdc_launch_dependents, gdc_wait
from twostroke.ops.cuda.kernels.narrow_tiles import group_words
from twostroke.ops.cuda.kernels.skinny import INT4


@triton.jit
def decoded_nibbles(codes, groups, HIGH: tl.constexpr, FAST: tl.constexpr):
    """The low or the high elements of int4 codes: the bits of 128 + nibble are set directly, 128 is subtracted, and a
    group's scale and least value are applied. Both at once would be moved through shared memory by the compiler."""
    if FAST:
        SHIFT: tl.constexpr = "4" if HIGH else "0"
        return tl.inline_asm_elementwise(
            "{ .reg .b32 l, s, m, k; shr.u32 l, $2, "
            + SHIFT
            + """; and.b32 l, l, 0x0f0f0f0f;
            prmt.b32 s, $3, $3, 0x1010;
            prmt.b32 m, $3, $3, 0x3232;
            mov.b32 k, 0x43004300;
            prmt.b32 $0, l, 0x43434343, 0x4140;
            prmt.b32 $1, l, 0x43434343, 0x4342;
            sub.bf16x2 $0, $0, k;
            sub.bf16x2 $1, $1, k;
            fma.rn.bf16x2 $0, $0, s, m;
            fma.rn.bf16x2 $1, $1, s, m;
            }""",
            "=&r,=&r,r,r,r,r,r", [codes, groups], dtype=tl.bfloat16, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        scale, least = (groups << 16).to(tl.float32, bitcast=True), (groups & -65536).to(tl.float32, bitcast=True)
        return (((codes >> (4 if HIGH else 0)) & 15).to(tl.float32) * scale + least).to(tl.bfloat16)


@triton.jit
def decoded_bytes(codes, FAST: tl.constexpr):
    """fp8 codes as bfloat16: sign, exponent and fraction are moved to their places, and the exponent's bias is made up
    for by a factor of 2^120, which is right for the smallest numbers too."""
    if FAST:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, s, t, f;
            mov.b32 f, 0x7b807b80;
            prmt.b32 a, $2, 0, 0x1404;
            prmt.b32 b, $2, 0, 0x3424;
            shr.u32 s, a, 4;
            shr.u32 t, b, 4;
            and.b32 s, s, 0x07f007f0;
            and.b32 t, t, 0x07f007f0;
            lop3.b32 a, a, 0x80008000, s, 0xea;
            lop3.b32 b, b, 0x80008000, t, 0xea;
            mul.bf16x2 $0, a, f;
            mul.bf16x2 $1, b, f;
            }""",
            "=&r,=&r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float32).to(tl.bfloat16)


@triton.jit
def times(weights, x, sums, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    return tl.dot(weights.to(DTYPE), x, sums, input_precision=PRECISION)


@triton.jit
def step_groups(scales_ptr, step, near, n_rows, WIDE: tl.constexpr, BYTES: tl.constexpr, FAST: tl.constexpr):
    """The scales of a step's codes. What lies past the last slice takes those of the last: its inputs are zero."""
    byte = tl.arange(0, BYTES)
    part = step * (BYTES // 64) + byte // 64
    if WIDE % BYTES != 0:
        part = tl.minimum(part, WIDE // 64 - 1)
    return group_words(scales_ptr + (part * (n_rows * 4) + byte % 64 // 16)[None, :] + (near * 4)[:, None], FAST)


@triton.jit(do_not_specialize=["tokens"])
def decoded_kernel(
    x_ptr, codes_ptr, scales_ptr, bias_ptr, out_ptr, tokens, n_rows, x_stride, K: tl.constexpr, FORMAT: tl.constexpr,
    BIAS: tl.constexpr, ADD: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, BYTES: tl.constexpr,
    SPLITS: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """A share of the inputs. With one split the result is stored, with several the sums, (splits, tokens, N)."""
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    S: tl.constexpr = 128 if FORMAT == 2 else 64  # inputs of 64 bytes
    WIDE: tl.constexpr = (K + S - 1) // S * 64  # bytes of a row
    STEPS: tl.constexpr = (WIDE + BYTES - 1) // BYTES
    EACH: tl.constexpr = (STEPS + SPLITS - 1) // SPLITS
    WHOLE: tl.constexpr = K % (S * BYTES // 64) == 0  # whether every step is full
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1)
    t = tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T)
    byte = tl.arange(0, BYTES)
    rows, columns = n < n_rows, t < tokens
    near, here = tl.minimum(n, n_rows - 1), tl.minimum(t, tokens - 1)  # what lies past the end is not stored
    codes_at = codes_ptr + near.to(tl.int64)[:, None] * WIDE + byte[None, :]
    if FORMAT == 2:
        k = byte // 16 * 32 + byte % 16
    else:
        k = byte
    x_at = x_ptr + here.to(tl.int64)[None, :] * x_stride + k[:, None]
    acc = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    first = split * EACH
    last = tl.minimum(first + EACH, STEPS)
    if FORMAT == 2:
        groups = step_groups(scales_ptr, tl.minimum(first, STEPS - 1), near, n_rows, WIDE, BYTES, FAST)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for step in tl.range(first, last, num_stages=STAGES):
        at = step * (BYTES // 64 * S)
        if WHOLE:
            codes = tl.load(codes_at + step * BYTES)
            a = tl.load(x_at + at)
        else:
            codes = tl.load(codes_at + step * BYTES, mask=(step * BYTES + byte < WIDE)[None, :], other=0)
            a = tl.load(x_at + at, mask=(at + k < K)[:, None], other=0.0)
        if FORMAT == 2:
            if WHOLE:
                b = tl.load(x_at + (at + 16))
            else:
                b = tl.load(x_at + (at + 16), mask=(at + 16 + k < K)[:, None], other=0.0)
            low, high = decoded_nibbles(codes, groups, False, FAST), decoded_nibbles(codes, groups, True, FAST)
            groups = step_groups(scales_ptr, tl.minimum(step + 1, STEPS - 1), near, n_rows, WIDE, BYTES, FAST)
            acc = times(low, a, acc, DTYPE, PRECISION)
            acc = times(high, b, acc, DTYPE, PRECISION)
        else:
            acc = times(decoded_bytes(codes, FAST), a, acc, DTYPE, PRECISION)
    if SPLITS > 1:
        out_ptr += split.to(tl.int64) * tokens * n_rows
    elif FORMAT != 2:
        acc *= tl.load(scales_ptr + n, mask=rows, other=0.0)[:, None]
    if BIAS:
        acc += tl.load(bias_ptr + n, mask=rows, other=0.0)[:, None]
    place = out_ptr + t.to(tl.int64)[None, :] * n_rows + n[:, None]
    there = rows[:, None] & columns[None, :]
    if ADD:
        acc += tl.load(place, mask=there, other=0.0).to(tl.float32)
    tl.store(place, acc.to(out_ptr.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["tokens"])
def add_kernel(
    sums_ptr, scales_ptr, bias_ptr, out_ptr, tokens, n_rows, SPLITS: tl.constexpr, SCALED: tl.constexpr,
    BIAS: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(1).to(tl.int64) * n_rows
    inside = n < n_rows
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    total = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(sums_ptr + split * tokens.to(tl.int64) * n_rows + row + n, mask=inside, other=0.0)
    if SCALED:
        total *= tl.load(scales_ptr + n, mask=inside, other=0.0)
    if BIAS:
        total += tl.load(bias_ptr + n, mask=inside, other=0.0)
    if ADD:
        total += tl.load(out_ptr + row + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row + n, total.to(out_ptr.dtype.element_ty), mask=inside)


class DecodedShape(NamedTuple):
    """How the work is divided."""

    outputs: int  # of a program
    bytes: int  # of a row in a step
    splits: int
    stages: int
    warps: int


def decoded_product(
    x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, out: Tensor, fmt: int, *, add: bool = False,
    shape: DecodedShape | None = None,
) -> Tensor:  # fmt: skip
    """out (rows, N) = x @ matrix.T · scales + bias, added to what `out` holds with `add`."""
    n, (tokens, k) = codes.shape[0], x.shape
    exact = x.dtype == torch.float32
    form = shape or shape_for(n, codes.shape[1], fmt, tokens, exact)
    block_t = max(16, min(64, triton.next_power_of_2(tokens)))
    alone = form.splits == 1
    target = out if alone else torch.empty(form.splits, tokens, n, device=x.device)
    end = scales if bias is None else bias
    decoded_kernel[(triton.cdiv(n, form.outputs), form.splits, triton.cdiv(tokens, block_t))](
        x, codes.view(torch.uint8), scales, end, target, tokens, n, x.stride(0), K=k, FORMAT=fmt,
        BIAS=alone and bias is not None, ADD=alone and add, BLOCK_N=form.outputs, BLOCK_T=block_t, BYTES=form.bytes,
        SPLITS=form.splits, STAGES=form.stages, PRECISION="ieee" if exact else "tf32", PDL=PDL, FAST=not INTERPRETED,
        num_warps=form.warps, **EARLY,
    )  # fmt: skip
    if not alone:
        add_kernel[(triton.cdiv(n, 1024), tokens)](
            target, scales, end, out, tokens, n, SPLITS=form.splits, SCALED=fmt != INT4, BIAS=bias is not None, ADD=add,
            BLOCK=1024, PDL=PDL, num_warps=4, **EARLY,
        )  # fmt: skip
    return out


def shape_for(n: int, wide: int, fmt: int, tokens: int, exact: bool) -> DecodedShape:
    """As measured on an H200. wide: bytes of a row."""
    if exact:
        return DecodedShape(64, 64, 1, 1, 4)
    outputs, step, stages, warps, programs = 64, 128, 3, 4, 400
    if fmt == INT4:
        outputs, warps = 128, 8
        step, stages, programs = (64, 5, 256) if tokens <= 32 else (128, 3, 192)
    most = min(8, programs // triton.cdiv(n, outputs), triton.cdiv(wide, step) // 4)
    return DecodedShape(outputs, step, 1 << max(0, most.bit_length() - 1), stages, warps)
