"""Products with weights kept in fewer bits.

int8: a scale for each output. fp8: a scale for each output and 64 inputs, the one of several with the least error.
int4: a scale for each output and 128 inputs; a byte holds elements j and j + 64 of its group, so that both halves of a
run of bytes meet neighbouring elements of x.
x keeps (nearly) its full precision with any number of rows: one_row.py and skinny.py multiply a few straight from the
codes, byte_gemm.py and int4_gemm.py tens; for many rows a decoded copy is made. Rounding x to eight bits as well would
double the pace of long prompts, and cost perplexity ten times what the codes cost (docs/gpu.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from twostroke.ops.cuda.kernels.skinny import FP8, INT4, INT8

GROUP, SLICE = 128, 64  # inputs that share a scale in int4, in fp8
LARGEST = 448.0  # of fp8 with four bits of exponent
TRIALS = tuple(2.0 ** (eighth / 8) for eighth in range(8))  # of fp8's smallest scale: its codes are not evenly spaced


@dataclass(frozen=True, slots=True, eq=False)
class Fp8:
    codes: Tensor  # (out, in) float8_e4m3fn
    scales: Tensor  # (in / SLICE, out) bfloat16
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
    rows, width = weight.shape
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    scales = torch.empty(width // SLICE, rows, dtype=torch.bfloat16, device=weight.device)
    for a, b in chunks(weight):
        part = weight[a:b].float().view(-1, width // SLICE, SLICE)
        least = part.abs().amax(dim=2, keepdim=True).clamp_(min=1e-12) / LARGEST
        best = error = None
        for trial in TRIALS:
            scale = (least * trial).bfloat16().float()
            lost = (as_fp8(part / scale).float() * scale - part).square_().sum(dim=2, keepdim=True)
            best = scale if best is None else torch.where(lost < error, scale, best)
            error = lost if error is None else torch.minimum(lost, error)
        assert best is not None
        codes[a:b] = as_fp8(part / best).flatten(1)
        scales[:, a:b] = best.squeeze(2).t()
    return Fp8(codes, scales, bias)


def as_fp8(x: Tensor) -> Tensor:
    return x.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)


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
        if FORMAT == 3:
            x *= tl.load(scales_ptr + (k // 64).to(tl.int64) * n_rows + token, mask=inside, other=0.0).to(tl.float32)
        else:
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
