"""Some rows times a matrix of few bits: codes become floats in registers, just before the product.

The weights are the tensor cores' tall side, which may lie in registers: four neighbouring lanes hold 64 bytes of an
output, 16 each, loaded by one instruction. The order of the inputs along the product is free as long as both sides
agree, so x is put into the lanes' order by a kernel before, which also does the norm or the gate. int4 is multiplied
as bfloat16, fp8 and int8 as float16: a row of x is divided by a unit that makes it fit.

Where the outputs make too few tiles to fill the device, programs share the inputs of a tile. The last of them to end
adds their sums, in the order of the inputs. From some hundred rows on, a decoded copy and the vendor's product are
faster.
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
    INTERPRETED,
    PDL,
    gdc_launch_dependents,
    gdc_wait,
    prefetch_rows,
)
from twostroke.ops.cuda.kernels.narrow_tiles import INT4
from twostroke.ops.cuda.kernels.rows import NORM, NOTHING, gated_pair

BYTES = tl.constexpr(64)  # of an output in a slice
FETCHED = 256  # bytes of an output that a program asks the second-level cache for, ahead of its product


@triton.jit
def lane_order(place, FORMAT: tl.constexpr):
    """The input at each place of the product's inner side. int4: the low nibbles of a slice, then the high ones."""
    S: tl.constexpr = 128 if FORMAT == 2 else 64
    lane, within = place // 2 % 4, place // 16 % 4 * 4 + place // 8 % 2 * 2 + place % 2
    if FORMAT == 2:
        return place // S * S + lane * 32 + place // 64 % 2 * 16 + within
    else:
        return place // S * S + lane * 16 + within


@triton.jit
def row_before(row, norm_ptr, k, eps, size, K: tl.constexpr, BEFORE: tl.constexpr):
    """Elements k of the row after norm or gate, in float32. size: of the norm."""
    x = tl.load(row + k, mask=k < K, other=0.0).to(tl.float32)
    if BEFORE == 1:
        x *= size * tl.load(norm_ptr + k, mask=k < K, other=0.0).to(tl.float32)
    elif BEFORE >= 2:
        x = gated_pair(x, tl.load(row + K + k, mask=k < K, other=0.0).to(tl.float32), BEFORE)
    return x


