"""What requests change in their logits before a token is chosen: grammar masks, penalties, biases, a minimal length,
and temperatures next to zero.

The same numbers as `adjust` in run/sample.py makes, in the same order and with the same roundings. One program does all
of a row, list after list. A token that a step in flight has chosen is known to the device alone: it counts once more
where the list of the row's tokens holds it, and is changed by itself where it does not.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

CHUNK = 4096
BLOCK = 256


class EditLists(NamedTuple):
    """E rows to be edited; the lists lie one after the other."""

    places: Tensor  # (E, 6) int32: row of logits, place of the token in flight or -1, begin of the row's lists, and the
    # ends of its tokens, of its biases, of its stop tokens
    penalties: Tensor  # (E, 3) float32: repetition, presence, frequency
    ids: Tensor  # int32
    values: Tensor  # int32: how often the answer holds the token; the bits of a bias


@triton.jit
def mask_kernel(logits_ptr, rows_ptr, words_ptr, vocab, stride, width, CHUNK: tl.constexpr):
    """Tokens whose bit is not set become impossible. NaN and infinity stay, so that they are found."""
    index = tl.program_id(0)
    base = logits_ptr + tl.load(rows_ptr + index).to(tl.int64) * stride
    ids = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = ids < vocab
    word = tl.load(words_ptr + index.to(tl.int64) * width + ids // 32, mask=inside, other=0)
    x = tl.load(base + ids, mask=inside, other=0.0)
    forbidden = ((word >> (ids % 32)) & 1) == 0
    tl.store(base + ids, tl.full((CHUNK,), float("-inf"), tl.float32), mask=inside & forbidden & (x < float("inf")))


@triton.jit
def penalized(x, count, repetition, presence, frequency):
    """count: of the token in the answer."""
    x = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
    return tl.where(count > 0, x - (presence + frequency * count.to(tl.float32)), x)


@triton.jit
def edit_kernel(
    logits_ptr, newest_ptr, places_ptr, penalties_ptr, ids_ptr, values_ptr, stride, BLOCK: tl.constexpr
):  # fmt: skip
    places, penalties = places_ptr + tl.program_id(0) * 6, penalties_ptr + tl.program_id(0) * 3
    base = logits_ptr + tl.load(places).to(tl.int64) * stride
    ahead, begin, tokens_end = tl.load(places + 1), tl.load(places + 2), tl.load(places + 3)
    biases_end, stops_end = tl.load(places + 4), tl.load(places + 5)
    repetition, presence, frequency = tl.load(penalties), tl.load(penalties + 1), tl.load(penalties + 2)
    newest = tl.load(newest_ptr + ahead, mask=ahead >= 0, other=-1)
    index = tl.arange(0, BLOCK)
    found = tl.zeros((BLOCK,), tl.int32)
    for start in range(begin, tokens_end, BLOCK):
        inside = start + index < tokens_end
        ids = tl.load(ids_ptr + start + index, mask=inside, other=-1)
        count = tl.load(values_ptr + start + index, mask=inside, other=0)
        again = inside & (ids == newest)
        found |= again.to(tl.int32)
        x = tl.load(base + ids, mask=inside, other=0.0)
        x = penalized(x, count + again.to(tl.int32), repetition, presence, frequency)
        tl.store(base + ids, x, mask=inside)
    alone = index < tl.where(newest >= 0, 1 - tl.max(found), 0)
    x = tl.load(base + newest + index * 0, mask=alone, other=0.0)
    tl.store(base + newest + index * 0, penalized(x, index * 0 + 1, repetition, presence, frequency), mask=alone)
    tl.debug_barrier()
    for start in range(tokens_end, biases_end, BLOCK):
        inside = start + index < biases_end
        ids = tl.load(ids_ptr + start + index, mask=inside, other=0)
        bias = tl.load(values_ptr + start + index, mask=inside, other=0).to(tl.float32, bitcast=True)
        tl.store(base + ids, tl.load(base + ids, mask=inside, other=0.0) + bias, mask=inside)
    tl.debug_barrier()
    for start in range(biases_end, stops_end, BLOCK):
        inside = start + index < stops_end
        ids = tl.load(ids_ptr + start + index, mask=inside, other=0)
        tl.store(base + ids, tl.full((BLOCK,), float("-inf"), tl.float32), mask=inside)


@triton.jit
def temper_kernel(logits_ptr, rows_ptr, temperatures_ptr, peaks_ptr, vocab, stride, CHUNK: tl.constexpr):
    """As `tempered` in run/sample.py: the largest becomes 0."""
    index = tl.program_id(0)
    row = tl.load(rows_ptr + index).to(tl.int64)
    temperature, peak = tl.load(temperatures_ptr + index), tl.load(peaks_ptr + row).to(tl.float64)
    ids = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits_ptr + row * stride + ids, mask=ids < vocab, other=0.0).to(tl.float64)
    tl.store(logits_ptr + row * stride + ids, ((x - peak) / temperature).to(tl.float32), mask=ids < vocab)


def mask_rows(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    """logits (S, V) float32, in place. rows (M,): those with a mask. words (M, V / 32): bits by token id."""
    vocab = logits.shape[1]
    if not len(rows):
        return
    mask_kernel[(len(rows), triton.cdiv(vocab, CHUNK))](
        logits, rows, words, vocab, logits.stride(0), words.shape[1], CHUNK=CHUNK, num_warps=8
    )  # fmt: skip


def edit_rows(logits: Tensor, newest: Tensor, lists: EditLists) -> None:
    """logits (S, V) float32, in place. newest: tokens that steps in flight have chosen, by place."""
    if not len(lists.places):
        return
    edit_kernel[(len(lists.places),)](
        logits, newest, lists.places, lists.penalties, lists.ids, lists.values, logits.stride(0), BLOCK=BLOCK,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def temper_rows(logits: Tensor, rows: Tensor, temperatures: Tensor) -> None:
    """logits (S, V) float32, in place: over temperatures so low that float32 cannot keep the logits apart. rows (T,):
    those with such a temperature. temperatures (T,) float64."""
    vocab = logits.shape[1]
    if not len(rows):
        return
    temper_kernel[(len(rows), triton.cdiv(vocab, CHUNK))](
        logits, rows, temperatures, logits.amax(1), vocab, logits.stride(0), CHUNK=CHUNK, num_warps=8
    )  # fmt: skip
