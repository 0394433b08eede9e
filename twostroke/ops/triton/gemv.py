"""One row times a matrix: the whole cost is reading the matrix once, so the norm or gate before it rides along free.

cuBLAS reads large matrices at full bandwidth but reaches only two thirds of it on the small ones (the attention output),
and needs a kernel of its own for the norm, the gate and the residual. Here a program owns BLOCK_N rows of the matrix and
walks along K with the next tile already on its way. The first tile is asked for before the kernel that makes `x` has
ended (programmatic dependent launch): weights depend on nobody.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from twostroke.ops.triton.launch import PDL, gdc_launch_dependents, gdc_wait
from twostroke.ops.triton.rows import activated

NOTHING, NORM, SILU, GELU = 0, 1, 2, 3  # what happens to x before the product


@triton.jit
def gemv_kernel(
    x_ptr, w_ptr, bias_ptr, norm_ptr, out_ptr, eps, n_rows, w_stride,
    K: tl.constexpr, BEFORE: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    rows = n < n_rows
    w_rows = w_ptr + n.to(tl.int64)[:, None] * w_stride
    tile = tl.load(w_rows + k[None, :], mask=rows[:, None] & (k < K)[None, :], other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    squares = tl.zeros((BLOCK_K,), tl.float32)
    for k0 in range(0, K, BLOCK_K):
        here = k0 + k
        inside = here < K
        x = tl.load(x_ptr + here, mask=inside, other=0.0).to(tl.float32)
        if BEFORE == 1:
            squares += x * x
            x *= tl.load(norm_ptr + here, mask=inside, other=0.0)
        if BEFORE >= 2:
            up = tl.load(x_ptr + K + here, mask=inside, other=0.0).to(tl.float32)
            x = activated(x, BEFORE == 2) * up
        following = here + BLOCK_K
        new = tl.load(w_rows + following[None, :], mask=rows[:, None] & (following < K)[None, :], other=0.0)
        total += tile.to(tl.float32) * x[None, :]
        tile = new
    out = tl.sum(total, axis=1)
    if BEFORE == 1:
        out *= tl.rsqrt(tl.sum(squares) / K + eps)
    if BIAS:
        out += tl.load(bias_ptr + n, mask=rows, other=0.0)
    if ADD:
        out += tl.load(out_ptr + n, mask=rows, other=0.0).to(tl.float32)
    tl.store(out_ptr + n, out.to(out_ptr.dtype.element_ty), mask=rows)


def tile_of(n: int, k: int) -> tuple[int, int, int]:
    """BLOCK_N, BLOCK_K and warps, as measured on an H200."""
    block_k = min(1024, triton.next_power_of_2(k))
    if n * k >= 1 << 26:
        return 8, block_k, 8
    return 4, block_k, 4


def gemv(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, *, before: int = NOTHING, norm: Tensor | None = None,
    eps: float = 0.0, add: bool = False, tile: tuple[int, int, int] | None = None,
) -> Tensor:  # fmt: skip
    """out (1, N) = before(x) @ weight.T + bias, added to what `out` holds with `add`."""
    n, k = weight.shape
    block_n, block_k, warps = tile or tile_of(n, k)
    pdl = PDL and x.is_cuda
    gemv_kernel[(triton.cdiv(n, block_n),)](
        x, weight, weight if bias is None else bias, weight if norm is None else norm, out, eps, n, weight.stride(0),
        K=k, BEFORE=before, BIAS=bias is not None, ADD=add, BLOCK_N=block_n, BLOCK_K=block_k, PDL=pdl,
        num_warps=warps, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    return out


def supports(x: Tensor, weight: Tensor) -> bool:
    return x.shape[0] == 1 and x.is_contiguous() and weight.stride(1) == 1 and x.dtype in (torch.bfloat16, torch.float32)
