"""Matrices kept in fewer bits than the activations.

fp8 and int8: a scale for each output. An fp8 scale is the best of several, by the squared error of its row.
int4: 32 neighbouring inputs of an output share a scale and a least value, both bfloat16, and a weight is
bfloat16(code · scale + least). Rows are made of slices of 128 inputs (zeros fill the last one), 64 bytes each; a byte
holds inputs j and j + 16 of its group, and the 16 bytes of a group follow each other.

x stays (nearly) whole in all of them. One row: one_row.py, and one_row_int4.py, which does not round the weights. Some
rows: decoded.py. For many rows a decoded copy is made.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from twostroke.ops.cuda.kernels.narrow_tiles import FP8, INT4, INT8

GROUP, SLICE = 32, 128  # inputs that share a scale in int4; inputs of 64 bytes
LARGEST = 448.0  # of fp8 with four bits of exponent
CANDIDATES = 8  # scales tried for a row of fp8, evenly spread over a factor of two


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
    codes: Tensor  # (out, slices · 64) uint8
    scales: Tensor  # (slices, out, 4) int32: the bits of a group's scale, and above them those of its least value
    bias: Tensor | None
    inputs: int
    format: int = INT4


Narrow = Fp8 | Int8 | Int4


def to_fp8(weight: Tensor, bias: Tensor | None) -> Fp8:
    scales = weight.abs().amax(dim=1).float().clamp_(min=1e-12) / LARGEST
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    for a, b in chunks(weight):
        part = weight[a:b].float()
        scales[a:b] = best_scales(part, scales[a:b])
        codes[a:b] = (part / scales[a:b, None]).to(torch.float8_e4m3fn)
    return Fp8(codes, scales, bias)


def best_scales(rows: Tensor, least: Tensor) -> Tensor:
    """(rows,): `least` times up to 2, with the least squared error. Steps of fp8 are coarse and grow with the value, so
    that it matters where the frequent values fall between them."""
    best, error = least, torch.full_like(least, float("inf"))
    for number in range(CANDIDATES):
        scale = least * 2 ** (number / CANDIDATES)
        codes = (rows / scale[:, None]).to(torch.float8_e4m3fn).float()
        found = codes.mul_(scale[:, None]).sub_(rows).square_().sum(dim=1)
        best, error = torch.where(found < error, scale, best), torch.minimum(found, error)
    return best


def to_int8(weight: Tensor, bias: Tensor | None) -> Int8:
    scales = weight.abs().amax(dim=1).float().clamp_(min=1e-12) / 127
    codes = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    for a, b in chunks(weight):
        codes[a:b] = (weight[a:b].float() / scales[a:b, None]).round_().clamp_(-127, 127).to(torch.int8)
    return Int8(codes, scales, bias)


def to_int4(weight: Tensor, bias: Tensor | None) -> Int4:
    rows, width = weight.shape
    slices = -(-width // SLICE)
    codes = torch.zeros(rows, slices * SLICE // 2, dtype=torch.uint8, device=weight.device)
    scales = torch.zeros(slices, rows, SLICE // GROUP, dtype=torch.int32, device=weight.device)
    for a, b in chunks(weight):
        part = torch.nn.functional.pad(weight[a:b].float(), (0, slices * SLICE - width)).view(b - a, -1, GROUP)
        least = part.amin(dim=2).bfloat16()
        scale = ((part.amax(dim=2) - least.float()) / 15).clamp_(min=1e-30).bfloat16()
        whole = (
            ((part - least.float().unsqueeze(2)) / scale.float().unsqueeze(2)).round_().clamp_(0, 15).to(torch.uint8)
        )
        codes[a:b] = (whole[..., : GROUP // 2] | (whole[..., GROUP // 2 :] << 4)).flatten(1)
        words = scale.view(torch.int16).int() & 0xFFFF | least.view(torch.int16).int() << 16
        scales[:, a:b] = words.view(b - a, slices, -1).transpose(0, 1)
    return Int4(codes, scales, bias, width)


def chunks(weight: Tensor) -> list[tuple[int, int]]:
    """Rows to treat at a time, so that no float copy of the whole matrix is made."""
    step = max(1, (1 << 27) // weight.shape[1])
    return [(a, min(a + step, weight.shape[0])) for a in range(0, weight.shape[0], step)]


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
        SLICES: tl.constexpr = (WIDTH + 127) // 128
        byte = tl.load(codes_ptr + token * (SLICES * 64) + k // 32 * 16 + k % 16, mask=inside, other=0).to(tl.int32)
        group = tl.load(scales_ptr + ((k // 128) * n_rows + token) * 4 + k % 128 // 32, mask=inside, other=0)
        scale_of, least = (group << 16).to(tl.float32, bitcast=True), (group & -65536).to(tl.float32, bitcast=True)
        x = (((byte >> (k % 32 // 16 * 4)) & 15).to(tl.float32) * scale_of + least).to(tl.bfloat16).to(tl.float32)
    else:
        x = tl.load(codes_ptr + token * WIDTH + k, mask=inside, other=0.0).to(tl.float32)
        x *= tl.load(scales_ptr + token)
    tl.store(out_ptr + tl.program_id(0).to(tl.int64) * WIDTH + k, (x * scale).to(out_ptr.dtype.element_ty), mask=inside)


def rows_of(weight: Narrow, tokens: Tensor | None, scale: float, dtype: torch.dtype) -> Tensor:
    """The named rows of the matrix (None: all), times `scale`."""
    rows = weight.codes.shape[0]
    width = weight.inputs
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
