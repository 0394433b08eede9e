"""Tens of rows times a matrix of int8 or fp8 codes, which become floats in registers, just before the product.

The weights are the product's tall side, so that decoded tiles stay in registers. A step takes 64 inputs, which share a
scale in fp8; int8 has one scale for each output. From a few hundred rows on, a decoded copy and the vendor's product
are faster.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["tokens"])
def byte_kernel(
    x_ptr, codes_ptr, scales_ptr, bias_ptr, out_ptr, tokens, n_rows, x_stride, K: tl.constexpr,
    GROUPED: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    k = tl.arange(0, 64)
    rows, columns = n < n_rows, t < tokens
    codes_at = codes_ptr + n.to(tl.int64)[:, None] * K + k[None, :]
    x_at = x_ptr + t.to(tl.int64)[None, :] * x_stride + k[:, None]
    acc = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    for group in tl.range(0, K // 64, num_stages=STAGES):
        codes = tl.load(codes_at + group * 64, mask=rows[:, None], other=0.0).to(DTYPE)
        x = tl.load(x_at + group * 64, mask=columns[None, :], other=0.0)
        if GROUPED:
            scale = tl.load(scales_ptr + group * n_rows + n, mask=rows, other=0.0).to(tl.float32)
            acc += tl.dot(codes, x, input_precision=PRECISION) * scale[:, None]
        else:
            acc = tl.dot(codes, x, acc, input_precision=PRECISION)
    if not GROUPED:
        acc *= tl.load(scales_ptr + n, mask=rows, other=0.0)[:, None]
    if BIAS:
        acc += tl.load(bias_ptr + n, mask=rows, other=0.0)[:, None]
    place = out_ptr + t.to(tl.int64)[None, :] * n_rows + n[:, None]
    inside = rows[:, None] & columns[None, :]
    if ADD:
        acc += tl.load(place, mask=inside, other=0.0).to(tl.float32)
    tl.store(place, acc.to(DTYPE), mask=inside)


def byte_product(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, out: Tensor, add: bool) -> Tensor:
    """out (rows, N) = x @ matrix.T + bias, added to what `out` holds with `add`. scales: (N,), or (K / 64, N)."""
    n, tokens, k = codes.shape[0], x.shape[0], codes.shape[1]
    exact = x.dtype == torch.float32
    block_t = max(16, min(64 if exact else 128, triton.next_power_of_2(tokens)))
    byte_kernel[(triton.cdiv(n, 64), triton.cdiv(tokens, block_t))](
        x, codes, scales, scales if bias is None else bias, out, tokens, n, x.stride(0), K=k, GROUPED=scales.dim() == 2,
        BIAS=bias is not None, ADD=add, BLOCK_N=64, BLOCK_T=block_t, STAGES=1 if exact else 4,
        PRECISION="ieee" if exact else "tf32", num_warps=4,
    )  # fmt: skip
    return out
