"""The newest tokens on the device: argmax of logits, or of logits over temperature plus keyed Gumbel noise.

The noise is the hash of run/sample.py, bit for bit, so a token does not depend on which of the two made it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from twostroke.ops.cuda.kernels.filters import Filters, filter_rows, ordered
from twostroke.ops.cuda.kernels.launch import EARLY, PDL, gdc_launch_dependents, gdc_wait

CHUNK = 4096


@triton.jit(do_not_specialize=["count", "vocab"])
def resolve_kernel(tokens_ptr, newest_ptr, out_ptr, count, vocab, BLOCK: tl.constexpr, PDL: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    inside = index < count
    token = tl.load(tokens_ptr + index, mask=inside, other=0)
    ahead = token < 0
    known = tl.load(newest_ptr + tl.where(ahead, -token - 1, 0), mask=inside & ahead, other=0)
    found = tl.where(ahead, known, token)
    tl.store(out_ptr + index, tl.minimum(tl.maximum(found, 0), vocab - 1), mask=inside)


def resolve_tokens(tokens: Tensor, newest: Tensor, vocab: int) -> Tensor:
    """Replaces each token -1 - place by the token that is kept at this place, which the host may not know yet. A draft
    model may have chosen one that this model does not have: it becomes another one, and is not accepted."""
    out, count = torch.empty_like(tokens), tokens.numel()
    resolve_kernel[(triton.cdiv(count, 1024),)](
        tokens, newest, out, count, vocab, BLOCK=1024, PDL=PDL, num_warps=4, **EARLY
    )  # fmt: skip
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
    logits_ptr, temperatures_ptr, keys_ptr, key_ptr, last_ptr, best_ptr, index_ptr, vocab, stride, chunks,
    FILTERED: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, chunk = tl.program_id(0), tl.program_id(1)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = ids < vocab
    x = tl.load(logits_ptr + row.to(tl.int64) * stride + ids, mask=inside, other=float("-inf")).to(tl.float32)
    bad = tl.max(tl.where(x != x, 1, 0))
    temperature = tl.load(temperatures_ptr + row)
    if temperature > 0:
        low = tl.load(keys_ptr + 2 * row).to(tl.uint32, bitcast=True).to(tl.uint64)
        high = tl.load(keys_ptr + 2 * row + 1).to(tl.uint32, bitcast=True).to(tl.uint64)
        x = tl.div_rn(x, temperature)
        if FILTERED:
            key, last = tl.load(key_ptr + row), tl.load(last_ptr + row)
            mine = ordered(x)
            inside &= (mine > key) | ((mine == key) & (ids <= last))
        x = tl.where(inside, x + gumbel((high << 32) | low, ids), float("-inf"))
    best = tl.max(x)
    index = tl.min(tl.where((x == best) & inside, ids, vocab))
    tl.store(best_ptr + row * chunks + chunk, best)
    tl.store(index_ptr + row * chunks + chunk, tl.where(bad > 0, -1, index))


@triton.jit
def pick_kernel(
    best_ptr, index_ptr, rows_ptr, newest_ptr, out_ptr, chunks, CHUNKS_2: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
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


def sample(
    logits: Tensor, temperatures: Tensor, keys: Tensor, rows: Tensor, newest: Tensor, out: Tensor,
    filters: Filters | None = None,
) -> Tensor:  # fmt: skip
    """One token for each row of logits (S, V) into out (S,) and newest[rows] (rows of -1 are left out); -1: the logits
    are not numbers. With filters logits are float32. temperatures (S,) float32, 0 for greedy; keys (S, 2) int32: the
    low and the high half of the noise's key."""
    count, vocab = logits.shape
    chunks = triton.cdiv(vocab, CHUNK)
    best = torch.empty(count, chunks, device=logits.device)
    index = torch.empty(count, chunks, dtype=torch.int32, device=logits.device)
    key, last = index, index
    if filters is not None:
        key, last = filter_rows(logits, temperatures, filters)
    chunk_kernel[(count, chunks)](
        logits, temperatures, keys, key, last, best, index, vocab, logits.stride(0), chunks,
        FILTERED=filters is not None, CHUNK=CHUNK, PDL=PDL, num_warps=8, **EARLY,
    )  # fmt: skip
    pick_kernel[(count,)](
        best, index, rows, newest, out, chunks, CHUNKS_2=triton.next_power_of_2(chunks), PDL=PDL, num_warps=1, **EARLY
    )
    return out
