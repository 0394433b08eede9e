"""A few rows times a matrix with few outputs: programs share the inputs of a tile of outputs.

So few tiles of outputs leave most multiprocessors idle. The last program of a tile to end adds the sums of all of them,
in the order of the inputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from twostroke.ops.cuda.kernels.decoded import counters
from twostroke.ops.cuda.kernels.launch import EARLY, PDL, gdc_launch_dependents, gdc_wait, prefetch_rows

BLOCK_N = 64  # outputs of a tile
BLOCK_K = 128
STAGES = 4
LEAST = 1024  # inputs of a program
TILES = 66  # the most: with more of them the device is full without shares


@triton.jit(do_not_specialize=["rows", "fetch"])
def split_kernel(
    x_ptr, w_ptr, sums_ptr, count_ptr, out_ptr, rows, n_rows, x_stride, fetch, K: tl.constexpr, ADD: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """fetch: bytes of each row of weights that are prefetched while the kernel before is running."""
    EACH: tl.constexpr = K // SPLITS
    tile, split = tl.program_id(0), tl.program_id(1)
    n, r = tile * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_R)
    k = split * EACH + tl.arange(0, BLOCK_K)
    mine = r < rows
    w_rows = w_ptr + tl.where(n < n_rows, n, 0).to(tl.int64) * K
    x_rows = x_ptr + tl.where(mine, r, 0).to(tl.int64) * x_stride
    if PDL:
        prefetch_rows(w_rows + split * EACH, fetch)
        gdc_wait()
        gdc_launch_dependents()
    acc = tl.zeros((BLOCK_N, BLOCK_R), tl.float32)
    for k0 in tl.range(0, EACH, BLOCK_K, num_stages=STAGES):
        w = tl.load(w_rows[:, None] + (k0 + k)[None, :])
        x = tl.load(x_rows[:, None] + (k0 + k)[None, :], mask=mine[:, None], other=0.0)
        acc = tl.dot(w, tl.trans(x), acc, input_precision=PRECISION)
    place = r.to(tl.int64)[None, :] * n_rows + n[:, None]
    there = mine[None, :] & (n < n_rows)[:, None]
    apart = rows.to(tl.int64) * n_rows
    tl.store(sums_ptr + split * apart + place, acc, mask=there)
    tl.debug_barrier()
    if tl.atomic_add(count_ptr + tile, 1, sem="acq_rel") == SPLITS - 1:
        tl.store(count_ptr + tile, 0)
        total = tl.zeros((BLOCK_N, BLOCK_R), tl.float32)
        for other in tl.static_range(SPLITS):
            total += tl.load(sums_ptr + other * apart + place, mask=there, other=0.0)
        if ADD:
            total += tl.load(out_ptr + place, mask=there, other=0.0).to(tl.float32)
        tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=there)


def shares_of(n: int, k: int, rows: int) -> int:
    """Programs that share a tile; 1: this product gains nothing."""
    tiles, programs = triton.cdiv(n, BLOCK_N), 256 if rows <= 16 else 128
    if tiles > TILES or rows <= 8:
        return 1
    fits = (s for s in (8, 4, 2) if tiles * s <= programs and k % (s * BLOCK_K) == 0 and k // s >= LEAST)
    return next(fits, 1)


def split_product(x: Tensor, weight: Tensor, out: Tensor, add: bool, shares: int, *, fetch: int = 0) -> Tensor:
    """out (rows, N) = x @ weight.T, added to what `out` holds with `add`. Up to 32 rows."""
    (rows, k), n = x.shape, weight.shape[0]
    sums = torch.empty(shares, rows, n, device=x.device)
    split_kernel[(triton.cdiv(n, BLOCK_N), shares)](
        x, weight, sums, counters(x.device), out, rows, n, x.stride(0), fetch, K=k, ADD=add,
        BLOCK_R=16 if rows <= 16 else 32, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, SPLITS=shares, STAGES=STAGES,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", PDL=PDL, num_warps=4, **EARLY,
    )  # fmt: skip
    return out
