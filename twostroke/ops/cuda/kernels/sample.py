"""The newest tokens on the device: argmax of logits, or of logits over temperature plus keyed Gumbel noise.

The noise is the hash of run/sample.py, bit for bit, so a token does not depend on which of the two made it.

top-k, top-p and min-p each keep the tokens with the highest logits, equal ones in order of their ids. No sort is
needed: they keep all tokens above a threshold, and the first few of those that equal it. The threshold's bits are found
from the highest to the lowest, three at a time, by counting the tokens above it (or adding their probabilities).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from twostroke.ops.cuda.kernels.launch import EARLY, PDL, gdc_launch_dependents, gdc_wait

CHUNK = 4096


class Filters(NamedTuple):
    """What to keep of each row. Rows of temperature 0 are not filtered."""

    top_k: Tensor  # (S,) int32; 0: all
    top_p: Tensor  # (S, 2) float64: top_p and min_p
    slack: float  # taken off top_p


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
def ordered(x):
    """Integers in the order of the floats: 0 and -0 alike."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def as_number(key):
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def above(base, temperature, top, pivots, vocab, WEIGHED: tl.constexpr, CHUNK: tl.constexpr, PIVOTS: tl.constexpr):
    """How many tokens of a row lie above each of the pivots, or the sum of their probabilities."""
    totals = tl.zeros((CHUNK, PIVOTS), tl.float64 if WEIGHED else tl.int32)  # each thread has its own sum
    for start in range(0, vocab, CHUNK):
        ids = start + tl.arange(0, CHUNK)
        inside = ids < vocab
        x = tl.div_rn(tl.load(base + ids, mask=inside, other=0.0), temperature)
        higher = (ordered(x)[:, None] > pivots[None, :]) & inside[:, None]
        if WEIGHED:
            weight = tl.exp(x.to(tl.float64) - top.to(tl.float64))
            totals += tl.where(higher, weight[:, None], 0.0)
        else:
            totals += higher.to(tl.int32)
    return tl.sum(totals, axis=0).to(tl.float64)


@triton.jit
def threshold(base, temperature, top, limit, vocab, WEIGHED: tl.constexpr, CHUNK: tl.constexpr):
    """The lowest key of which less than `limit` lies above, and what lies above it."""
    steps = tl.arange(0, 8)
    low = tl.full((), -2147483648, tl.int64)  # less than `limit` lies above some key in low … low + 8 · width - 1
    width = tl.full((), 1 << 30, tl.int64)
    for _ in range(11):
        pivots = low + (steps + 1).to(tl.int64) * width - 1  # the last key of each eighth
        pivots = tl.minimum(pivots, 2147483647).to(tl.int32)
        totals = above(base, temperature, top, pivots, vocab, WEIGHED, CHUNK, 8)
        low += tl.sum(tl.where(totals >= limit, 1, 0)).to(tl.int64) * width
        width = width >> 3
    key = low.to(tl.int32)
    over = above(base, temperature, top, key + tl.zeros((8,), tl.int32), vocab, WEIGHED, CHUNK, 8)
    return key, tl.max(over)


