"""A generative architecture as an embedder (Qwen3-Embedding): the final norm of a text's last token is its vector.

The engine's own `Transformer` reads the texts in steps of CHUNK tokens. A step holds several texts, or a part of a long
one; the KV cache keeps what the texts under way have computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from twostroke.embed.description import Description
from twostroke.embed.encoder import unit
from twostroke.embed.texts import Tokens
from twostroke.kv.layout import KVGroup, make_layout
from twostroke.kv.storage import KVStorage
from twostroke.ops.cpu.backend import NativeCpuOps
from twostroke.ops.interface import Batch, GroupBlocks, KVFormat
from twostroke.weights.checkpoint import Checkpoint
from twostroke.weights.load import load_model

KV_FORMAT: KVFormat = "float32"
CHUNK = 512  # tokens of a step
TOGETHER = 32  # texts that are in the cache at a time
BUDGET = 4096  # tokens that are in the cache at a time, if no text is longer


class TextPart(NamedTuple):
    """Tokens of one text in one step."""

    text: int
    start: int
    end: int


class DecoderModel:
    def __init__(self, checkpoint: Checkpoint, description: Description, threads: int, max_tokens: int):
        self.description, self.max_tokens = description, max_tokens
        self.ops = NativeCpuOps(threads)
        self.model = load_model(checkpoint, self.ops, max_tokens)
        self.layout = make_layout(self.model.arch, KV_FORMAT)
        self.width = self.model.arch.hidden
        self.budget = max(BUDGET, max_tokens)
        spans = [group.span for group in self.layout.groups]
        self._kv = KVStorage(self.layout, sum(self.budget // span + TOGETHER for span in spans), KV_FORMAT, None)

    def run(self, texts: Sequence[Tokens]) -> np.ndarray:
        """(texts, width) float32."""
        vectors: list[np.ndarray] = []
        for together in cut([text.ids for text in texts], self.budget):
            vectors += self._vectors(together)
        return np.stack(vectors)

    def _vectors(self, texts: Sequence[Sequence[int]]) -> list[np.ndarray]:
        lengths = [len(text) for text in texts]
        tables = [self._tables(lengths, group.span, first) for group, first in self._first_blocks(lengths)]
        found: dict[int, np.ndarray] = {}
        for parts in steps(lengths):
            ended = [i for i, part in enumerate(parts) if part.end == lengths[part.text]]
            hidden = self.model.forward(self._batch(texts, parts, ended, tables), self._kv)
            if ended:
                normed = self.ops.norm(hidden, self.model.final_norm)
                found |= {parts[i].text: row for i, row in zip(ended, normed, strict=True)}
        rows = [found[i] for i in range(len(texts))]
        return [unit(row) if self.description.normalize else row for row in rows]

    def _first_blocks(self, lengths: Sequence[int]) -> Iterator[tuple[KVGroup, int]]:
        """Each group of layers, and the first of its blocks."""
        first = 0
        for group in self.layout.groups:
            yield group, first
            first += sum(-(-length // group.span) for length in lengths)

    def _tables(self, lengths: Sequence[int], span: int, first: int) -> np.ndarray:
        """(texts, columns): the blocks of each text in a row, one text after the other."""
        counts = [-(-length // span) for length in lengths]
        table = np.full((len(lengths), max(counts)), first, np.int32)
        for row, count in zip(table, counts, strict=True):
            row[:count] = np.arange(first, first + count)
            first += count
        return table

    def _batch(
        self, texts: Sequence[Sequence[int]], parts: Sequence[TextPart], ended: Sequence[int], tables: list[np.ndarray]
    ) -> Batch:
        counts = np.array([part.end - part.start for part in parts])
        starts = np.zeros(len(parts) + 1, np.int32)
        np.cumsum(counts, out=starts[1:])
        positions = np.concatenate([np.arange(part.start, part.end, dtype=np.int64) for part in parts])
        owner = np.repeat(np.arange(len(parts)), counts)
        groups = []
        for group, every in zip(self.layout.groups, tables, strict=True):
            table = every[[part.text for part in parts]]
            places, offsets = np.divmod(positions, group.span)
            slots = table[owner, places] * np.int64(group.span // group.entry.tokens) + offsets // group.entry.tokens
            groups.append(GroupBlocks(slots, table))
        return Batch(
            tokens=np.array([token for part in parts for token in texts[part.text][part.start : part.end]], np.int64),
            positions=positions,
            starts=starts,
            contexts=np.array([part.end for part in parts], np.int32),
            groups=tuple(groups),
            logit_rows=np.array([int(starts[i + 1]) - 1 for i in ended], np.int64),
        )


def cut(texts: Sequence[Sequence[int]], budget: int) -> Iterator[list[Sequence[int]]]:
    """Runs of texts with at most TOGETHER of them and `budget` tokens."""
    together: list[Sequence[int]] = []
    tokens = 0
    for text in texts:
        if together and (len(together) == TOGETHER or tokens + len(text) > budget):
            yield together
            together, tokens = [], 0
        together.append(text)
        tokens += len(text)
    if together:
        yield together


def steps(lengths: Sequence[int]) -> Iterator[list[TextPart]]:
    """The texts in order, CHUNK tokens at a time."""
    parts: list[TextPart] = []
    room = CHUNK
    for text, length in enumerate(lengths):
        start = 0
        while start < length:
            end = min(length, start + room)
            parts.append(TextPart(text, start, end))
            room -= end - start
            start = end
            if not room:
                yield parts
                parts, room = [], CHUNK
    if parts:
        yield parts
