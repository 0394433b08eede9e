"""top-k, top-p and min-p: which tokens of each row of logits may be chosen.

Each keeps the tokens with the highest logits, equal ones in order of their ids. No sort is needed: they keep all tokens
above a threshold, and the first few of those that equal it. The threshold's bits are found from the highest to the
lowest, three at a time, by counting the tokens above it (or adding their weights, which are integers: so a sum does not
depend on the order of its parts).

Few tokens take part in that search. For top-k these are the tokens that reach the k-th of the highest logits of
stretches of 64 tokens: so many stretches hold so many tokens. For top-p they are those whose probability is not below
what it leaves out, divided by the size of the vocabulary: all others together are less than that.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

PART = 4096  # tokens that one program of the first kernel reads
STRETCH = 64
CHUNK = 2048  # tokens that a program of the second kernel compares together with eight pivots
KEPT = 8192  # and that it chooses from
UNIT = tl.constexpr(2.0**-40)  # of a weight
COARSE = tl.constexpr(1 << 12)  # of the keys of stretches: about a thousandth of the number


class Filters(NamedTuple):
    """What to keep of each row. Rows of temperature 0 are not filtered."""

    top_k: Tensor  # (S,) int32; 0: all
    top_p: Tensor  # (S, 2) float64: top_p and min_p
    slack: float  # taken off top_p


@triton.jit
def ordered(x):
    """Integers in the order of the floats: 0 and -0 alike."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def as_number(key):
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def weight_of(x, top):
    """A probability relative to that of the highest logit, in units of 2 ** -40."""
    return (tl.exp2((x - top) * 1.4426950408889634) * 1099511627776.0).to(tl.int64)


@triton.jit
def above(base, count, top, pivots, WEIGHED: tl.constexpr, CHUNK: tl.constexpr, PIVOTS: tl.constexpr):
    """How many of the numbers lie above each of the pivots, or the sum of their weights."""
    totals = tl.zeros((CHUNK, PIVOTS), tl.int64 if WEIGHED else tl.int32)  # each thread has its own sum
    for start in range(0, count, CHUNK):
        index = start + tl.arange(0, CHUNK)
        inside = index < count
        x = tl.load(base + index, mask=inside, other=0.0)
        higher = (ordered(x)[:, None] > pivots[None, :]) & inside[:, None]
        if WEIGHED:
            totals += tl.where(higher, weight_of(x, top)[:, None], 0)
        else:
            totals += higher.to(tl.int32)
    return tl.sum(totals, axis=0).to(tl.float64)


@triton.jit
def threshold(base, count, top, limit, low, high, least, WEIGHED: tl.constexpr, CHUNK: tl.constexpr):
    """The lowest key of which less than `limit` lies above; it is one of low … high. least: the search ends with
    eighths of this width, and returns a key that is at most so much lower."""
    steps = tl.arange(0, 8)
    low = low.to(tl.int64)
    width = tl.full((), 1, tl.int64)
    while low + 8 * width <= high:
        width = width * 8
    while width >= least:
        pivots = low + (steps + 1).to(tl.int64) * width - 1  # the last key of each eighth
        pivots = tl.minimum(pivots, 2147483647).to(tl.int32)
        totals = above(base, count, top, pivots, WEIGHED, CHUNK, 8)
        low += tl.sum(tl.where(totals >= limit, 1, 0)).to(tl.int64) * width
        width = width // 8
    return low.to(tl.int32)


@triton.jit
def over_key(base, count, top, key, WEIGHED: tl.constexpr, CHUNK: tl.constexpr):
    return tl.max(above(base, count, top, key + tl.zeros((2,), tl.int32), WEIGHED, CHUNK, 2))


