"""Products with weights of few bits whose bits do not depend on how many rows there are.

A weight is what its code means, rounded to bfloat16: code · scale, in int4 code · scale + least value. So a matrix of
codes stands for one matrix of bfloat16, and a product adds in the order of exact_matmul.py along the lanes' order of
the inputs (decoded.py), which x is put into first.

Some rows: codes become those weights in registers, on the way into the tensor cores. One program walks along all inputs
of its outputs with one accumulator. Many rows: a decoded copy is made, in the lanes' order too, and `Products`
multiplies it. Both decode with the same functions. The first kernel is trusted for a shape once it gave the bits of the
second way on random numbers (`NarrowProducts`); until then, and where it does not, the copy serves any number of rows.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from twostroke.ops.cuda.kernels.decoded import as_lanes, decoded_nibbles, halves_twice, times
from twostroke.ops.cuda.kernels.exact_matmul import Products, exact_product
from twostroke.ops.cuda.kernels.launch import EARLY, INTERPRETED, PDL, gdc_launch_dependents, gdc_wait
from twostroke.ops.cuda.kernels.narrow_tiles import INT4
from twostroke.ops.cuda.kernels.quantized import Int4, Narrow

log = logging.getLogger(__name__)
TRIED = 512  # outputs of a matrix that a shape is tried with
SCALED = tl.constexpr(  # the end of the instructions below: four numbers times their scales, rounded
    """mul.rn.f32 e, e, $3;
    mul.rn.f32 f, f, $4;
    mul.rn.f32 g, g, $5;
    mul.rn.f32 h, h, $6;
    cvt.rn.bf16x2.f32 $0, f, e;
    cvt.rn.bf16x2.f32 $1, h, g;
    }"""
)


@triton.jit
def scaled_bytes(codes, scale, FORMAT: tl.constexpr, FAST: tl.constexpr):
    """bfloat16(code · scale) of int8 (1) and fp8 codes; the interpreter: float32. scale: of each code. int8: the bits
    of 2^23 + 128 + code are set directly, and 2^23 + 128 is subtracted."""
    if FAST and FORMAT == 1:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 l, a, b, c, d;
            .reg .f32 e, f, g, h;
            xor.b32 l, $2, 0x80808080;
            prmt.b32 a, l, 0x4B000000, 0x7540;
            prmt.b32 b, l, 0x4B000000, 0x7541;
            prmt.b32 c, l, 0x4B000000, 0x7542;
            prmt.b32 d, l, 0x4B000000, 0x7543;
            mov.b32 e, a; mov.b32 f, b; mov.b32 g, c; mov.b32 h, d;
            sub.rn.f32 e, e, 0f4B000080;
            sub.rn.f32 f, f, 0f4B000080;
            sub.rn.f32 g, g, 0f4B000080;
            sub.rn.f32 h, h, 0f4B000080;
            """
            + SCALED,
            "=&r,=&r,r,f,f,f,f", [codes, scale], dtype=tl.bfloat16, is_pure=True, pack=4,
        )  # fmt: skip
    elif FORMAT == 1:
        return codes.to(tl.int8, bitcast=True).to(tl.float32) * scale
    elif FAST:
        return tl.inline_asm_elementwise(
            """{
            .reg .b16 x, y, a, b, c, d;
            .reg .b32 u, v;
            .reg .f32 e, f, g, h;
            mov.b32 {x, y}, $2;
            cvt.rn.f16x2.e4m3x2 u, x;
            cvt.rn.f16x2.e4m3x2 v, y;
            mov.b32 {a, b}, u;
            mov.b32 {c, d}, v;
            cvt.f32.f16 e, a; cvt.f32.f16 f, b; cvt.f32.f16 g, c; cvt.f32.f16 h, d;
            """
            + SCALED,
            "=&r,=&r,r,f,f,f,f", [codes, scale], dtype=tl.bfloat16, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float32) * scale


@triton.jit
def group_halves(groups, N: tl.constexpr, HIGH: tl.constexpr, FAST: tl.constexpr):
    """(N, 64): the scale or the least value of each byte of a slice, from the (N, 4) words of its groups."""
    found = halves_twice(groups, HIGH, FAST)[:, :, None]
    return tl.reshape(tl.broadcast_to(found, (N, 4, 16)), (N, 64))


