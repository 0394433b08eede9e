"""The newest tokens on the device: argmax of logits, or of logits over temperature plus keyed Gumbel noise.

The noise is the hash of run/sample.py, bit for bit, so a token does not depend on which of the two made it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 4096


@triton.jit
def resolve_kernel(tokens_ptr, newest_ptr, out_ptr, count, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    token = tl.load(tokens_ptr + index, mask=inside, other=0)
    ahead = token < 0
    known = tl.load(newest_ptr + tl.where(ahead, -token - 1, 0), mask=inside & ahead, other=0)
    tl.store(out_ptr + index, tl.maximum(tl.where(ahead, known, token), 0), mask=inside)


def resolve_tokens(tokens: Tensor, newest: Tensor) -> Tensor:
    """Where a token is -1 - row, the one that row sampled last, which the host may not know yet."""
    out = torch.empty_like(tokens)
    resolve_kernel[(triton.cdiv(tokens.numel(), 1024),)](tokens, newest, out, tokens.numel(), BLOCK=1024, num_warps=4)
    return out


@triton.jit
def gumbel(key, ids):
    z = key + 0x9E3779B97F4A7C15 * (ids.to(tl.uint64) + 1)
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    z = z ^ (z >> 31)
    uniform = ((z >> 11).to(tl.float64) + 0.5) * 1.1102230246251565e-16
    return (-tl.log(-tl.log(uniform))).to(tl.float32)


@triton.jit
def chunk_kernel(
    logits_ptr, temperatures_ptr, keys_ptr, best_ptr, index_ptr, vocab, stride, chunks, CHUNK: tl.constexpr
):  # fmt: skip
    row, chunk = tl.program_id(0), tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = ids < vocab
    x = tl.load(logits_ptr + row.to(tl.int64) * stride + ids, mask=inside, other=float("-inf")).to(tl.float32)
    bad = tl.max(tl.where(x != x, 1, 0))
    temperature = tl.load(temperatures_ptr + row)
    if temperature > 0:
        low = tl.load(keys_ptr + 2 * row).to(tl.uint32, bitcast=True).to(tl.uint64)
        high = tl.load(keys_ptr + 2 * row + 1).to(tl.uint32, bitcast=True).to(tl.uint64)
        x = tl.where(inside, x / temperature + gumbel((high << 32) | low, ids), float("-inf"))
    best = tl.max(x)
    index = tl.min(tl.where((x == best) & inside, ids, vocab))
    tl.store(best_ptr + row * chunks + chunk, best)
    tl.store(index_ptr + row * chunks + chunk, tl.where(bad > 0, -1, index))


@triton.jit
def pick_kernel(best_ptr, index_ptr, rows_ptr, newest_ptr, out_ptr, chunks, CHUNKS_2: tl.constexpr):
    row = tl.program_id(0)
    chunk = tl.arange(0, CHUNKS_2)
    inside = chunk < chunks
    best = tl.load(best_ptr + row * chunks + chunk, mask=inside, other=float("-inf"))
    index = tl.load(index_ptr + row * chunks + chunk, mask=inside, other=0)
    bad = tl.max(tl.where(inside & (index < 0), 1, 0))
    top = tl.max(best)
    first = tl.min(tl.where((best == top) & inside, chunk, CHUNKS_2))
    token = tl.sum(tl.where(chunk == first, index, 0))
    finite = (top < float("inf")) & (top > float("-inf"))
    token = tl.where((bad == 0) & finite, token, -1)
    tl.store(out_ptr + row, token)
    place = tl.load(rows_ptr + row)
    if place >= 0:
        tl.store(newest_ptr + place, token)


def sample(logits: Tensor, temperatures: Tensor, keys: Tensor, rows: Tensor, newest: Tensor, out: Tensor) -> Tensor:
    """One token for each row of logits (S, V) into out (S,) and newest[rows] (rows of -1 are left out); -1: no numbers.

    temperatures (S,) float32, 0 for greedy; keys (S, 2) int32: the low and the high half of the noise's key."""
    count, vocab = logits.shape
    chunks = triton.cdiv(vocab, CHUNK)
    best = torch.empty(count, chunks, device=logits.device)
    index = torch.empty(count, chunks, dtype=torch.int32, device=logits.device)
    chunk_kernel[(count, chunks)](
        logits, temperatures, keys, best, index, vocab, logits.stride(0), chunks, CHUNK=CHUNK, num_warps=8
    )
    pick_kernel[(count,)](best, index, rows, newest, out, chunks, CHUNKS_2=triton.next_power_of_2(chunks), num_warps=1)
    return out