@triton.jit
def stretch_kernel(
    logits_ptr, temperatures_ptr, peaks_ptr, sums_ptr, maxima_ptr, vocab, stride, parts, PART: tl.constexpr,
    STRETCH: tl.constexpr,
):  # fmt: skip
    """Of a part of a row: the highest logit, the sum of the exponentials relative to it, the highest of each stretch.
    All logits are over the temperature."""
    row, part = tl.program_id(0), tl.program_id(1)
    temperature = tl.load(temperatures_ptr + row)
    if temperature > 0:
        ids = part * PART + tl.arange(0, PART)
        x = tl.load(logits_ptr + row.to(tl.int64) * stride + ids, mask=ids < vocab, other=float("-inf"))
        x = tl.div_rn(x, temperature)
        peak = tl.max(x)
        tl.store(peaks_ptr + row * parts + part, peak)
        terms = tl.exp(x - tl.where(peak == float("-inf"), 0.0, peak))  # a mask may leave nothing of a part
        tl.store(sums_ptr + row * parts + part, tl.sum(terms))
        COUNT: tl.constexpr = PART // STRETCH
        place = (row * parts + part) * COUNT + tl.arange(0, COUNT)
        tl.store(maxima_ptr + place, tl.max(tl.reshape(x, (COUNT, STRETCH)), axis=1))


@triton.jit
def least_key(top, mass, top_k, top_p, maxima, stretches, vocab, CHUNK: tl.constexpr):
    """No token below this key can be kept, or decide which ones are. mass: about the sum of all weights."""
    key = tl.full((), -2147483648, tl.int32)
    if (top_k > 0) & (top_k < vocab):
        if top_k <= stretches:
            key = threshold(maxima, stretches, top, top_k.to(tl.float64), key, ordered(top), COARSE, False, CHUNK)
    elif top_p < 1.0:
        share = top.to(tl.float64) + tl.log((1.0 - top_p) * mass * UNIT / vocab) - 1e-3
        key = tl.maximum(ordered(share.to(tl.float32)), -2147483647) - 1
    return key


@triton.jit
def keep_from(base, temperature, top, least, found, vocab, CHUNK: tl.constexpr):
    """Writes the logits of a row, over the temperature, from the key `least` on. Returns how many these are, and the
    sum of all weights."""
    count = tl.full((), 0, tl.int32)
    weights = tl.zeros((CHUNK,), tl.int64)
    for start in range(0, vocab, CHUNK):
        ids = start + tl.arange(0, CHUNK)
        x = tl.div_rn(tl.load(base + ids, mask=ids < vocab, other=0.0), temperature)
        stay = ((ids < vocab) & (ordered(x) >= least)).to(tl.int32)
        tl.store(found + count + tl.cumsum(stay, 0) - 1, x, mask=stay > 0)
        count += tl.sum(stay)
        weights += tl.where(ids < vocab, weight_of(x, top), 0)
    return count, tl.sum(weights).to(tl.float64)


