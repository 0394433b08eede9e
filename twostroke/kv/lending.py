"""Blocks of requests with `lend`, for another engine: what is computed of a prompt that still runs, and what a request
that has ended leaves, held until that engine has fetched it. And blocks that are read from another engine. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from twostroke.kv.addresses import Name
from twostroke.ops.interface import BLOCK
from twostroke.types import FinishReason, Request, RequestState

if TYPE_CHECKING:
    from twostroke.kv.tables import KVTables


def copied_out(request: Request) -> bool:
    """Whether the engine copies its blocks out as they are computed. Samples of one prompt share them: the first one's
    are copied."""
    return request.lend >= 0 and not request.sample


class LentBlocks:
    def __init__(self, tables: KVTables):
        self.tables = tables
        # Of the request that left them, the oldest first; below zero: of prompts that run or are cached.
        self.by_id: dict[int, list[tuple[Name, int]]] = {}
        self.reading: dict[int, Sequence[int]] = {}  # blocks that are read from other engines, by read

    def lend(self, request: RequestState, promised: Mapping[int, Sequence[int]]) -> None:
        """Hold the blocks of a request that ends, under its id, until `take_back`: those that a continuation on another
        engine needs, the last one too, which is full in part. promised: blocks that have a name, and whose content a
        step in flight computes, by plan.
        A request that was aborted or failed leaves none."""
        tables = self.tables
        if tables.layout.state_bytes or request.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
            return  # a layer with a state needs it too, and blocks do not hold it
        computed = len(request.tokens) - 1
        lent = self._full(request, 0, computed // tables.unit * tables.unit, promised) + tables.cut(request, computed)
        if lent:
            self.keep(request.id, lent)

    def keep(self, number: int, blocks: list[tuple[Name, int]]) -> None:
        """Hold these blocks until `take_back`."""
        for _, block in blocks:
            self.tables.pool.hold(block)
        self.by_id[number] = blocks

    def computed(
        self, request: RequestState, first: int, promised: Mapping[int, Sequence[int]]
    ) -> tuple[int, list[tuple[Name, int]]]:
        """The full blocks of a running request from token `first` on, and the token at which they end. No
        blocks yet where a step in flight computes one of them, and none at all with windows: what is seen at the end of
        the prompt is not known before."""
        tables = self.tables
        length = request.computed // tables.unit * tables.unit
        if length <= first or tables.windowed or tables.layout.state_bytes:
            return first, []
        blocks = self._full(request, first, length, promised)
        whole = sum(length // span - first // span for span in tables.spans)
        return (length, blocks) if len(blocks) == whole else (first, [])

    def _full(
        self, request: RequestState, first: int, length: int, promised: Mapping[int, Sequence[int]]
    ) -> list[tuple[Name, int]]:
        """The blocks between two tokens that a token at `length` sees and that are there."""
        tables, pool = self.tables, self.tables.pool
        unready = {block for blocks in promised.values() for block in blocks}
        tables.hasher.extend(request.hashes, request.tokens, request.salt, length // BLOCK)
        full: list[tuple[Name, int]] = []
        for group, span in enumerate(tables.spans):
            for column in range(max(first // span, tables.first_visible(group, length)), length // span):
                name, block = tables.name(request, group, column), tables.held[request.row][group][column]
                if block < 0:  # behind the window by now, and perhaps still cached
                    found = pool.find(name, tables.tokens(request, group, column))
                    block = block if found is None else found
                if block >= 0 and block not in unready:
                    full.append((name, block))
        return full

    def hold_for_read(self, number: int, blocks: Sequence[int]) -> None:
        """Hold blocks until `release_read`: no other request gets blocks that a read may still write."""
        for block in blocks:
            self.tables.pool.hold(block)
        self.reading[number] = blocks

    def release_read(self, number: int) -> None:
        for block in self.reading.pop(number, ()):
            self.tables.pool.release(block)

    def take_back(self, number: int) -> None:
        """What this request has left is held no longer."""
        for _, block in reversed(self.by_id.pop(number, [])):
            self.tables.pool.release(block)

    def take_back_oldest(self) -> bool:
        """Take back the blocks that were lent first, for a request that cannot run otherwise. The engine that wanted
        them computes them itself. False: none are lent."""
        if not self.by_id:
            return False
        self.take_back(next(iter(self.by_id)))
        return True

    def blocks(self) -> Iterator[int]:
        """The held blocks, each as often as it is held here."""
        yield from (block for lent in self.by_id.values() for _, block in lent)
        yield from (block for blocks in self.reading.values() for block in blocks)
