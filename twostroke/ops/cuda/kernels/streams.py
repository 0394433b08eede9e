"""Several residual streams (ops/streams.py): what a part of a layer reads of them, and how its result is added.

Streams are float32, whatever the activations are. The product that all weights come from has few outputs and many
inputs, so programs share the inputs, in parts of a fixed size, and the next kernel adds the parts in order: the bits of
a row do not depend on how many rows there are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from twostroke.ops.streams import StreamMix

PART = 1024  # inputs of a program
ROWS = 4  # that read the same weights
WIDE = 1024  # columns of a program


@triton.jit(do_not_specialize=["rows"])
def products_kernel(
    x_ptr, norm_ptr, w_ptr, sums_ptr, squares_ptr, rows, K: tl.constexpr, OUTPUTS: tl.constexpr,
    OUTPUTS_2: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """sums (T, PARTS, OUTPUTS) of x · norm · w over the inputs of a part, and squares (T, PARTS) of x."""
    part, row, n = tl.program_id(0), tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, OUTPUTS_2)
    there, at = row < rows, row.to(tl.int64)
    acc, squares = tl.zeros((ROWS, OUTPUTS_2), tl.float32), tl.zeros((ROWS,), tl.float32)
    for k0 in range(part * PART, (part + 1) * PART, BLOCK):
        k = k0 + tl.arange(0, BLOCK)
        inside = k < K
        x = tl.load(x_ptr + at[:, None] * K + k[None, :], mask=there[:, None] & inside[None, :], other=0.0)
        w = tl.load(w_ptr + n[:, None] * K + k[None, :], mask=(n < OUTPUTS)[:, None] & inside[None, :], other=0.0)
        w *= tl.load(norm_ptr + k, mask=inside, other=0.0)[None, :]
        acc += tl.sum(x[:, None, :] * w[None, :, :], axis=2)
        squares += tl.sum(x * x, axis=1)
    to = sums_ptr + (at * PARTS + part)[:, None] * OUTPUTS + n[None, :]
    tl.store(to, acc, mask=there[:, None] & (n < OUTPUTS)[None, :])
    tl.store(squares_ptr + at * PARTS + part, squares, mask=there)


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def added(sums, at, there, OUTPUTS: tl.constexpr, PARTS: tl.constexpr):
    """The products at these outputs: their parts, added in order."""
    total = tl.load(sums + at, mask=there, other=0.0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(sums + part * OUTPUTS + at, mask=there, other=0.0)
    return total


@triton.jit
def doubly_stochastic(logits, there, eps, ROUNDS: tl.constexpr):
    """(N_2, N_2): a softmax of each row, then rounds of dividing by the sums of columns and rows. Zeros elsewhere."""
    logits = tl.where(there, logits, float("-inf"))
    top, sums = tl.max(logits, axis=1)[:, None], tl.max(there.to(tl.float32), axis=1)[:, None]
    found = tl.exp(logits - tl.where(top == float("-inf"), 0.0, top))
    found = tl.where(there, found / (tl.sum(found, axis=1)[:, None] + (1.0 - sums)) + eps, 0.0)
    found = found / (tl.sum(found, axis=0)[None, :] + eps)
    for _ in range(ROUNDS - 1):
        found = found / (tl.sum(found, axis=1)[:, None] + eps)
        found = found / (tl.sum(found, axis=0)[None, :] + eps)
    return found


@triton.jit
def collapse_kernel(
    x_ptr, sums_ptr, squares_ptr, base_ptr, scale_ptr, read_ptr, out_ptr, norm_eps, eps, HIDDEN: tl.constexpr,
    N: tl.constexpr, N_2: tl.constexpr, PARTS: tl.constexpr, ROUNDS: tl.constexpr, LAST: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """read (T, HIDDEN) = Σ read weight · stream. The first program of a row also makes out (T, N · (1 + N)), the
    weights of adding and mixing, unless the head reads (LAST)."""
    OUTPUTS: tl.constexpr = N if LAST else N * (2 + N)
    row = tl.program_id(0).to(tl.int64)
    dims = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = dims < HIDDEN
    sums, squares = sums_ptr + row * (PARTS * OUTPUTS), squares_ptr + row * PARTS
    size = tl.rsqrt(added(squares, 0, True, 1, PARTS) / (N * HIDDEN) + norm_eps)
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(N):
        stream = tl.load(x_ptr + (row * N + k) * HIDDEN + dims, mask=inside, other=0.0)
        logit = added(sums, k, True, OUTPUTS, PARTS) * size * tl.load(scale_ptr) + tl.load(base_ptr + k)
        total += (sigmoid(logit) + eps) * stream
    tl.store(read_ptr + row * HIDDEN + dims, total.to(read_ptr.dtype.element_ty), mask=inside)
    if not LAST:  # noqa: SIM102  (one is known at compile time)
        if tl.program_id(1) == 0:
            every, out = tl.arange(0, N_2), out_ptr + row * (N * (1 + N))
            logits = added(sums, N + every, every < N, OUTPUTS, PARTS) * size * tl.load(scale_ptr + 1)
            logits += tl.load(base_ptr + N + every, mask=every < N, other=0.0)
            tl.store(out + every, 2.0 * sigmoid(logits), mask=every < N)
            there, at = (every < N)[:, None] & (every < N)[None, :], N + every[:, None] * N + every[None, :]
            mixing = added(sums, N + at, there, OUTPUTS, PARTS) * size * tl.load(scale_ptr + 2)
            mixing += tl.load(base_ptr + N + at, mask=there, other=0.0)
            tl.store(out + at, doubly_stochastic(mixing, there, eps, ROUNDS), mask=there)


def collapse(x: Tensor, mix: StreamMix, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x (T, N · hidden) -> what is read (T, hidden) in `dtype`, weights of adding and mixing (none for the head)."""
    (rows, k), n, outputs = x.shape, mix.streams, mix.weight.shape[0]
    hidden, last, parts, x = k // n, outputs == n, triton.cdiv(k, PART), x.contiguous()
    sums = torch.empty(rows, parts, outputs, dtype=torch.float32, device=x.device)
    squares = torch.empty(rows, parts, dtype=torch.float32, device=x.device)
    products_kernel[(parts, triton.cdiv(rows, ROWS))](
        x, mix.norm.weight, mix.weight, sums, squares, rows, K=k, OUTPUTS=outputs,
        OUTPUTS_2=triton.next_power_of_2(outputs), PARTS=parts, PART=PART, ROWS=ROWS, BLOCK=64, num_warps=4,
    )  # fmt: skip
    read = torch.empty(rows, hidden, dtype=dtype, device=x.device)
    out = torch.empty(rows, 0 if last else n * (1 + n), dtype=torch.float32, device=x.device)
    block = min(WIDE, triton.next_power_of_2(hidden))
    collapse_kernel[(rows, triton.cdiv(hidden, block))](
        x, sums, squares, mix.base, mix.scale, read, out, mix.norm.eps, mix.eps, HIDDEN=hidden, N=n,
        N_2=triton.next_power_of_2(n), PARTS=parts, ROUNDS=mix.rounds, LAST=last, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return read, out


@triton.jit
def expand_kernel(
    x_ptr, result_ptr, weights_ptr, out_ptr, result_stride, HIDDEN: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """out stream k = add k · result + Σ mix (j, k) · stream j."""
    row = tl.program_id(0).to(tl.int64)
    dims = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = dims < HIDDEN
    weights = weights_ptr + row * (N * (1 + N))
    result = tl.load(result_ptr + row * result_stride + dims, mask=inside, other=0.0).to(tl.float32)
    for k in tl.static_range(N):
        total = tl.load(weights + k) * result
        for j in tl.static_range(N):
            stream = tl.load(x_ptr + (row * N + j) * HIDDEN + dims, mask=inside, other=0.0)
            total += tl.load(weights + N + j * N + k) * stream
        tl.store(out_ptr + (row * N + k) * HIDDEN + dims, total, mask=inside)


def expand(x: Tensor, result: Tensor, weights: Tensor, streams: int) -> Tensor:
    x = x.contiguous()
    out, hidden = torch.empty_like(x), result.shape[1]
    block = min(WIDE, triton.next_power_of_2(hidden))
    expand_kernel[(len(x), triton.cdiv(hidden, block))](
        x, result, weights.contiguous(), out, result.stride(0), HIDDEN=hidden, N=streams, BLOCK=block, num_warps=4
    )
    return out
