"""Products whose bits do not depend on how many rows there are: every output adds its products in one order.

The tensor cores add sixteen products to an accumulator at a time. A program walks along K from the first column to the
last with one accumulator, so an output's order is k = 0, 16, 32 … for every tile. The library's kernels for many rows
do the same unless they divide K among several programs. Whether they do is tested once for each shape, bit by bit
(`Products`). Where the bits differ, or a shape was not tested, our kernel is used. A product is rounded before it is
added to something, so that a fused addition gives the same bits as a separate one.
"""

from __future__ import annotations

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

FEW = 64  # rows that our kernel multiplies as fast as the library
MOST = 8192  # rows that the library is handed at a time


@triton.jit(do_not_specialize=["rows"])
def product_kernel(
    x_ptr, w_ptr, out_ptr, rows, n_rows, x_stride, w_stride, out_stride,
    K: tl.constexpr, ADD: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr, FETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """WEIGHTS_FIRST: the weights are the left operand of the instruction, which has 16 or 64 rows; x is the right one,
    with as few as 8. FETCH: bytes of each row of weights that are prefetched while the kernel before is running."""
    EVEN: tl.constexpr = K % BLOCK_K == 0
    r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    mine = r < rows
    w_rows = w_ptr + tl.where(n < n_rows, n, 0).to(tl.int64) * w_stride
    x_rows = x_ptr + tl.where(mine, r, 0).to(tl.int64) * x_stride
    if FETCH > 0:
        prefetch_rows(w_rows, FETCH)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if WEIGHTS_FIRST:
        acc = tl.zeros((BLOCK_N, BLOCK_R), tl.float32)
    else:
        acc = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
    for k0 in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        here = k0 + k
        if EVEN:
            w = tl.load(w_rows[:, None] + here[None, :])
            x = tl.load(x_rows[:, None] + here[None, :], mask=mine[:, None], other=0.0)
        else:
            w = tl.load(w_rows[:, None] + here[None, :], mask=(here < K)[None, :], other=0.0)
            x = tl.load(x_rows[:, None] + here[None, :], mask=mine[:, None] & (here < K)[None, :], other=0.0)
        if WEIGHTS_FIRST:
            acc = tl.dot(w, tl.trans(x), acc, input_precision=PRECISION)
        else:
            acc = tl.dot(x, tl.trans(w), acc, input_precision=PRECISION)
    if WEIGHTS_FIRST:
        acc = tl.trans(acc)
    place = out_ptr + r.to(tl.int64)[:, None] * out_stride + n[None, :]
    inside = mine[:, None] & (n < n_rows)[None, :]
    if ADD:
        acc = acc.to(out_ptr.dtype.element_ty).to(tl.float32) + tl.load(place, mask=inside, other=0.0).to(tl.float32)
    tl.store(place, acc.to(out_ptr.dtype.element_ty), mask=inside)


ProductTile = tuple[int, int, int, int, int, bool]  # BLOCK_R, BLOCK_N, BLOCK_K, stages, warps, weights first


def tile_of(rows: int, n: int, dtype: torch.dtype) -> ProductTile:
    """The fastest tile, as measured on an H200. No choice here changes a bit."""
    if INTERPRETED:
        return 16, 64, 64, 2, 4, True  # the interpreter multiplies with a library, whose order may depend on the shape
    if dtype == torch.float32:
        return (16, 64, 32, 2, 4, False) if rows <= 16 else (64, 64, 32, 2, 8, False)
    wide = n >= 16384
    if rows <= 8:
        return 8, 16, 256, 4, 1, True
    if wide and rows <= 32:
        return 16 if rows <= 16 else 32, 128, 128, 4, 8, True
    if rows <= 16:
        return 16, 64, 128, 6, 4, True
    if rows <= 32:
        return 32, 64, 128, 5, 4, True
    if rows <= 128:
        return (64, 128, 128, 3, 8, False) if wide else (64, 64, 128, 5, 4, False)
    if rows <= 512:
        return (128, 128, 64, 4, 8, False) if wide else (128, 64, 128, 4, 8, False)
    return 128, 256, 64, 3, 8, False


def exact_product(
    x: Tensor, weight: Tensor, out: Tensor, add: bool, tile: ProductTile | None = None, *, fetch: int = 0
) -> Tensor:
    """out (rows, N) = x @ weight.T, added to what `out` holds with `add`; the product is rounded first. fetch: bytes of
    each row of weights to be prefetched while the kernel before is running."""
    (rows, k), n = x.shape, weight.shape[0]
    block_r, block_n, block_k, stages, warps, first = tile or tile_of(rows, n, x.dtype)
    fetch = min(fetch, k * x.element_size()) if PDL and k % 8 == 0 else 0
    product_kernel[(triton.cdiv(n, block_n), triton.cdiv(rows, block_r))](
        x, weight, out, rows, n, x.stride(0), weight.stride(0), out.stride(0), K=k, ADD=add, BLOCK_R=block_r,
        BLOCK_N=block_n, BLOCK_K=block_k, WEIGHTS_FIRST=first, STAGES=stages,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", FETCH=fetch, PDL=PDL, num_warps=warps, **EARLY,
    )  # fmt: skip
    return out


class Products:
    """The product for any number of rows: the library's where it was found to give our kernel's bits."""

    def __init__(self) -> None:
        self.same: dict[tuple[int, int, int, bool], bool] = {}  # (rows, out, in, add): the library gives our bits

    def __call__(self, x: Tensor, weight: Tensor, add_to: Tensor | None) -> Tensor:
        """x @ weight.T, or `add_to` with it added."""
        rows, (n, k) = x.shape[0], weight.shape
        if rows <= FEW or not x.is_cuda or x.dtype == torch.float32 or n % 8 or k % 8:
            return self._ours(x, weight, add_to)
        limit = MOST if n < 16384 else 2048  # a wide result in parts: L2 keeps the weights
        if rows <= limit:
            return self._piece(x, weight, add_to)
        if add_to is None:
            out = torch.empty(rows, n, dtype=x.dtype, device=x.device)
            for a in range(0, rows, limit):
                self._piece(x[a : a + limit], weight, None, out[a : a + limit])
            return out
        for a in range(0, rows, limit):
            self._piece(x[a : a + limit], weight, add_to[a : a + limit])
        return add_to

    def _ours(self, x: Tensor, weight: Tensor, add_to: Tensor | None, out: Tensor | None = None) -> Tensor:
        if add_to is None and out is None:
            out = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
        target = out if add_to is None else add_to
        assert target is not None
        return exact_product(x, weight, target, add_to is not None)

    def _piece(self, x: Tensor, weight: Tensor, add_to: Tensor | None, out: Tensor | None = None) -> Tensor:
        rows = x.shape[0]
        padded = padded_rows(rows)
        if not self._trusted(padded, weight, False):
            return self._ours(x, weight, add_to, out)
        if padded == rows:
            if add_to is not None and self._trusted(rows, weight, True):
                return add_to.addmm_(x, weight.t())
            made = torch.mm(x, weight.t()) if out is None else torch.mm(x, weight.t(), out=out)
        else:
            wider = torch.empty(padded, x.shape[1], dtype=x.dtype, device=x.device)
            wider[:rows] = x  # the rows past them are not set: their results are not read
            made = torch.mm(wider, weight.t())[:rows]
            if out is not None:
                made = out.copy_(made)
        return made if add_to is None else add_to.add_(made)

    def _trusted(self, rows: int, weight: Tensor, add: bool) -> bool:
        key = (rows, weight.shape[0], weight.shape[1], add)
        found = self.same.get(key)
        if found is None:
            if torch.cuda.is_current_stream_capturing():
                return False
            found = self.same[key] = agrees(rows, weight, add)
        return found


def padded_rows(rows: int) -> int:
    """Rows after padding: few different counts, so that few shapes have to be tested."""
    step = 64 if rows <= 512 else 128 if rows <= 1024 else 256 if rows <= 4096 else 512
    return -(-rows // step) * step


def agrees(rows: int, weight: Tensor, add: bool) -> bool:
    """Whether the library's product of this shape has the bits of ours, on random numbers. Waits for the device."""
    generator = torch.Generator(weight.device).manual_seed(rows)
    x = torch.randn(rows, weight.shape[1], device=weight.device, generator=generator).to(weight.dtype)
    ours = torch.randn(rows, weight.shape[0], device=weight.device, generator=generator).to(weight.dtype)
    theirs = ours.clone().addmm_(x, weight.t()) if add else torch.mm(x, weight.t())
    return bool(torch.equal(exact_product(x, weight, ours, add), theirs))
