"""Compressed attention: what a step writes, which entries it completes, which entries each row reads. NumPy.

    raw window        key of a token (512), which is its value too        a token sees the last 128
    state             what a token leaves for the entry it belongs to     until that entry is complete
    entries           one for 4 tokens (CSA) or for 128 (HCA)             all that are complete; CSA: the best 512

A row at position t reads entries below (t + 1) // ratio. All writes of a step come before its reads. The two functions
that multiply (`EntryKernels`) are the backend's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from twostroke.ops.compressed_interface import CompressedAttention, CompressedRows, Compressor, Indexer
from twostroke.ops.interface import Batch, KVFormat, KVLayer, Norm, RopeTable
from twostroke.record import Record

Normed = Callable[[np.ndarray, Norm], np.ndarray]


class Places(NamedTuple):
    """Where one kind of entries of a step's requests lies."""

    data: np.ndarray  # (blocks, entries of a block, width), as codes of `format`
    format: KVFormat
    tables: np.ndarray  # (R, columns)

    def find(self, request: np.ndarray, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Block and place of entries by their numbers in requests."""
        size = self.data.shape[1]
        return self.tables[request, numbers // size], numbers % size

    def read(self, request: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        return decoded(self.data[self.find(request, numbers)], self.format)

    def write(self, slots: np.ndarray, values: np.ndarray) -> None:
        size = self.data.shape[1]
        self.data[slots // size, slots % size] = encoded(values, self.format)


class EntryKernels(Protocol):
    """The products of compressed attention."""

    def attend(self, q: np.ndarray, lists: Sequence[Lists], attention: CompressedAttention) -> np.ndarray:
        """q: (T, heads, dim), the entries that each row reads, kind after kind -> (T, heads, dim)."""
        ...

    def score(self, q: np.ndarray, weights: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """The indexer's scores of one row: q (heads, dim), weights (heads,), keys (n, dim) -> (n,): Σ weights · max(0,
        q · key)."""
        ...


class Lists(Record):
    """Entries of one kind that each row reads: row r those from starts[r] to starts[r + 1]."""

    places: Places
    starts: np.ndarray  # (T + 1,)
    blocks: np.ndarray
    offsets: np.ndarray  # in the blocks

    def read(self, row: int) -> np.ndarray:
        mine = slice(self.starts[row], self.starts[row + 1])
        return decoded(self.places.data[self.blocks[mine], self.offsets[mine]], self.places.format)


def attend_compressed(
    core: EntryKernels,
    norm: Normed,
    parts: CompressedRows,
    attention: CompressedAttention,
    caches: tuple[tuple[KVLayer, int], ...],
    batch: Batch,
) -> np.ndarray:
    """caches: compressed entries and states, where there is a compressor, and the raw window."""
    positions, heads, dim = batch.positions, attention.heads, attention.dim
    owner = np.repeat(np.arange(len(batch.starts) - 1), np.diff(batch.starts))  # the request of each row
    q = turned(norm(parts.q.reshape(-1, heads, dim), attention.query_norm), attention.rope, positions)
    raw = places_of(caches[-1], batch)
    keys = turned_rows(norm(parts.key, attention.key_norm), attention.rope, positions)
    raw.write(batch.groups[caches[-1][1]].slots, keys)
    made = Made(norm, attention, caches, batch, parts, owner) if attention.compressor is not None else None
    if made is not None:
        made.write()
    first = np.maximum(positions + 1 - attention.window, 0)
    lists = [listed(raw, owner, first, positions + 1 - first)]
    if made is not None:
        lists.append(made.chosen(core))
    out = core.attend(q, lists, attention)
    return turned(out, attention.rope, positions, back=True).reshape(len(q), heads * dim)


def listed(places: Places, owner: np.ndarray, first: np.ndarray, counts: np.ndarray) -> Lists:
    """For each row `counts` entries in order from number `first` on."""
    starts = np.zeros(len(owner) + 1, np.int64)
    np.cumsum(counts, out=starts[1:])
    rows = np.repeat(np.arange(len(owner)), counts)
    numbers = np.arange(len(rows)) - starts[rows] + first[rows]
    return Lists(places, starts, *places.find(owner[rows], numbers))


class Made:
    """The compressed entries of one layer: completed by this step, read by its rows."""

    def __init__(
        self,
        norm: Normed,
        attention: CompressedAttention,
        caches: tuple[tuple[KVLayer, int], ...],
        batch: Batch,
        parts: CompressedRows,
        owner: np.ndarray,
    ):
        assert attention.compressor is not None
        (entries, group), state, _ = caches
        self.norm, self.attention, self.parts, self.owner = norm, attention, parts, owner
        self.positions, self.ratio = batch.positions, attention.compressor.ratio
        self.compressor, self.indexer = attention.compressor, attention.indexer
        self.entries = places_of(caches[0], batch)
        self.keys = places_of((KVLayer(entries.format, entries.values), group), batch) if self.indexer else None
        self.slots = batch.groups[group].slots
        self.state = places_of(state, batch, "float32")
        self.state_slots = batch.groups[state[1]].slots

    def write(self) -> None:
        """What the tokens leave, then every entry that a row completes."""
        compressors = [(self.compressor, self.entries)]
        if self.indexer is not None and self.keys is not None:
            compressors.append((self.indexer.compressor, self.keys))
        assert self.parts.state is not None
        left = biased(self.parts.state, [one for one, _ in compressors], self.positions)
        self.state.write(self.state_slots, left)
        rows = np.flatnonzero((self.positions + 1) % self.ratio == 0)
        if not len(rows):
            return
        first = self.positions[rows] + 1 - self.ratio  # of the tokens of each entry
        windows, offset = self._windows(self.owner[rows], first), 0
        for compressor, places in compressors:
            mine = windows[:, :, offset : offset + 2 * compressor.width]
            offset += 2 * compressor.width
            made = self.norm(mixed(mine, compressor, first > 0), compressor.norm)
            places.write(self.slots[rows], turned_rows(made, self.attention.rope, first))

    def _windows(self, owner: np.ndarray, first: np.ndarray) -> np.ndarray:
        """The states that each entry is made of: with overlap those of the place before it too."""
        before = self.ratio if self.compressor.overlap else 0
        numbers = first[:, None] + np.arange(-before, self.ratio)
        return self.state.read(owner[:, None], np.maximum(numbers, 0))  # before the first entry: not used

    def chosen(self, core: EntryKernels) -> Lists:
        """The entries that each row reads."""
        counts = (self.positions + 1) // self.ratio
        if self.indexer is None:
            return listed(self.entries, self.owner, np.zeros_like(counts), counts)
        limit = self.indexer.chosen
        lists = listed(self.entries, self.owner, np.zeros_like(counts), np.minimum(counts, limit))
        for row in np.flatnonzero(counts > limit):
            best = self._best(core, self.indexer, int(row), int(counts[row]))
            mine = slice(lists.starts[row], lists.starts[row + 1])
            lists.blocks[mine], lists.offsets[mine] = self.entries.find(self.owner[row], best)
        return lists

    def _best(self, core: EntryKernels, indexer: Indexer, row: int, count: int) -> np.ndarray:
        """The numbers of the best entries of a row, in order; the lowest numbers among equals."""
        assert self.parts.index_q is not None and self.parts.index_weights is not None and self.keys is not None
        q = self.parts.index_q[row].reshape(1, indexer.heads, indexer.dim)
        q = turned(q, self.attention.rope, self.positions[row : row + 1])[0]
        scale = np.float32(indexer.dim**-0.5 * indexer.heads**-0.5)
        keys = self.keys.read(self.owner[row], np.arange(count))
        scores = core.score(q, self.parts.index_weights[row] * scale, keys)
        return np.sort(np.argsort(-scores, kind="stable")[: indexer.chosen])


def biased(state: np.ndarray, compressors: list[Compressor], positions: np.ndarray) -> np.ndarray:
    """What tokens leave as it is cached: the logits with the bias of their places."""
    out, offset = state.copy(), 0
    for one in compressors:
        offset += one.width
        out[:, offset : offset + one.width] += one.bias[positions % one.ratio]
        offset += one.width
    return out


def mixed(window: np.ndarray, compressor: Compressor, has_before: np.ndarray) -> np.ndarray:
    """(n, tokens, values | logits) -> (n, dim): for each dimension the mean of the values, weighted by the softmax of
    the logits over the tokens. Sums run over the tokens in order."""
    dim, width, ratio = compressor.dim, compressor.width, compressor.ratio
    values, logits = window[:, :, :width], window[:, :, width : 2 * width]
    if compressor.overlap:  # the first vector of the tokens before, the second of the entry's own
        values = np.concatenate((values[:, :ratio, :dim], values[:, ratio:, dim:]), axis=1)
        logits = np.concatenate((logits[:, :ratio, :dim], logits[:, ratio:, dim:]), axis=1)
        logits[~has_before, :ratio] = -np.inf
    wide = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    total, weighted = wide[:, 0].copy(), wide[:, 0] * values[:, 0]
    for token in range(1, wide.shape[1]):
        total += wide[:, token]
        weighted += wide[:, token] * values[:, token]
    return (weighted / total).astype(np.float32)


def turned(x: np.ndarray, rope: RopeTable, positions: np.ndarray, back: bool = False) -> np.ndarray:
    """(T, heads, dim): neighbouring dimensions at the end of each head, rotated; back: the other way round."""
    half = rope.cos.shape[1]
    cos, sin = rope.cos[positions][:, None], rope.sin[positions][:, None] * np.float32(-1 if back else 1)
    out = x.copy()
    tail, even, odd = out[..., -2 * half :], x[..., -2 * half :: 2], x[..., x.shape[-1] - 2 * half + 1 :: 2]
    tail[..., 0::2] = even * cos - odd * sin
    tail[..., 1::2] = odd * cos + even * sin
    return out


def turned_rows(x: np.ndarray, rope: RopeTable, positions: np.ndarray) -> np.ndarray:
    """(T, dim)"""
    return turned(x[:, None], rope, positions)[:, 0]


def places_of(cache: tuple[KVLayer, int], batch: Batch, kv_format: KVFormat | None = None) -> Places:
    layer, group = cache
    return Places(layer.keys[:, 0], kv_format or layer.format, batch.groups[group].tables)


def encoded(values: np.ndarray, kv_format: KVFormat) -> np.ndarray:
    """float32 as the cache stores it. bfloat16 is held as its bits."""
    if kv_format == "bfloat16":
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
        return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    return values.astype(np.float16) if kv_format == "float16" else values


def decoded(codes: np.ndarray, kv_format: KVFormat) -> np.ndarray:
    if kv_format == "bfloat16":
        return (codes.astype(np.uint32) << 16).view(np.float32)
    return codes.astype(np.float32)
