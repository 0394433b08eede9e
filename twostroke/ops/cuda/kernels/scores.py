"""Log probabilities of chosen tokens and of the best ones of a row, without a copy of the logits on the host.

Each program finds the best tokens of a chunk, best first. Then one program for each row merges the chunks' lists: it
takes the best head, again and again. Equal tokens come in the order of their ids, as in run/sample.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 4096


@triton.jit(do_not_specialize=["vocab", "chunks", "best"])
def chunk_scores_kernel(
    logits_ptr, rows_ptr, parts_ptr, values_ptr, ids_ptr, vocab, stride, chunks, best, CHUNK: tl.constexpr
):  # fmt: skip
    """parts: the chunk's highest logit, and the sum of all exponentials relative to it."""
    index, chunk = tl.program_id(0), tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = ids < vocab
    base = logits_ptr + tl.load(rows_ptr + index).to(tl.int64) * stride
    x = tl.load(base + ids, mask=inside, other=float("-inf")).to(tl.float32)
    peak = tl.max(x)
    place = index.to(tl.int64) * chunks + chunk
    empty = (peak == float("-inf")) & (tl.max(tl.where(x != x, 1, 0)) == 0)  # nothing here can be chosen
    terms = tl.exp(x.to(tl.float64) - tl.where(empty, 0.0, peak).to(tl.float64))
    tl.store(parts_ptr + 2 * place, peak.to(tl.float64))
    tl.store(parts_ptr + 2 * place + 1, tl.sum(terms))
    for n in range(best):
        top = tl.max(x)
        token = tl.min(tl.where((x == top) & inside, ids, vocab))
        tl.store(values_ptr + place * best + n, top)
        tl.store(ids_ptr + place * best + n, token)
        inside = inside & (ids != token)
        x = tl.where(inside, x, float("-inf"))


@triton.jit(do_not_specialize=["vocab", "chunks", "best"])
def row_scores_kernel(
    logits_ptr, rows_ptr, tokens_ptr, parts_ptr, values_ptr, ids_ptr, out_ptr, vocab, stride, chunks, best,
    CHUNKS_2: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0)
    chunk = tl.arange(0, CHUNKS_2)
    there = chunk < chunks
    places = index.to(tl.int64) * chunks + chunk
    peaks = tl.load(parts_ptr + 2 * places, mask=there, other=float("-inf"))
    sums = tl.load(parts_ptr + 2 * places + 1, mask=there, other=0.0)
    peak = tl.max(peaks)
    total = tl.sum(tl.where(there, sums * tl.exp(peaks - peak), 0.0))
    out = out_ptr + index.to(tl.int64) * (2 + 2 * best)
    token = tl.maximum(tl.load(tokens_ptr + index), 0)
    own = tl.load(logits_ptr + tl.load(rows_ptr + index).to(tl.int64) * stride + token).to(tl.float64)
    tl.store(out, peak + tl.log(total))
    tl.store(out + 1, own)
    taken = tl.zeros((CHUNKS_2,), tl.int32)  # of each chunk's list
    for n in range(best):
        left = there & (taken < best)
        heads = tl.load(values_ptr + places * best + taken, mask=left, other=float("-inf"))
        ids = tl.load(ids_ptr + places * best + taken, mask=left, other=vocab)
        top = tl.max(heads)
        found = tl.min(tl.where(heads == top, ids, vocab))
        taken += ((ids == found) & left).to(tl.int32)
        tl.store(out + 2 + n, top.to(tl.float64))
        tl.store(out + 2 + best + n, found.to(tl.float64))


def best_scores(logits: Tensor, rows: Tensor, tokens: Tensor, best: int) -> Tensor:
    """For each of `rows` (n,) of the logits (S, V), in float64: the logarithm of the sum of all exponentials, the logit
    of its token, the `best` highest logits (or all), and their ids. tokens (n,). NaN where logits are not numbers."""
    count, vocab = len(rows), logits.shape[1]
    best = min(best, vocab)
    chunks = triton.cdiv(vocab, CHUNK)
    parts = torch.empty(count, chunks, 2, dtype=torch.float64, device=logits.device)
    values = torch.empty(count, chunks, best, device=logits.device)
    ids = torch.empty(count, chunks, best, dtype=torch.int32, device=logits.device)
    out = torch.empty(count, 2 + 2 * best, dtype=torch.float64, device=logits.device)
    chunk_scores_kernel[(count, chunks)](
        logits, rows, parts, values, ids, vocab, logits.stride(0), chunks, best, CHUNK=CHUNK, num_warps=8
    )  # fmt: skip
    row_scores_kernel[(count,)](
        logits, rows, tokens, parts, values, ids, out, vocab, logits.stride(0), chunks, best,
        CHUNKS_2=triton.next_power_of_2(chunks), num_warps=1,
    )  # fmt: skip
    return out