@triton.jit
def slice_sums(
    codes_at, scales_at, scale, x_at, part, n_rows, columns, acc, FORMAT: tl.constexpr, W: tl.constexpr,
    PRECISION: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """The sums, and what slice `part` adds to them: the low nibbles of int4 first."""
    codes = tl.load(codes_at + part * 64)
    if FORMAT == 2:
        a = tl.load(x_at + part * 128, mask=columns, other=0.0)
        b = tl.load(x_at + (part * 128 + 64), mask=columns, other=0.0)
        groups = tl.load(scales_at + part * n_rows * 4)
        scale, least = group_halves(groups, 16 * W, False, FAST), group_halves(groups, 16 * W, True, FAST)
        acc = times(as_lanes(decoded_nibbles(codes, scale, least, False, FAST), W), a, acc, PRECISION)
        return times(as_lanes(decoded_nibbles(codes, scale, least, True, FAST), W), b, acc, PRECISION)
    else:
        a = tl.load(x_at + part * 64, mask=columns, other=0.0)
        return times(as_lanes(scaled_bytes(codes, scale, FORMAT, FAST), W), a, acc, PRECISION)


@triton.jit(do_not_specialize=["tokens"])
def narrow_kernel(
    x_ptr, codes_ptr, scales_ptr, out_ptr, tokens, n_rows, out_stride, WIDE: tl.constexpr, FORMAT: tl.constexpr,
    ADD: tl.constexpr, BLOCK_T: tl.constexpr, W: tl.constexpr, SLICES: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """16 W outputs of BLOCK_T rows, all their inputs. The product is rounded before it is added to something."""
    N: tl.constexpr = 16 * W
    WIDTH: tl.constexpr = WIDE // 64 * (128 if FORMAT == 2 else 64)
    tile = tl.program_id(0)
    index, byte = tl.arange(0, N), tl.arange(0, 64)
    near = tl.minimum(tile * N + index // 8 % W * 16 + index // (8 * W) * 8 + index % 8, n_rows - 1)
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    codes_at = codes_ptr + near.to(tl.int64)[:, None] * WIDE + byte[None, :]
    scales_at = scales_ptr + near[:, None] * 4 + tl.arange(0, 4)[None, :]
    x_at = x_ptr + t.to(tl.int64)[None, :] * WIDTH + byte[:, None]
    columns = (t < tokens)[None, :]
    scale = 0.0
    if FORMAT != 2:
        scale = tl.broadcast_to(tl.load(scales_ptr + near)[:, None], (N, 64))
    acc = tl.zeros((N, BLOCK_T), tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for step in tl.range(0, WIDE // (64 * SLICES), num_stages=STAGES):
        for number in tl.static_range(SLICES):
            part = step * SLICES + number
            acc = slice_sums(codes_at, scales_at, scale, x_at, part, n_rows, columns, acc, FORMAT, W, PRECISION, FAST)
    n = tile * N + tl.arange(0, N)
    there = (n < n_rows)[:, None] & columns
    place = out_ptr + t.to(tl.int64)[None, :] * out_stride + n[:, None]
    if ADD:
        acc = acc.to(out_ptr.dtype.element_ty).to(tl.float32) + tl.load(place, mask=there, other=0.0).to(tl.float32)
    tl.store(place, acc.to(out_ptr.dtype.element_ty), mask=there)


@triton.jit
def in_order(weights, S: tl.constexpr):
    """(S, 64) weights, each slice put into the lanes' order."""
    return tl.reshape(tl.permute(tl.reshape(weights, (S, 4, 4, 2, 2)), (0, 2, 3, 1, 4)), (S, 64))


@triton.jit
def copy_kernel(
    codes_ptr, scales_ptr, out_ptr, n_rows, WIDE: tl.constexpr, FORMAT: tl.constexpr, S: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """S slices of an output."""
    n = tl.program_id(0).to(tl.int64)
    part, byte = tl.program_id(1) * S + tl.arange(0, S), tl.arange(0, 64)
    inside = (part < WIDE // 64)[:, None]
    codes = tl.load(codes_ptr + n * WIDE + part[:, None] * 64 + byte[None, :], mask=inside, other=0)
    if FORMAT == 2:
        groups_at = scales_ptr + (part[:, None] * n_rows + n) * 4 + tl.arange(0, 4)[None, :]
        groups = tl.load(groups_at, mask=inside, other=0)
        scale, least = group_halves(groups, S, False, FAST), group_halves(groups, S, True, FAST)
        place = out_ptr + n * (2 * WIDE) + part[:, None] * 128 + byte[None, :]
        low = in_order(decoded_nibbles(codes, scale, least, False, FAST), S)
        high = in_order(decoded_nibbles(codes, scale, least, True, FAST), S)
        tl.store(place, low.to(out_ptr.dtype.element_ty), mask=inside)
        tl.store(place + 64, high.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        scale = tl.broadcast_to(tl.load(scales_ptr + n), (S, 64))
        found = in_order(scaled_bytes(codes, scale, FORMAT, FAST), S)
        place = out_ptr + n * WIDE + part[:, None] * 64 + byte[None, :]
        tl.store(place, found.to(out_ptr.dtype.element_ty), mask=inside)


def ordered_copy(weight: Narrow, dtype: torch.dtype) -> Tensor:
    """(out, width): the weights, inputs in the lanes' order; zeros fill the last slice of int4."""
    codes = weight.codes.view(torch.uint8)
    n, wide = codes.shape
    out = torch.empty(n, wide * (2 if weight.format == INT4 else 1), dtype=dtype, device=codes.device)
    size = min(32, triton.next_power_of_2(wide // 64))
    copy_kernel[(n, triton.cdiv(wide // 64, size))](
        codes, weight.scales, out, n, WIDE=wide, FORMAT=weight.format, S=size, FAST=not INTERPRETED, num_warps=4
    )
    return out


class NarrowTile(NamedTuple):
    rows: int
    warps: int  # of 16 outputs each
    slices: int  # of 64 bytes in a step
    stages: int


def tile_for(rows: int, n: int, wide: int, fmt: int) -> NarrowTile:
    """The fastest tile. No choice here changes a bit. At least four warps: with them the tensor cores take the inputs
    in the order in which they are given. wide: bytes of an output."""
    if INTERPRETED:
        return NarrowTile(16, 4, 1, 1)  # the interpreter multiplies with a library: one shape for all
    block = max(16, min(64, triton.next_power_of_2(rows)))
    warps = 8 if block == 64 and n >= 16384 else 4
    alone = triton.cdiv(n, 16 * warps) <= 132  # programs, each on a multiprocessor of its own
    return NarrowTile(block, warps, 2 if fmt != INT4 and wide % 128 == 0 else 1, 6 if alone else 4)


def narrow_product(x: Tensor, weight: Narrow, out: Tensor, add: bool, tile: NarrowTile) -> Tensor:
    """out (rows, N) = x @ matrix.T, added to what `out` holds with `add`; the product is rounded first. x: in the
    lanes' order."""
    codes = weight.codes.view(torch.uint8)
    (n, wide), tokens = codes.shape, x.shape[0]
    assert x.is_contiguous() and x.shape[1] == wide * (2 if weight.format == INT4 else 1)
    narrow_kernel[(triton.cdiv(n, 16 * tile.warps), triton.cdiv(tokens, tile.rows))](
        x, codes, weight.scales, out, tokens, n, out.stride(0), WIDE=wide, FORMAT=weight.format, ADD=add,
        BLOCK_T=tile.rows, W=tile.warps, SLICES=tile.slices, STAGES=tile.stages,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", PDL=PDL, FAST=not INTERPRETED,
        num_warps=tile.warps, **EARLY,
    )  # fmt: skip
    return out


class NarrowProducts:
    """The product of ordered rows with codes, for any number of rows."""

    def __init__(self, products: Products, most: int) -> None:
        """most: rows up to which no decoded copy is made."""
        self.products, self.most = products, most
        self.same: dict[tuple[int, int, int, NarrowTile], bool] = {}  # (format, out, bytes, tile): it gives the bits

    def __call__(self, x: Tensor, weight: Narrow, add_to: Tensor | None) -> Tensor:
        """x @ matrix.T, or `add_to` with it added. x: in the lanes' order."""
        (n, wide), rows = weight.codes.shape, x.shape[0]
        tile = tile_for(rows, n, wide, weight.format)
        if rows > self.most or not self._trusted(weight, x.dtype, tile):
            return self.products(x, ordered_copy(weight, x.dtype), add_to)
        out = torch.empty(rows, n, dtype=x.dtype, device=x.device) if add_to is None else add_to
        return narrow_product(x, weight, out, add_to is not None, tile)

    def _trusted(self, weight: Narrow, dtype: torch.dtype, tile: NarrowTile) -> bool:
        if dtype == torch.float32 and not INTERPRETED:
            return False  # floats of 32 bits are not multiplied by the tensor cores
        key = (weight.format, *weight.codes.shape, tile)
        found = self.same.get(key)
        if found is None:
            if weight.codes.is_cuda and torch.cuda.is_current_stream_capturing():
                return False
            found = self.same[key] = narrow_agrees(weight, dtype, tile)
            if not found:
                log.warning(
                    "products of %d rows with codes of shape %s do not have the bits of decoded weights on this "
                    "device: the weights are decoded in each step, which is slow", tile.rows, tuple(key[1:3]),
                )  # fmt: skip
        return found


def narrow_agrees(weight: Narrow, dtype: torch.dtype, tile: NarrowTile) -> bool:
    """Whether the product has the bits of the decoded copy's, on random numbers. Waits for the device."""
    some = first_outputs(weight, TRIED)
    copy, device = ordered_copy(some, dtype), some.codes.device
    generator = torch.Generator(device).manual_seed(tile.rows)
    x = torch.randn(tile.rows, copy.shape[1], device=device, generator=generator).to(dtype)
    ours, theirs = (torch.empty(tile.rows, copy.shape[0], dtype=dtype, device=device) for _ in "ab")
    narrow_product(x, some, ours, False, tile)
    return bool(torch.equal(ours, exact_product(x, copy, theirs, False)))


def first_outputs(weight: Narrow, count: int) -> Narrow:
    scales = weight.scales[:, :count].contiguous() if isinstance(weight, Int4) else weight.scales[:count]
    return replace(weight, codes=weight.codes[:count], scales=scales, bias=None)
