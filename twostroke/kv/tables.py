"""Block tables: which blocks hold a running request's tokens, one table for each KV group. Torch-free.

All tables of a request have the same number of columns; column c stands for positions [c·BLOCK, (c+1)·BLOCK). A group
with a window gives columns back once no future token can see them: the column stays and holds RELEASED.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from twostroke.kv.blocks import BlockPool
from twostroke.kv.hashing import BlockHasher, Name
from twostroke.kv.layout import KVLayout, group_blocks
from twostroke.ops.interface import BLOCK
from twostroke.types import RequestState

RELEASED = -1
ON_HOST = -2
STRIDE = 32  # columns whose names are made at a time


class Hit(NamedTuple):
    """Cached blocks a request can start from: blocks[group][column], RELEASED where the window needs none, ON_HOST
    where a block must be copied back."""

    columns: int
    blocks: tuple[tuple[int, ...], ...]


NO_HIT = Hit(0, ())


class KVTables:
    def __init__(self, layout: KVLayout, pool: BlockPool, hasher: BlockHasher, rows: int, max_length: int):
        self.layout = layout
        self.pool = pool
        self.hasher = hasher
        self.windows = [group.window for group in layout.groups]
        self.windowed = any(window is not None for window in self.windows)
        self.free_rows = list(range(rows - 1, -1, -1))
        self.held: list[list[list[int]]] = [[[] for _ in layout.groups] for _ in range(rows)]  # [row][group][column]
        self.released = [[0] * len(layout.groups) for _ in range(rows)]  # leading columns given back
        self.named = [0] * rows  # leading columns whose names were offered to the pool
        # The same tables for the runner. Unused and released entries hold block 0: a valid id that nobody reads.
        self.array = np.zeros((len(layout.groups), rows, -(-max_length // BLOCK)), dtype=np.int32)

    # ---- a request comes and goes ----------------------------------------------------------------------------------

    def match(self, request: RequestState) -> Hit:
        """The longest cached prefix, in whole blocks, that leaves at least the newest token to compute."""
        if request.params.prompt_logprobs is not None and request.output_length == 0 and request.sample == 0:
            return NO_HIT  # the logits of every prompt token are wanted
        limit = (len(request.tokens) - 1) // BLOCK
        if self.windows == [None]:
            return self._match_whole(request, limit)
        found: list[list[int]] = [[] for _ in self.windows]
        for column in range(limit):
            self.hasher.extend(request.hashes, request.tokens, request.salt, column + 1)
            tokens = tuple(request.tokens[column * BLOCK : (column + 1) * BLOCK])
            blocks = [self._find(Name(g, request.hashes[column]), tokens) for g in range(len(self.windows))]
            if any(block is None and window is None for block, window in zip(blocks, self.windows, strict=True)):
                break  # a layer that sees everything misses this block; a window may yet skip over one
            for group, block in zip(found, blocks, strict=True):
                group.append(RELEASED if block is None else block)
        return self._longest_usable(found)

    def _match_whole(self, request: RequestState, limit: int) -> Hit:
        """The same where every layer sees everything: the first miss is the end."""
        hashes, tokens, find = request.hashes, request.tokens, self._find
        blocks: list[int] = []
        for column in range(limit):
            if column == len(hashes):
                self.hasher.extend(hashes, tokens, request.salt, min(limit, column + STRIDE))
            block = find(Name(0, hashes[column]), tuple(tokens[column * BLOCK : (column + 1) * BLOCK]))
            if block is None:
                break
            blocks.append(block)
        return Hit(len(blocks), (tuple(blocks),)) if blocks else NO_HIT

    def _find(self, name: Name, tokens: tuple[int, ...]) -> int | None:
        block, host = self.pool.find(name, tokens), self.pool.host
        return ON_HOST if block is None and host is not None and host.has(name, tokens) else block

    def _longest_usable(self, found: list[list[int]]) -> Hit:
        """Shorten until every window finds all the columns that the next token can see."""
        runs = [_run_lengths(group) for group in found]
        for columns in range(len(found[0]), 0, -1):
            needs = [columns - self._first_visible(window, columns * BLOCK) for window in self.windows]
            if all(run[columns - 1] >= need for run, need in zip(runs, needs, strict=True)):
                kept = []
                for group, need in zip(found, needs, strict=True):
                    kept.append(tuple([RELEASED] * (columns - need) + group[columns - need : columns]))
                return Hit(columns, tuple(kept))
        return NO_HIT

    def blocks_needed(self, request: RequestState, hit: Hit, step: int) -> int:
        """Blocks the pool must still give for the whole of `request.tokens`, computing `step` tokens at a time."""
        needed = 0
        for group, window in enumerate(self.windows):
            blocks = hit.blocks[group] if hit.columns else ()
            held = sum(block >= 0 for block in blocks)
            cold = sum(self.pool.references[block] == 0 for block in blocks if block >= 0)
            whole = group_blocks(window, len(request.tokens), step)
            needed += max(blocks.count(ON_HOST), whole - held) + cold  # a cached block that is held is unavailable too
        return needed

    def open(self, request: RequestState, hit: Hit) -> None:
        """Give the request a row and the blocks of its hit: those on the device first, lest room for the others be
        made by evicting them."""
        row = request.row = self.free_rows.pop()
        request.computed = hit.columns * BLOCK
        self.named[row] = hit.columns
        for group, blocks in enumerate(hit.blocks):
            for block in blocks:
                if block >= 0:
                    self.pool.hold(block)
            self.held[row][group] = list(blocks)
            self.released[row][group] = sum(block == RELEASED for block in blocks)
        self._bring_back(request)
        for group, held in enumerate(self.held[row]):
            self.array[group, row, : len(held)] = np.maximum(held, 0)

    def _bring_back(self, request: RequestState) -> None:
        """Blocks for the columns whose bytes are on the host, to be copied before the step that is being planned."""
        groups, host = self.held[request.row], self.pool.host
        places = [(g, c) for g, blocks in enumerate(groups) for c, block in enumerate(blocks) if block == ON_HOST]
        if host is None or not places:
            return
        names = [Name(group, request.hashes[column]) for group, column in places]
        for (group, column), name, slot in zip(places, names, host.claim(names), strict=True):
            block = groups[group][column] = self.pool.take()
            host.bring_back(slot, block)
            self.pool.publish(block, name, tuple(request.tokens[column * BLOCK : (column + 1) * BLOCK]))

    def close(self, request: RequestState) -> None:
        """Let go of everything. The tail goes first, so that it is evicted before the prefix others may share."""
        row = request.row
        for group, blocks in enumerate(self.held[row]):
            for block in reversed(blocks):
                if block != RELEASED:
                    self.pool.release(block)
            self.held[row][group] = []
            self.released[row][group] = 0
        self.array[:, row] = 0
        self.free_rows.append(row)
        request.row = -1

    # ---- a request moves on ----------------------------------------------------------------------------------------

    def room(self, request: RequestState) -> int:
        """Tokens the request's columns can hold."""
        return len(self.held[request.row][0]) * BLOCK

    def missing(self, request: RequestState, length: int) -> int:
        """Blocks the pool must give before the request can hold `length` tokens."""
        columns = -(-length // BLOCK) - len(self.held[request.row][0])
        return max(0, columns) * len(self.windows)

    def grow(self, request: RequestState, length: int) -> bool:
        """Make room for `length` tokens, or change nothing and say False."""
        row = request.row
        have, want = len(self.held[row][0]), -(-length // BLOCK)
        if (want - have) * len(self.windows) > self.pool.available:
            return False
        for group, blocks in enumerate(self.held[row]):
            for column in range(have, want):
                block = self.pool.take()
                blocks.append(block)
                self.array[group, row, column] = block
        return True

    def publish(self, request: RequestState, length: int) -> list[int]:
        """Name the full blocks within the first `length` tokens. Returns those now findable under a new name."""
        row = request.row
        columns = min(length, len(request.tokens)) // BLOCK
        first = self.named[row]
        if columns <= first:
            return []
        self.hasher.extend(request.hashes, request.tokens, request.salt, columns)
        published = []
        for column in range(first, columns):
            tokens = tuple(request.tokens[column * BLOCK : (column + 1) * BLOCK])
            for group, blocks in enumerate(self.held[row]):
                block = blocks[column]
                if block != RELEASED and self.pool.publish(block, Name(group, request.hashes[column]), tokens):
                    published.append(block)
        self.named[row] = columns
        return published

    def holds_any(self, request: RequestState, wanted: set[int]) -> bool:
        return any(not wanted.isdisjoint(blocks) for blocks in self.held[request.row])

    def release_behind(self, request: RequestState) -> None:
        """Give back the blocks that fell out of every window. Counted from what was collected: steps still in flight
        read their own windows."""
        if not self.windowed:
            return
        row = request.row
        for group, window in enumerate(self.windows):
            if window is None:
                continue
            blocks = self.held[row][group]
            last = min(self._first_visible(window, request.computed), len(blocks))
            for column in range(self.released[row][group], last):
                self.pool.release(blocks[column])
                blocks[column] = RELEASED
                self.array[group, row, column] = 0
            self.released[row][group] = max(self.released[row][group], last)

    @staticmethod
    def _first_visible(window: int | None, position: int) -> int:
        """First column that a token at `position` or later can see."""
        return 0 if window is None else max(0, position - window + 1) // BLOCK

    def check(self) -> None:
        """Invariant: a block's references equal the tables that hold it, and the runner's copy agrees."""
        counts = [0] * self.pool.total
        for row, groups in enumerate(self.held):
            assert len({len(blocks) for blocks in groups}) == 1, "tables of one request differ in length"
            for group, blocks in enumerate(groups):
                for column, block in enumerate(blocks):
                    if block != RELEASED:
                        counts[block] += 1
                    assert self.array[group, row, column] == max(block, 0), "the runner's table disagrees"
        assert counts == self.pool.references, "references do not equal the tables that hold the blocks"
        self.pool.check()


def _run_lengths(blocks: list[int]) -> list[int]:
    """For each column, how many consecutive columns ending there are present."""
    runs, run = [], 0
    for block in blocks:
        run = 0 if block == RELEASED else run + 1
        runs.append(run)
    return runs