@triton.jit
def last_equal(base, temperature, key, stay, found, count, vocab, CHUNK: tl.constexpr):
    """The id of the last token that stays, where `stay` of those whose logit is the key's do."""
    equal = tl.zeros((CHUNK,), tl.int32)
    for start in range(0, count, CHUNK):
        index = start + tl.arange(0, CHUNK)
        x = tl.load(found + index, mask=index < count, other=0.0)
        equal += ((ordered(x) == key) & (index < count)).to(tl.int32)
    last = tl.full((), 0, tl.int32) + vocab
    if tl.sum(equal).to(tl.float64) > stay:
        last = nth_equal(base, temperature, key, stay, vocab, CHUNK)
    return last


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
def filter_kernel(
    logits_ptr, temperatures_ptr, top_k_ptr, top_p_ptr, peaks_ptr, sums_ptr, maxima_ptr, found_ptr, key_ptr, last_ptr,
    vocab, stride, slack, parts, stretches, PARTS_2: tl.constexpr, CHUNK: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """key, last: a row's tokens above `key` stay, and those equal to it up to id `last`."""
    row = tl.program_id(0)
    temperature = tl.load(temperatures_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p, min_p = tl.load(top_p_ptr + 2 * row), tl.load(top_p_ptr + 2 * row + 1)
    base, found = logits_ptr + row.to(tl.int64) * stride, found_ptr + row.to(tl.int64) * vocab
    key = tl.full((), -2147483648, tl.int32)
    ties = tl.full((), 0.0, tl.float64)  # how many of those equal to `key` stay
    last = tl.full((), 0, tl.int32) + vocab
    if (temperature > 0) & (((top_k > 0) & (top_k < vocab)) | (top_p < 1.0) | (min_p > 0.0)):
        part = tl.arange(0, PARTS_2)
        peaks = tl.load(peaks_ptr + row * parts + part, mask=part < parts, other=float("-inf"))
        sums = tl.load(sums_ptr + row * parts + part, mask=part < parts, other=0.0)
        top = tl.max(peaks)
        mass = tl.sum(sums * tl.exp(peaks - top)).to(tl.float64) / UNIT
        least, count = key, tl.full((), 0, tl.int32)
        if ((top_k > 0) & (top_k < vocab)) | (top_p < 1.0):
            maxima = maxima_ptr + row.to(tl.int64) * stretches
            least = least_key(top, mass, top_k, top_p, maxima, stretches, vocab, CHUNK)
            count, mass = keep_from(base, temperature, top, least, found, vocab, KEPT)
            tl.debug_barrier()
        limited = tl.full((), 0, tl.int32)  # whether `ties` says how many stay, or all of them do
        if (top_k > 0) & (top_k < vocab):
            key = threshold(found, count, top, top_k.to(tl.float64), least, ordered(top), 1, False, CHUNK)
            ties = top_k.to(tl.float64) - over_key(found, count, top, key, False, CHUNK)
            limited = tl.full((), 1, tl.int32)
            edge = weight_of(as_number(key), top).to(tl.float64)
            mass = over_key(found, count, top, key, True, CHUNK) + ties * edge
        if top_p < 1.0:
            limit = tl.maximum(top_p - slack, slack) * mass
            other = threshold(found, count, top, limit, least, ordered(top), 1, True, CHUNK)
            over = over_key(found, count, top, other, True, CHUNK)
            stay = tl.ceil((limit - over) / tl.maximum(weight_of(as_number(other), top), 1).to(tl.float64))
            ties = tl.where((other > key) | (limited == 0), stay, tl.minimum(stay, ties))
            key = tl.maximum(other, key)
            limited = tl.full((), 1, tl.int32)
        if min_p > 0.0:
            floor = tl.full((), -2147483648, tl.int64)
            share = min_p * (1.0 / (mass * UNIT))
            half = tl.full((), 1 << 31, tl.int64)
            for _ in range(32):
                middle = as_number((floor + half - 1).to(tl.int32)).to(tl.float64)
                floor += tl.where(tl.exp(middle - top.to(tl.float64)) / (mass * UNIT) >= share, 0, half)
                half = half >> 1
            if floor > key.to(tl.int64):
                key = floor.to(tl.int32)
                limited = tl.full((), 0, tl.int32)
        if limited > 0:
            last = last_equal(base, temperature, key, ties, found, count, vocab, CHUNK)
    tl.store(key_ptr + row, key)
    tl.store(last_ptr + row, last)


def filter_rows(logits: Tensor, temperatures: Tensor, filters: Filters) -> tuple[Tensor, Tensor]:
    """For each row of logits (S, V) float32: the key above which all tokens stay, and the id up to which those that
    equal it do."""
    rows, vocab = logits.shape
    parts = triton.cdiv(vocab, PART)
    peaks = torch.empty(rows, parts, device=logits.device)
    sums = torch.empty_like(peaks)
    maxima = torch.empty(rows, parts * (PART // STRETCH), device=logits.device)
    found = torch.empty(rows, vocab, device=logits.device)
    key, last = (torch.empty(rows, dtype=torch.int32, device=logits.device) for _ in "kl")  # each on a border
    stretch_kernel[(rows, parts)](
        logits, temperatures, peaks, sums, maxima, vocab, logits.stride(0), parts, PART=PART, STRETCH=STRETCH,
        num_warps=8,
    )  # fmt: skip
    filter_kernel[(rows,)](
        logits, temperatures, filters.top_k, filters.top_p, peaks, sums, maxima, found, key, last, vocab,
        logits.stride(0), filters.slack, parts, maxima.shape[1], PARTS_2=triton.next_power_of_2(parts), CHUNK=CHUNK,
        KEPT=KEPT, num_warps=16,
    )  # fmt: skip
    return key, last
