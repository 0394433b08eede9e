"""One row times a matrix. The cost is reading the matrix once, so the norm or gate before the product adds no time.

cuBLAS reads large matrices at full bandwidth but reaches only two thirds of it on the small ones (the attention
output), and needs a kernel of its own for the norm, the gate and the residual. Here a program owns BLOCK_N rows of the
matrix and walks along K while the next tile is being loaded. It starts to load its first tile before the kernel that
makes `x` has ended (programmatic dependent launch), because no kernel writes weights.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from twostroke.ops.cuda.kernels.launch import EARLY, PDL, gdc_launch_dependents, gdc_wait
from twostroke.ops.cuda.kernels.rows import NOTHING, gated_pair


@triton.jit
def weight_tile(w_rows, rows, k0, k, K: tl.constexpr, EVEN: tl.constexpr):
    """The tile of columns from k0 on; zeros past the end of the rows."""
    if EVEN:
        mask = rows[:, None] & (k0 < K)
    else:
        mask = rows[:, None] & (k0 + k < K)[None, :]
    return tl.load(w_rows + (k0 + k)[None, :], mask=mask, other=0.0)


@triton.jit
def gemv_kernel(
    x_ptr, w_ptr, bias_ptr, norm_ptr, out_ptr, eps, n_rows, w_stride,
    K: tl.constexpr, BEFORE: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DEPTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    EVEN: tl.constexpr = K % BLOCK_K == 0
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    rows = n < n_rows
    w_rows = w_ptr + n.to(tl.int64)[:, None] * w_stride
    w0 = weight_tile(w_rows, rows, 0, k, K, EVEN)
    w1, w2 = w0, w0
    if DEPTH > 1:
        w1 = weight_tile(w_rows, rows, BLOCK_K, k, K, EVEN)
    if DEPTH > 2:
        w2 = weight_tile(w_rows, rows, 2 * BLOCK_K, k, K, EVEN)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    squares = tl.zeros((BLOCK_K,), tl.float32)
    x = tl.load(x_ptr + k, mask=k < K, other=0.0)
    side = x
    if BEFORE == 1:
        side = tl.load(norm_ptr + k, mask=k < K, other=0.0)
    if BEFORE >= 2:
        side = tl.load(x_ptr + K + k, mask=k < K, other=0.0)
    for k0 in range(0, K, BLOCK_K):
        new = weight_tile(w_rows, rows, k0 + DEPTH * BLOCK_K, k, K, EVEN)
        ahead = k0 + BLOCK_K + k
        next_x = tl.load(x_ptr + ahead, mask=ahead < K, other=0.0)
        next_side = next_x
        if BEFORE == 1:
            next_side = tl.load(norm_ptr + ahead, mask=ahead < K, other=0.0)
        if BEFORE >= 2:
            next_side = tl.load(x_ptr + K + ahead, mask=ahead < K, other=0.0)
        row = x.to(tl.float32)
        if BEFORE == 1:
            squares += row * row
            row *= side.to(tl.float32)
        if BEFORE >= 2:
            row = gated_pair(row, side.to(tl.float32), BEFORE)
        total += w0.to(tl.float32) * row[None, :]
        x, side = next_x, next_side
        if DEPTH == 1:
            w0 = new
        elif DEPTH == 2:
            w0, w1 = w1, new
        else:
            w0, w1, w2 = w1, w2, new
    out = tl.sum(total, axis=1)
    if BEFORE == 1:
        out *= tl.rsqrt(tl.sum(squares) / K + eps)
    if BIAS:
        out += tl.load(bias_ptr + n, mask=rows, other=0.0)
    if ADD:
        out += tl.load(out_ptr + n, mask=rows, other=0.0).to(tl.float32)
    tl.store(out_ptr + n, out.to(out_ptr.dtype.element_ty), mask=rows)


def tile_of(n: int, k: int) -> tuple[int, int, int, int]:
    """BLOCK_N, BLOCK_K, warps and tiles loaded ahead, as measured on an H200."""
    if k <= 2048 and 4096 < n <= 8192:
        return 16, min(256, triton.next_power_of_2(k)), 4, 3
    if k <= 2048 and n <= 4096:
        block_n, block_k = (4, 2048) if n <= 2048 else (16, 512) if n <= 3072 else (8, 1024)
        return block_n, min(block_k, triton.next_power_of_2(k)), 8, 1
    if n <= 3072 and 2048 < k <= 4096:
        return 4, 1024, 8 if n <= 2048 else 4, 1
    if k <= 2048 or n <= 2048:
        return 8, min(1024, triton.next_power_of_2(k)), 8, 1
    if k > 8192:
        return 16, 512, 8, 1
    if n > 4096:
        return 16, 256, 4, 1 if n > 8192 else 2
    return 8, 512, 4, 2


def gemv(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, *, before: int = NOTHING, norm: Tensor | None = None,
    eps: float = 0.0, add: bool = False,
    tile: tuple[int, int, int, int] | None = None,
) -> Tensor:  # fmt: skip
    """out (1, N) = before(x) @ weight.T + bias, added to what `out` holds with `add`."""
    n, k = weight.shape
    block_n, block_k, warps, depth = tile or tile_of(n, k)
    gemv_kernel[(triton.cdiv(n, block_n),)](
        x, weight, weight if bias is None else bias,
        weight if norm is None else norm, out, eps, n, weight.stride(0), K=k, BEFORE=before, BIAS=bias is not None,
        ADD=add, BLOCK_N=block_n, BLOCK_K=block_k, DEPTH=depth, PDL=PDL, num_warps=warps,
        **EARLY,
    )  # fmt: skip
    return out