@triton.jit
def filter_kernel(
    logits_ptr, temperatures_ptr, top_k_ptr, top_p_ptr, key_ptr, last_ptr, vocab, stride, slack, CHUNK: tl.constexpr
):  # fmt: skip
    """key, last: a row's tokens above `key` stay, and those equal to it up to id `last`."""
    row = tl.program_id(0)
    temperature = tl.load(temperatures_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p, min_p = tl.load(top_p_ptr + 2 * row), tl.load(top_p_ptr + 2 * row + 1)
    base = logits_ptr + row.to(tl.int64) * stride
    key = tl.full((), -2147483648, tl.int32)
    ties = tl.full((), 0.0, tl.float64)  # how many of those equal to `key` stay
    last = vocab
    if temperature > 0:
        best = tl.full((CHUNK,), float("-inf"), tl.float32)
        for start in range(0, vocab, CHUNK):
            ids = start + tl.arange(0, CHUNK)
            best = tl.maximum(best, tl.load(base + ids, mask=ids < vocab, other=float("-inf")))
        top = tl.div_rn(tl.max(best), temperature)
        limited = tl.full((), 0, tl.int32)  # whether `ties` says how many stay, or all of them do
        if (top_k > 0) & (top_k < vocab):
            key, over = threshold(base, temperature, top, top_k.to(tl.float64), vocab, False, CHUNK)
            ties = top_k.to(tl.float64) - over
            limited = tl.full((), 1, tl.int32)
        if (top_p < 1.0) | (min_p > 0.0):
            low = tl.full((8,), 0, tl.int32) + key
            mass = tl.max(above(base, temperature, top, low, vocab, True, CHUNK, 8))
            edge = tl.exp(as_number(key).to(tl.float64) - top.to(tl.float64))
            if limited > 0:
                mass += ties * edge
            if top_p < 1.0:
                limit = tl.maximum(top_p - slack, slack) * mass
                other, over = threshold(base, temperature, top, limit, vocab, True, CHUNK)
                weight = tl.exp(as_number(other).to(tl.float64) - top.to(tl.float64))
                stay = tl.ceil((limit - over) / weight)
                ties = tl.where((other > key) | (limited == 0), stay, tl.minimum(stay, ties))
                key = tl.maximum(other, key)
                limited = tl.full((), 1, tl.int32)
            if min_p > 0.0:
                floor = tl.full((), -2147483648, tl.int64)
                share = min_p * (1.0 / mass)
                half = tl.full((), 1 << 31, tl.int64)
                for _ in range(32):
                    middle = as_number((floor + half - 1).to(tl.int32)).to(tl.float64)
                    floor += tl.where(tl.exp(middle - top.to(tl.float64)) / mass >= share, 0, half)
                    half = half >> 1
                if floor > key.to(tl.int64):
                    key = floor.to(tl.int32)
                    limited = tl.full((), 0, tl.int32)
        if limited > 0:
            last = nth_equal(base, temperature, key, ties, vocab, CHUNK)
    tl.store(key_ptr + row, key)
    tl.store(last_ptr + row, last)


@triton.jit
def nth_equal(base, temperature, key, count, vocab, CHUNK: tl.constexpr):
    """The id of the count-th token whose logit is the key's."""
    last = tl.full((), -1, tl.int32)
    seen = tl.full((), 0.0, tl.float64)
    for start in range(0, vocab, CHUNK):
        ids = start + tl.arange(0, CHUNK)
        x = tl.div_rn(tl.load(base + ids, mask=ids < vocab, other=0.0), temperature)
        equal = (ids < vocab) & (ordered(x) == key)
        rank = seen + tl.cumsum(equal.to(tl.int32), 0).to(tl.float64)
        last = tl.maximum(last, tl.max(tl.where(equal & (rank <= count), ids, -1)))
        seen += tl.sum(equal.to(tl.int32)).to(tl.float64)
    return last


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
        key, last = (torch.empty(count, dtype=torch.int32, device=logits.device) for _ in "kl")  # each on a border
        filter_kernel[(count,)](
            logits, temperatures, filters.top_k, filters.top_p, key, last, vocab, logits.stride(0), filters.slack,
            CHUNK=2048, num_warps=16,
        )  # fmt: skip
    chunk_kernel[(count, chunks)](
        logits, temperatures, keys, key, last, best, index, vocab, logits.stride(0), chunks,
        FILTERED=filters is not None, CHUNK=CHUNK, PDL=PDL, num_warps=8, **EARLY,
    )  # fmt: skip
    pick_kernel[(count,)](
        best, index, rows, newest, out, chunks, CHUNKS_2=triton.next_power_of_2(chunks), PDL=PDL, num_warps=1, **EARLY
    )
    return out