@triton.jit
def order_kernel(
    x_ptr, norm_ptr, out_ptr, units_ptr, eps, x_stride, K: tl.constexpr, K_2: tl.constexpr, WIDTH: tl.constexpr,
    BEFORE: tl.constexpr, FORMAT: tl.constexpr, UNITS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A part of a row in the lanes' order. Each program reads the whole row for its norm and its unit."""
    token = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    every = tl.arange(0, K_2)
    row = x_ptr + token * x_stride
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    size = 1.0
    if BEFORE == 1:
        whole = tl.load(row + every, mask=every < K, other=0.0).to(tl.float32)
        size = tl.rsqrt(tl.sum(whole * whole) / K + eps)
    x = row_before(row, norm_ptr, lane_order(place, FORMAT), eps, size, K, BEFORE)
    if UNITS:
        unit = tl.maximum(tl.max(tl.abs(row_before(row, norm_ptr, every, eps, size, K, BEFORE))), 1e-30) / 16384.0
        tl.store(units_ptr + token, unit)
        x *= 1.0 / unit
    tl.store(out_ptr + token * WIDTH + place, x.to(out_ptr.dtype.element_ty), mask=place < WIDTH)


@triton.jit
def halves_twice(groups, HIGH: tl.constexpr, FAST: tl.constexpr):
    """The scale (the low half of a word) or the least value, in both halves of a word. The interpreter: as float32."""
    if FAST:
        PICK: tl.constexpr = "0x3232" if HIGH else "0x1010"
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $1, " + PICK + ";", "=r,r", [groups], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return ((groups & -65536) if HIGH else (groups << 16)).to(tl.float32, bitcast=True)


@triton.jit
def decoded_nibbles(codes, scale, least, HIGH: tl.constexpr, FAST: tl.constexpr):
    """The low or the high elements of int4 codes: the bits of 128 + nibble are set directly, 128 is subtracted, and a
    group's scale and least value are applied. The compiler may put two bytes each of two outputs into a word."""
    if FAST:
        SHIFT: tl.constexpr = "4" if HIGH else "0"
        return tl.inline_asm_elementwise(
            "{ .reg .b32 l, k; shr.u32 l, $2, "
            + SHIFT
            + """; and.b32 l, l, 0x0f0f0f0f;
            mov.b32 k, 0x43004300;
            prmt.b32 $0, l, 0x43434343, 0x4140;
            prmt.b32 $1, l, 0x43434343, 0x4342;
            sub.bf16x2 $0, $0, k;
            sub.bf16x2 $1, $1, k;
            fma.rn.bf16x2 $0, $0, $3, $7;
            fma.rn.bf16x2 $1, $1, $5, $9;
            }""",
            "=&r,=&r,r,r,r,r,r,r,r,r,r", [codes, scale, least], dtype=tl.bfloat16, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        return (((codes >> (4 if HIGH else 0)) & 15).to(tl.float32) * scale + least).to(tl.bfloat16)


@triton.jit
def decoded_bytes(codes, FORMAT: tl.constexpr, FAST: tl.constexpr):
    """fp8 and int8 codes as float16. int8: the bits of 1152 + code are set directly, and 1152 is subtracted."""
    if FAST and FORMAT == 1:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 l, k;
            xor.b32 l, $2, 0x80808080;
            mov.b32 k, 0x64806480;
            prmt.b32 $0, l, 0x64646464, 0x4140;
            prmt.b32 $1, l, 0x64646464, 0x4342;
            sub.f16x2 $0, $0, k;
            sub.f16x2 $1, $1, k;
            }""",
            "=&r,=&r,r", [codes], dtype=tl.float16, is_pure=True, pack=4,
        )  # fmt: skip
    elif FORMAT == 1:
        return codes.to(tl.int8, bitcast=True).to(tl.float16)
    elif FAST:
        return tl.inline_asm_elementwise(
            """{
            .reg .b16 x, y;
            mov.b32 {x, y}, $2;
            cvt.rn.f16x2.e4m3x2 $0, x;
            cvt.rn.f16x2.e4m3x2 $1, y;
            }""",
            "=&r,=&r,r", [codes], dtype=tl.float16, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float16)


@triton.jit
def as_lanes(codes, W: tl.constexpr):
    """(16 W, 64) operand: rows (half, warp, output) become (warp, half, output), inputs come in the lanes' order."""
    codes = tl.reshape(codes, (2, W, 8, 4, 4, 2, 2))
    return tl.reshape(tl.permute(codes, (1, 0, 2, 4, 5, 3, 6)), (16 * W, 64))


@triton.jit
def times(weights, x, sums, PRECISION: tl.constexpr):
    return tl.dot(weights.to(x.dtype), x, sums, input_precision=PRECISION)


@triton.jit
def slice_product(
    codes_at, scales_at, x_at, part, n_rows, columns, acc, FORMAT: tl.constexpr, W: tl.constexpr,
    PRECISION: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """The sums, and what slice `part` adds to them."""
    N: tl.constexpr = 16 * W
    codes = tl.load(codes_at + part * BYTES)
    if FORMAT == 2:
        a = tl.load(x_at + part * 128, mask=columns, other=0.0)
        b = tl.load(x_at + (part * 128 + 64), mask=columns, other=0.0)
        groups = tl.load(scales_at + part * n_rows * 4)
        scale, least = halves_twice(groups, False, FAST)[:, :, None], halves_twice(groups, True, FAST)[:, :, None]
        scale = tl.reshape(tl.broadcast_to(scale, (N, 4, 16)), (N, 64))
        least = tl.reshape(tl.broadcast_to(least, (N, 4, 16)), (N, 64))
        acc = times(as_lanes(decoded_nibbles(codes, scale, least, False, FAST), W), a, acc, PRECISION)
        return times(as_lanes(decoded_nibbles(codes, scale, least, True, FAST), W), b, acc, PRECISION)
    else:
        a = tl.load(x_at + part * 64, mask=columns, other=0.0)
        return times(as_lanes(decoded_bytes(codes, FORMAT, FAST), W), a, acc, PRECISION)


@triton.jit
def store_sums(
    acc, n, t, place, there, n_rows, tokens, scales_ptr, units_ptr, bias_ptr, out_ptr, FORMAT: tl.constexpr,
    BIAS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    if FORMAT != 2:
        acc *= tl.load(scales_ptr + n, mask=n < n_rows, other=0.0)[:, None]
        acc *= tl.load(units_ptr + t, mask=t < tokens, other=0.0)[None, :]
    if BIAS:
        acc += tl.load(bias_ptr + n, mask=n < n_rows, other=0.0)[:, None]
    if ADD:
        acc += tl.load(out_ptr + place, mask=there, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, acc.to(out_ptr.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["tokens", "fetch"])
def decoded_kernel(
    x_ptr, units_ptr, codes_ptr, scales_ptr, bias_ptr, sums_ptr, count_ptr, out_ptr, tokens, n_rows, fetch,
    WIDE: tl.constexpr, FORMAT: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, W: tl.constexpr,
    SLICES: tl.constexpr, BLOCK_T: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """A share of the inputs of 16 W outputs. The number of steps is a constant: with one that may be 0 the compiler
    waits for every single instruction of the tensor cores. fetch: bytes of each output that the program asks the
    second-level cache for while the kernel before is running."""
    N: tl.constexpr = 16 * W
    WIDTH: tl.constexpr = WIDE // 64 * (128 if FORMAT == 2 else 64)
    EACH: tl.constexpr = WIDE // (64 * SLICES * SPLITS)
    tile, split = tl.program_id(0), tl.program_id(1)
    index, byte = tl.arange(0, N), tl.arange(0, 64)
    near = tl.minimum(tile * N + index // 8 % W * 16 + index // (8 * W) * 8 + index % 8, n_rows - 1)
    t = tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T)
    codes_at = codes_ptr + near.to(tl.int64)[:, None] * WIDE + byte[None, :]
    scales_at = scales_ptr + near[:, None] * 4 + tl.arange(0, 4)[None, :]
    x_at = x_ptr + t.to(tl.int64)[None, :] * WIDTH + byte[:, None]
    columns = (t < tokens)[None, :]
    acc = tl.zeros((N, BLOCK_T), tl.float32)
    if PDL:
        prefetch_rows(codes_ptr + near.to(tl.int64) * WIDE + split * (EACH * SLICES * 64), fetch)
        gdc_wait()
        gdc_launch_dependents()
    for step in tl.range(0, EACH, num_stages=STAGES):
        for number in tl.static_range(SLICES):
            part = (split * EACH + step) * SLICES + number
            acc = slice_product(codes_at, scales_at, x_at, part, n_rows, columns, acc, FORMAT, W, PRECISION, FAST)
    n = tile * N + tl.arange(0, N)
    there = (n < n_rows)[:, None] & (t < tokens)[None, :]
    place = t.to(tl.int64)[None, :] * n_rows + n[:, None]
    if SPLITS == 1:
        store_sums(
            acc, n, t, place, there, n_rows, tokens, scales_ptr, units_ptr, bias_ptr, out_ptr, FORMAT, BIAS, ADD
        )  # fmt: skip
    else:
        apart = tokens.to(tl.int64) * n_rows
        tl.store(sums_ptr + split * apart + place, acc, mask=there)
        tl.debug_barrier()
        counter = count_ptr + tl.program_id(2) * tl.num_programs(0) + tile
        if tl.atomic_add(counter, 1, sem="acq_rel") == SPLITS - 1:
            tl.store(counter, 0)
            total = tl.zeros((N, BLOCK_T), tl.float32)
            for other in tl.static_range(SPLITS):
                total += tl.load(sums_ptr + other * apart + place, mask=there, other=0.0)
            store_sums(
                total, n, t, place, there, n_rows, tokens, scales_ptr, units_ptr, bias_ptr, out_ptr, FORMAT, BIAS, ADD
            )  # fmt: skip


class DecodedShape(NamedTuple):
    """How the work is divided."""

    warps: int  # of 16 outputs each
    slices: int  # of 64 bytes in a step
    splits: int  # programs that share a tile's inputs
    stages: int


@lru_cache
def counters(device: torch.device) -> Tensor:
    """Programs of a tile that have ended, all zero between kernels."""
    return torch.zeros(1 << 14, dtype=torch.int32, device=device)


def ordered_rows(
    x: Tensor, wide: int, fmt: int, before: int, norm: Tensor | None, eps: float, *, plain: bool = False
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """before(x) in the lanes' order, and the units of its rows. wide: bytes of an output. plain: in its own type and
    without units."""
    rows, k = x.shape[0], x.shape[1] // (2 if before > NORM else 1)
    width = wide // 64 * (128 if fmt == INT4 else 64)
    units = fmt != INT4 and x.dtype != torch.float32 and not plain
    out = torch.empty(rows, width, dtype=torch.float16 if units else x.dtype, device=x.device)
    unread = fmt == INT4 or plain
    factors = torch.empty(rows, device=x.device) if units or unread else torch.ones(rows, device=x.device)
    block = min(2048, triton.next_power_of_2(width))
    order_kernel[(rows, triton.cdiv(width, block))](
        x, x if norm is None else norm, out, factors, eps, x.stride(0), K=k, K_2=triton.next_power_of_2(k),
        WIDTH=width, BEFORE=before, FORMAT=fmt, UNITS=units, BLOCK=block, PDL=PDL, num_warps=8, **EARLY,
    )  # fmt: skip
    return out, factors


def decoded_product(
    x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, out: Tensor, fmt: int, *, before: int = NOTHING,
    norm: Tensor | None = None, eps: float = 0.0, add: bool = False, shape: DecodedShape | None = None,
    fetch: int = FETCHED,
) -> Tensor:  # fmt: skip
    """out (rows, N) = before(x) @ matrix.T · scales + bias, added to what `out` holds with `add`."""
    (n, wide), tokens = codes.shape, x.shape[0]
    whole = x.dtype == torch.float32
    form = shape or shape_for(n, wide, fmt, tokens, whole)
    x, units = ordered_rows(x, wide, fmt, before, norm, eps)
    block_t = max(16, min(64, triton.next_power_of_2(tokens)))
    sums = units if form.splits == 1 else torch.empty(form.splits, tokens, n, device=x.device)
    grid = (triton.cdiv(n, 16 * form.warps), form.splits, triton.cdiv(tokens, block_t))
    decoded_kernel[grid](
        x, units, codes.view(torch.uint8), scales, scales if bias is None else bias, sums, counters(x.device), out,
        tokens, n, min(fetch, wide // form.splits), WIDE=wide, FORMAT=fmt, BIAS=bias is not None, ADD=add,
        W=form.warps, SLICES=form.slices,
        BLOCK_T=block_t, SPLITS=form.splits, STAGES=form.stages, PRECISION="ieee" if whole else "tf32", PDL=PDL,
        FAST=not INTERPRETED, num_warps=form.warps, **EARLY,
    )  # fmt: skip
    return out


def shape_for(n: int, wide: int, fmt: int, tokens: int, whole: bool) -> DecodedShape:
    """The fastest shape, as measured on an H200. wide: bytes of an output."""
    count = wide // 64
    if whole:
        return DecodedShape(4, 1, 1, 1)
    few = tokens <= 32
    warps = 4 if few or n < 16384 else 8
    tiles, most = triton.cdiv(n, 16 * warps), 512 if few else 400
    if fmt == INT4 and few and 264 < tiles <= 528:
        most = 2 * tiles  # one round of programs would leave some multiprocessors idle at its end
    least = 8 if fmt == INT4 else 16  # slices of a share
    splits = next(s for s in (8, 4, 2, 1) if s == 1 or (tiles * s <= most and count % s == 0 and count // s >= least))
    if fmt == INT4:
        pairs, stages = few and count // splits % 2 == 0, 3 if few else 4 if tiles * splits <= 264 else 3
    else:
        pairs, stages = count // splits % 2 == 0, 4 if tiles * splits <= 264 else 3
    return DecodedShape(warps, 2 if pairs else 1, splits, stages)
