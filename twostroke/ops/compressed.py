"""Compressed attention: what a step writes, which entries it completes, which entries each row reads. NumPy.

    raw window        key of a token (512), which is its value too        a token sees the last 128
    state             what a token leaves for the entry it belongs to     until that entry is complete
    entries           one for 4 tokens (CSA) or for 128 (HCA)             all that are complete; CSA: the best 512

A row at position t reads entries below (t + 1) // ratio. All writes of a step come before its reads. The two functions
that multiply (`Core`) are the backend's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from twostroke.ops.compressed_interface import CompressedAttention, CompressedRows, Compressor, Indexer
from twostroke.ops.interface import Batch, KVFormat, KVLayer, Norm, RopeTable

Normed = Callable[[np.ndarray, Norm], np.ndarray]


class Places(NamedTuple):
    """Where one kind of entries of a step's requests lies."""

    data: np.ndarray  # (blocks, entries of a block, width), as codes of `format`
    format: KVFormat
    tables: np.ndarray  # (R, columns)
    entries: int  # of a block
    tokens: int  # of an entry

    def rows(self, request: int, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Block and place of entries by their numbers in a request."""
        return self.tables[request, numbers // self.entries], numbers % self.entries

    def read(self, request: int, numbers: np.ndarray) -> np.ndarray:
        return decoded(self.data[self.rows(request, numbers)], self.format)

    def write(self, slots: np.ndarray, values: np.ndarray) -> None:
        self.data[slots // self.entries, slots % self.entries] = encoded(values, self.format)


class Core(Protocol):
    """The products of compressed attention."""

    def attend(self, q: np.ndarray, reads: list[Reads], attention: CompressedAttention) -> np.ndarray:
        """q: (T, heads, dim), one list of entries for each row -> (T, heads, dim)."""
        ...

    def score(self, q: np.ndarray, weights: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """Of one row: q (heads, dim), weights (heads,), keys (n, dim) -> (n,): Σ weights · max(0, q · key)."""
        ...


@dataclass(frozen=True, slots=True)
class Reads:
    """What one row attends over: entries of the window, then compressed ones."""

    parts: tuple[tuple[Places, np.ndarray, np.ndarray], ...]  # where, blocks, places in them


def attend_compressed(
    core: Core,
    norm: Normed,
    parts: CompressedRows,
    attention: CompressedAttention,
    caches: tuple[tuple[KVLayer, int], ...],
    batch: Batch,
) -> np.ndarray:
    """caches: entries (None where there is no compressor: the raw window alone), state, raw window."""
    positions, heads, dim = batch.positions, attention.heads, attention.dim
    q = turned(norm(parts.q.reshape(-1, heads, dim), attention.query_norm), attention.rope, positions)
    raw = places_of(caches[-1], batch, 1)
    raw.write(
        batch.groups[caches[-1][1]].slots, turned_rows(norm(parts.key, attention.key_norm), attention.rope, positions)
    )
    made = Made(norm, attention, caches, batch, parts) if attention.compressor is not None else None
    if made is not None:
        made.write()
    reads = []
    for request, row in rows_of(batch):
        position = int(positions[row])
        seen = np.arange(max(0, position - attention.window + 1), position + 1)
        found = [(raw, *raw.rows(request, seen))]
        if made is not None and (chosen := made.chosen(core, request, row, position)) is not None:
            found.append((made.entries, *made.entries.rows(request, chosen)))
        reads.append(Reads(tuple(found)))
    out = core.attend(q, reads, attention)
    return turned(out, attention.rope, positions, back=True).reshape(len(q), heads * dim)


def rows_of(batch: Batch) -> list[tuple[int, int]]:
    """(request, row) of every row, in order."""
    starts = [int(start) for start in batch.starts]
    return [(request, row) for request in range(len(starts) - 1) for row in range(starts[request], starts[request + 1])]


class Made:
    """The compressed entries of one layer: completed by this step, read by its rows."""

    def __init__(
        self,
        norm: Normed,
        attention: CompressedAttention,
        caches: tuple[tuple[KVLayer, int], ...],
        batch: Batch,
        parts: CompressedRows,
    ):
        assert attention.compressor is not None
        (entries, group), state, _ = caches
        self.norm, self.attention, self.batch, self.parts = norm, attention, batch, parts
        self.ratio = attention.compressor.ratio
        self.entries = places_of(caches[0], batch, self.ratio)
        self.keys = (
            places_of((KVLayer(entries.format, entries.values), group), batch, self.ratio)
            if attention.indexer
            else None
        )
        self.slots = batch.groups[group].slots
        self.state = places_of(state, batch, 1, "float32")
        self.state_slots = batch.groups[state[1]].slots

    def write(self) -> None:
        """What the tokens leave, then every entry that a row completes."""
        compressors: list[tuple[Compressor, Places]] = []
        assert self.attention.compressor is not None and self.parts.state is not None
        compressors.append((self.attention.compressor, self.entries))
        if self.attention.indexer is not None and self.keys is not None:
            compressors.append((self.attention.indexer.compressor, self.keys))
        self.state.write(
            self.state_slots, biased(self.parts.state, [one for one, _ in compressors], self.batch.positions)
        )
        closing = [
            (request, row) for request, row in rows_of(self.batch) if (self.batch.positions[row] + 1) % self.ratio == 0
        ]
        if not closing:
            return
        rows = np.array([row for _, row in closing])
        first = self.batch.positions[rows] + 1 - self.ratio  # of the tokens of each entry
        windows = np.stack(
            [self._window(request, int(start)) for (request, _), start in zip(closing, first, strict=True)]
        )
        offset = 0
        for compressor, places in compressors:
            mine = windows[:, :, offset : offset + 2 * compressor.width]
            offset += 2 * compressor.width
            made = self.norm(mixed(mine, compressor, first > 0), compressor.norm)
            places.write(self.slots[rows], turned_rows(made, self.attention.rope, first))

    def _window(self, request: int, start: int) -> np.ndarray:
        """The states of the tokens that an entry is made of: with overlap those of the entry before it too."""
        assert self.attention.compressor is not None
        before = self.ratio if self.attention.compressor.overlap else 0
        numbers = np.maximum(np.arange(start - before, start + self.ratio), 0)  # before the first entry: not used
        return self.state.read(request, numbers)

    def chosen(self, core: Core, request: int, row: int, position: int) -> np.ndarray | None:
        """The numbers of the entries that a row reads."""
        count = (position + 1) // self.ratio
        if count == 0:
            return None
        indexer = self.attention.indexer
        if indexer is None or count <= indexer.chosen:
            return np.arange(count)
        assert self.parts.index_q is not None and self.parts.index_weights is not None and self.keys is not None
        q = self.parts.index_q[row].reshape(1, indexer.heads, indexer.dim)
        q = turned(q, self.attention.rope, self.batch.positions[row : row + 1])[0]
        scale = np.float32(indexer.dim**-0.5 * indexer.heads**-0.5)
        scores = core.score(q, self.parts.index_weights[row] * scale, self.keys.read(request, np.arange(count)))
        return selected(indexer, scores)


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


def places_of(cache: tuple[KVLayer, int], batch: Batch, tokens: int, kv_format: KVFormat | None = None) -> Places:
    layer, group = cache
    data = layer.keys[:, 0]
    return Places(data, kv_format or layer.format, batch.groups[group].tables, data.shape[1], tokens)


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


def selected(indexer: Indexer, scores: np.ndarray) -> np.ndarray:
    """The numbers of the best entries, in order; the lowest numbers among equals."""
    return np.sort(np.argsort(-scores, kind="stable")[: indexer.chosen])
