"""Products with weights kept in fewer bits.

fp8 and int8: a scale for each output. fp8 multiplies many rows in eight bits, with a scale for each row of x (W8A8).
int8 keeps x nearly whole: tens of rows are cut into two parts of eight bits, which are multiplied as rows of their own,
and for many rows a decoded copy is made.
int4: a scale for each output and 128 inputs; a byte holds elements j and j + 64 of its group, so that both halves of a
run of bytes meet neighbouring elements of x.
A few rows are multiplied straight from the codes with x in (nearly) full precision: skinny.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from twostroke.ops.cuda.kernels.narrow_tiles import FINE
from twostroke.ops.cuda.kernels.skinny import FP8, INT4, INT8

GROUP = 128
LARGEST = 448.0  # of fp8 with four bits of exponent


@dataclass(frozen=True, slots=True, eq=False)
class Fp8:
    codes: Tensor  # (out, in) float8_e4m3fn
    scales: Tensor  # (out,) float32
    bias: Tensor | None
    format: int = FP8

    @property
    def inputs(self) -> int:
        return self.codes.shape[1]


@dataclass(frozen=True, slots=True, eq=False)
class Int8:
    codes: Tensor  # (out, in) int8
    scales: Tensor  # (out,) float32
    bias: Tensor | None
    format: int = INT8

    @property
    def inputs(self) -> int:
        return self.codes.shape[1]


@dataclass(frozen=True, slots=True, eq=False)
class Int4:
    codes: Tensor  # (out, in / 2) uint8
    scales: Tensor  # (in / GROUP, out) float32
    bias: Tensor | None
    format: int = INT4

    @property
    def inputs(self) -> int:
        return 2 * self.codes.shape[1]


Narrow = Fp8 | Int8 | Int4


def to_fp8(weight: Tensor, bias: Tensor | None) -> Fp8:
    scales = weight.abs().amax(dim=1).float().clamp_(min=1e-12) / LARGEST
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    for a, b in chunks(weight):
        codes[a:b] = (weight[a:b].float() / scales[a:b, None]).to(torch.float8_e4m3fn)
    return Fp8(codes, scales, bias)


def to_int8(weight: Tensor, bias: Tensor | None) -> Int8:
    scales = weight.abs().amax(dim=1).float().clamp_(min=1e-12) / 127
    codes = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    for a, b in chunks(weight):
        codes[a:b] = (weight[a:b].float() / scales[a:b, None]).round_().clamp_(-127, 127).to(torch.int8)
    return Int8(codes, scales, bias)


def to_int4(weight: Tensor, bias: Tensor | None) -> Int4:
    rows, width = weight.shape
    codes = torch.empty(rows, width // 2, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(width // GROUP, rows, device=weight.device)
    for a, b in chunks(weight):
        part = weight[a:b].float().view(-1, width // GROUP, GROUP)
        scale = part.abs().amax(dim=2).clamp_(min=1e-12) / 7
        whole = (part / scale.unsqueeze(2)).round_().clamp_(-7, 7).add_(8).to(torch.uint8)
        codes[a:b] = (whole[..., : GROUP // 2] | (whole[..., GROUP // 2 :] << 4)).flatten(1)
        scales[:, a:b] = scale.t()
    return Int4(codes, scales, bias)


def chunks(weight: Tensor) -> list[tuple[int, int]]:
    """Rows to treat at a time, so that no float copy of the whole matrix is made."""
    step = max(1, (1 << 27) // weight.shape[1])
    return [(a, a + step) for a in range(0, weight.shape[0], step)]


@triton.jit
def rows_kernel(
    tokens_ptr, codes_ptr, scales_ptr, out_ptr, scale, n_rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    FORMAT: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    if LISTED:
        token = tl.load(tokens_ptr + token).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = k < WIDTH
    if FORMAT == 2:
        byte = tl.load(codes_ptr + token * (WIDTH // 2) + k // 128 * 64 + k % 64, mask=inside, other=0).to(tl.int32)
        x = (((byte >> (k % 128 // 64 * 4)) & 15) - 8).to(tl.float32)
        x *= tl.load(scales_ptr + (k // 128).to(tl.int64) * n_rows + token, mask=inside, other=0.0)
    else:
        x = tl.load(codes_ptr + token * WIDTH + k, mask=inside, other=0.0).to(tl.float32)
        x *= tl.load(scales_ptr + token)
    tl.store(out_ptr + tl.program_id(0).to(tl.int64) * WIDTH + k, (x * scale).to(out_ptr.dtype.element_ty), mask=inside)


def rows_of(weight: Narrow, tokens: Tensor | None, scale: float, dtype: torch.dtype) -> Tensor:
    """The named rows of the matrix (None: all), times `scale`."""
    rows = weight.codes.shape[0]
    width = weight.codes.shape[1] * (2 if weight.format == INT4 else 1)
    count = rows if tokens is None else tokens.shape[0]
    block = min(2048, triton.next_power_of_2(width))
    out = torch.empty(count, width, dtype=dtype, device=weight.codes.device)
    rows_kernel[(count, triton.cdiv(width, block))](
        weight.codes if tokens is None else tokens, weight.codes, weight.scales, out, scale, rows, WIDTH=width,
        BLOCK=block, FORMAT=weight.format, LISTED=tokens is not None, num_warps=4,
    )  # fmt: skip
    return out


def as_float(weight: Narrow, dtype: torch.dtype) -> Tensor:
    return rows_of(weight, None, 1.0, dtype)


@triton.jit
def round_rows_kernel(
    x_ptr, out_ptr, scales_ptr, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr
):  # fmt: skip
    """Rows in eight bits, each with its scale: fp8 up to 448, or WHOLE numbers up to 127 and, in a row behind all
    others, what they leave over in steps of 1 / FINE."""
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride + dims, mask=dims < WIDTH, other=0.0).to(tl.float32)
    most: tl.constexpr = 127.0 if WHOLE else 448.0
    scale = tl.maximum(tl.max(tl.abs(x)) / most, 1e-12)
    x = tl.clamp(x / scale, -most, most)
    if WHOLE:
        whole = (x + 12582912.0) - 12582912.0
        rest = ((x - whole) * FINE + 12582912.0) - 12582912.0
        behind = (tl.num_programs(0) + row) * WIDTH
        tl.store(out_ptr + behind + dims, rest.to(out_ptr.dtype.element_ty), mask=dims < WIDTH)
        x = whole
    tl.store(out_ptr + row * WIDTH + dims, x.to(out_ptr.dtype.element_ty), mask=dims < WIDTH)
    tl.store(scales_ptr + row, scale)


def rounded_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    rows, width = x.shape
    whole = dtype == torch.int8
    codes = torch.empty(rows * (2 if whole else 1), width, dtype=dtype, device=x.device)
    scales = torch.empty(rows, 1, device=x.device)
    round_rows_kernel[(rows,)](
        x, codes, scales, x.stride(0), WIDTH=width, BLOCK=triton.next_power_of_2(width), WHOLE=whole, num_warps=8
    )
    return codes, scales


def fp8_product(x: Tensor, weight: Fp8) -> Tensor:
    """x (rows, in) @ weight.T, both in fp8, each row and each output with its scale."""
    codes, scales = rounded_rows(x, torch.float8_e4m3fn)
    return torch._scaled_mm(
        codes,
        weight.codes.t(),
        scale_a=scales,
        scale_b=weight.scales.unsqueeze(0),
        out_dtype=x.dtype,
        use_fast_accum=True,
    )


@triton.jit
def scale_kernel(sums_ptr, rows_ptr, scales_ptr, out_ptr, width, BLOCK: tl.constexpr):
    """The sums of both parts of each row, times the scales of row and output."""
    row = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    behind = (tl.num_programs(1) + row) * width
    x = tl.load(sums_ptr + row * width + n, mask=n < width, other=0).to(tl.float32)
    x += tl.load(sums_ptr + behind + n, mask=n < width, other=0).to(tl.float32) * (1.0 / FINE)
    x *= tl.load(rows_ptr + row) * tl.load(scales_ptr + n, mask=n < width, other=0.0)
    tl.store(out_ptr + row * width + n, x.to(out_ptr.dtype.element_ty), mask=n < width)


def int8_product(x: Tensor, weight: Int8) -> Tensor:
    """x (rows, in) @ weight.T with x in two parts of eight bits; at least nine rows."""
    codes, scales = rounded_rows(x, torch.int8)
    rows, width = x.shape[0], weight.codes.shape[0]
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    sums = torch._int_mm(codes, weight.codes.t())
    block = min(4096, triton.next_power_of_2(width))
    scale_kernel[(triton.cdiv(width, block), rows)](
        sums, scales, weight.scales, out, width, BLOCK=block, num_warps=8
    )  # fmt: skip
    return out
