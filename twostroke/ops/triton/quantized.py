"""Products with weights kept in fewer bits.

fp8: a scale for each output; many rows multiply in fp8 with a scale for each row (W8A8), one row in full precision.
int4: a scale for each output and 128 inputs; a byte holds elements j and j + 64 of its group, so that both halves of a
run of bytes meet neighbouring elements of x. One row is multiplied straight from the codes, many from a float copy.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from twostroke.ops.triton.heads import nibbles
from twostroke.ops.triton.launch import EARLY, INTERPRETED, PDL, gdc_launch_dependents, gdc_wait

GROUP = 128
LARGEST = 448.0  # of fp8 with four bits of exponent


@dataclass(frozen=True, slots=True, eq=False)
class Fp8:
    codes: Tensor  # (out, in) float8_e4m3fn
    scales: Tensor  # (out,) float32
    bias: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class Int4:
    codes: Tensor  # (out, in / 2) uint8
    scales: Tensor  # (out, in / GROUP) float32
    bias: Tensor | None


def to_fp8(weight: Tensor, bias: Tensor | None) -> Fp8:
    scales = weight.abs().amax(dim=1).float().clamp_(min=1e-12) / LARGEST
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    step = max(1, (1 << 27) // weight.shape[1])
    for a in range(0, weight.shape[0], step):
        codes[a : a + step] = (weight[a : a + step].float() / scales[a : a + step, None]).to(torch.float8_e4m3fn)
    return Fp8(codes, scales, bias)


def to_int4(weight: Tensor, bias: Tensor | None) -> Int4:
    rows, width = weight.shape
    codes = torch.empty(rows, width // 2, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(rows, width // GROUP, device=weight.device)
    step = max(1, (1 << 27) // width)
    for a in range(0, rows, step):
        part = weight[a : a + step].float().view(-1, width // GROUP, GROUP)
        scale = part.abs().amax(dim=2).clamp_(min=1e-12) / 7
        whole = (part / scale.unsqueeze(2)).round_().clamp_(-7, 7).add_(8).to(torch.uint8)
        codes[a : a + step] = (whole[..., : GROUP // 2] | (whole[..., GROUP // 2 :] << 4)).flatten(1)
        scales[a : a + step] = scale
    return Int4(codes, scales, bias)


def as_float(weight: Fp8 | Int4, dtype: torch.dtype, rows: Tensor | None = None) -> Tensor:
    """The matrix, or the named rows of it."""
    codes, scales = (x if rows is None else x[rows] for x in (weight.codes, weight.scales))
    if isinstance(weight, Fp8):
        return (codes.float() * scales.unsqueeze(1)).to(dtype)
    groups = codes.view(codes.shape[0], -1, GROUP // 2)
    both = torch.cat((groups & 15, groups >> 4), dim=2).to(torch.int8) - 8
    return (both.float() * scales.unsqueeze(2)).flatten(1).to(dtype)


@triton.jit
def int4_kernel(
    x_ptr, codes_ptr, scales_ptr, out_ptr, n_rows, K: tl.constexpr, ADD: tl.constexpr, BLOCK_N: tl.constexpr,
    GROUPS: tl.constexpr, PDL: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = n < n_rows
    group = tl.arange(0, GROUPS)
    byte = tl.arange(0, 64)
    codes_rows = codes_ptr + n.to(tl.int64)[:, None, None] * (K // 2) + byte[None, None, :]
    scale_rows = scales_ptr + n.to(tl.int64)[:, None] * (K // 128)
    valid = rows[:, None] & (group < K // 128)[None, :]
    codes = tl.load(codes_rows + group[None, :, None] * 64, mask=valid[:, :, None], other=0)
    scales = tl.load(scale_rows + group[None, :], mask=valid, other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    total = tl.zeros((BLOCK_N, GROUPS, 64), tl.float32)
    for g0 in range(0, K // 128, GROUPS):
        here = g0 + group
        k = here[:, None] * 128 + byte[None, :]
        inside = (here < K // 128)[:, None]
        a = tl.load(x_ptr + k, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(x_ptr + k + 64, mask=inside, other=0.0).to(tl.float32)
        following = here + GROUPS
        more = rows[:, None] & (following < K // 128)[None, :]
        new = tl.load(codes_rows + following[None, :, None] * 64, mask=more[:, :, None], other=0)
        new_scales = tl.load(scale_rows + following[None, :], mask=more, other=0.0)
        low, high = nibbles(codes, tl.bfloat16 if FAST else tl.float32, FAST)
        product = low.to(tl.float32) * a[None, :, :] + high.to(tl.float32) * b[None, :, :]
        total += product * scales[:, :, None]
        codes, scales = new, new_scales
    out = tl.sum(tl.sum(total, axis=2), axis=1)
    if ADD:
        out += tl.load(out_ptr + n, mask=rows, other=0.0).to(tl.float32)
    tl.store(out_ptr + n, out.to(out_ptr.dtype.element_ty), mask=rows)


def int4_gemv(x: Tensor, weight: Int4, out: Tensor, add: bool, tile: tuple[int, int, int] = (4, 8, 4)) -> Tensor:
    """out (1, N) = x @ weight.T, added to what `out` holds with `add`."""
    n, k = weight.codes.shape[0], 2 * weight.codes.shape[1]
    block_n, groups, warps = tile
    int4_kernel[(triton.cdiv(n, block_n),)](
        x, weight.codes, weight.scales, out, n, K=k, ADD=add, BLOCK_N=block_n, GROUPS=groups, PDL=PDL,
        FAST=not INTERPRETED, num_warps=warps, **EARLY,
    )  # fmt: skip
    return out


@triton.jit
def round_rows_kernel(x_ptr, out_ptr, scales_ptr, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride + dims, mask=dims < WIDTH, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x)) / 448.0, 1e-12)
    tl.store(out_ptr + row * WIDTH + dims, tl.clamp(x / scale, -448.0, 448.0).to(tl.float8e4nv), mask=dims < WIDTH)
    tl.store(scales_ptr + row, scale)


def fp8_product(x: Tensor, weight: Fp8) -> Tensor:
    """x (rows, in) @ weight.T, both in fp8, each row and each output with its scale."""
    rows, width = x.shape
    codes = torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, 1, device=x.device)
    block = triton.next_power_of_2(width)
    round_rows_kernel[(rows,)](x, codes, scales, x.stride(0), WIDTH=width, BLOCK=block, num_warps=8)
    return torch._scaled_mm(
        codes,
        weight.codes.t(),
        scale_a=scales,
        scale_b=weight.scales.unsqueeze(0),
        out_dtype=x.dtype,
        use_fast_accum=True,
    )
