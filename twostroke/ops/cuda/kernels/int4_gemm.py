"""Tens of rows times an int4 matrix: codes are decoded in registers, just before the product.

The weights are the product's tall side, so that decoded tiles stay in registers; one step takes a group of 128 inputs,
whose scale each output applies to its decoded weights. From a few hundred rows on, a decoded copy and the vendor's
product are faster.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from twostroke.ops.cuda.kernels.launch import INTERPRETED


@triton.jit
def decoded_nibbles(codes, DTYPE: tl.constexpr, FAST: tl.constexpr):
    """The low and the high elements of int4 codes."""
    if FAST:  # the bits of 128 + nibble are set directly; 136 is then subtracted
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, m;
            mov.b32 m, 0x43084308;
            and.b32 a, $4, 0x0f0f0f0f;
            shr.u32 b, $4, 4;
            and.b32 b, b, 0x0f0f0f0f;
            prmt.b32 $0, a, 0x43434343, 0x4140;
            prmt.b32 $1, a, 0x43434343, 0x4342;
            prmt.b32 $2, b, 0x43434343, 0x4140;
            prmt.b32 $3, b, 0x43434343, 0x4342;
            sub.bf16x2 $0, $0, m;
            sub.bf16x2 $1, $1, m;
            sub.bf16x2 $2, $2, m;
            sub.bf16x2 $3, $3, m;
            }""",
            "=r,=r,=r,=r,r", [codes], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4,
        )  # fmt: skip
    else:
        low = ((codes & 15).to(tl.int32) - 8).to(DTYPE)
        high = ((codes >> 4).to(tl.int32) - 8).to(DTYPE)
    return low, high


@triton.jit
def int4_kernel(
    x_ptr, codes_ptr, scales_ptr, bias_ptr, out_ptr, tokens, n_rows, x_stride, K: tl.constexpr,
    BIAS: tl.constexpr, ADD: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    byte = tl.arange(0, 64)
    rows, columns = n < n_rows, t < tokens
    codes_at = codes_ptr + n.to(tl.int64)[:, None] * (K // 2) + byte[None, :]
    x_at = x_ptr + t.to(tl.int64)[None, :] * x_stride + byte[:, None]
    acc = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    for group in tl.range(0, K // 128, num_stages=STAGES):
        codes = tl.load(codes_at + group * 64, mask=rows[:, None], other=0)
        scale = tl.load(scales_ptr + group * n_rows + n, mask=rows, other=0.0)
        a = tl.load(x_at + group * 128, mask=columns[None, :], other=0.0)
        b = tl.load(x_at + group * 128 + 64, mask=columns[None, :], other=0.0)
        low, high = decoded_nibbles(codes, DTYPE, FAST)
        some = tl.dot(low, a, input_precision=PRECISION)
        some = tl.dot(high, b, some, input_precision=PRECISION)
        acc += some * scale[:, None]
    if BIAS:
        acc += tl.load(bias_ptr + n, mask=rows, other=0.0)[:, None]
    place = out_ptr + t.to(tl.int64)[None, :] * n_rows + n[:, None]
    inside = rows[:, None] & columns[None, :]
    if ADD:
        acc += tl.load(place, mask=inside, other=0.0).to(tl.float32)
    tl.store(place, acc.to(DTYPE), mask=inside)


def int4_product(
    x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, out: Tensor, add: bool,
    shape: tuple[int, int, int, int] | None = None,
) -> Tensor:  # fmt: skip
    """out (rows, N) = x @ matrix.T + bias, added to what `out` holds with `add`."""
    n, tokens, k = codes.shape[0], x.shape[0], 2 * codes.shape[1]
    exact = x.dtype == torch.float32
    block_n, block_t, warps, stages = shape or (
        64, max(16, min(128, triton.next_power_of_2(tokens))), 4, 1 if exact else 3 if n >= 16384 else 4
    )  # fmt: skip
    int4_kernel[(triton.cdiv(n, block_n), triton.cdiv(tokens, block_t))](
        x, codes, scales, scales if bias is None else bias, out, tokens, n, x.stride(0), K=k, BIAS=bias is not None,
        ADD=add, BLOCK_N=block_n, BLOCK_T=block_t, STAGES=stages, PRECISION="ieee" if exact else "tf32",
        FAST=not INTERPRETED and not exact, num_warps=warps,
    )  # fmt: skip
    return out
