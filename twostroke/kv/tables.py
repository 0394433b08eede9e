"""Block tables: which blocks hold a running request's tokens, one table for each KV group. Torch-free.

Column c of a group's table stands for positions [c·span, (c+1)·span); the span is BLOCK, or more where one cache entry
stands for more tokens. A group with a window gives columns back once no future token can see them: the column stays and
holds RELEASED. Names are made for every BLOCK tokens; a group with a longer span uses those at the ends of its blocks.
"""

from __future__ import annotations

from math import lcm
from typing import NamedTuple

import numpy as np

from twostroke.kv.addresses import BlockHasher, Name
from twostroke.kv.blocks import BlockPool
from twostroke.kv.layout import KVLayout
from twostroke.kv.lending import LentBlocks
from twostroke.ops.interface import BLOCK
from twostroke.types import RequestState

RELEASED = -1
ON_HOST = -2
STRIDE = 32  # columns whose names are made at a time


class Hit(NamedTuple):
    """Cached blocks a request can start from: blocks[group][column], RELEASED where the window needs none, ON_HOST
    where a block must be copied back."""

    columns: int  # of BLOCK tokens
    blocks: tuple[tuple[int, ...], ...]


NO_HIT = Hit(0, ())


class KVTables:
    def __init__(self, layout: KVLayout, pool: BlockPool, hasher: BlockHasher, rows: int, max_length: int):
        self.layout = layout
        self.pool = pool
        self.hasher = hasher
        self.windows = [group.window for group in layout.groups]
        self.drafting = layout.draft_groups
        self.windowed = any(window is not None for window in self.windows)
        self.spans = [group.span for group in layout.groups]  # tokens of a column
        self.unit = lcm(*self.spans)  # tokens after which every group's block is full
        self.whole = self.unit // BLOCK
        # Whether a block that is full in part can be used: no entry of it stands for several tokens.
        self.divisible = all(group.entry.tokens == 1 for group in layout.groups)
        self.simple = self.windows == [None] and self.spans == [BLOCK]
        self.free_rows = list(range(rows - 1, -1, -1))
        self.held: list[list[list[int]]] = [[[] for _ in layout.groups] for _ in range(rows)]  # [row][group][column]
        self.released = [[0] * len(layout.groups) for _ in range(rows)]  # leading columns given back
        self.named = [0] * rows  # leading columns whose names were offered to the pool
        self.lent = LentBlocks(self)  # of requests that have ended, for other engines
        # The same tables for the runner. Unused and released entries hold block 0, a valid id that is not read.
        self.array = np.zeros((len(layout.groups), rows, -(-max_length // BLOCK)), dtype=np.int32)

    # ---- open and close --------------------------------------------------------------------------------------------

    def match(self, request: RequestState) -> Hit:
        """The longest cached prefix, in whole blocks, that leaves at least the newest token to compute."""
        if request.scores_prompt:
            return NO_HIT  # the logits of every prompt token are wanted
        if self.layout.state_bytes:
            return NO_HIT  # such a layer also needs its state, which blocks do not hold
        limit = (len(request.tokens) - 1) // BLOCK
        if self.simple:
            return self._match_whole(request, limit)
        found: list[list[int]] = [[] for _ in self.windows]
        for column in range(limit):
            self.hasher.extend(request.hashes, request.tokens, request.salt, column + 1)
            if not self._match_column(request, column, found):
                return self._longest_usable(found, column)
        return self._longest_usable(found, limit)

    def _match_column(self, request: RequestState, column: int, found: list[list[int]]) -> bool:
        """Look up the blocks that end with this column. False: a block of a group without a window is missing. A group
        with a window may not need the block that is missing."""
        for group, end in self.ends(column):
            block = self._find(Name(group, request.hashes[column]), self.tokens(request, group, end))
            if block is None and self.windows[group] is None:
                return False
            found[group].append(RELEASED if block is None else block)
        return True

    def ends(self, column: int) -> list[tuple[int, int]]:
        """Groups with a block that ends with this column of BLOCK tokens, and which of their columns it is."""
        end = (column + 1) * BLOCK
        return [(group, end // span - 1) for group, span in enumerate(self.spans) if end % span == 0]

    def tokens(self, request: RequestState, group: int, column: int) -> tuple[int, ...]:
        """The tokens of a column of a group."""
        span = self.spans[group]
        return tuple(request.tokens[column * span : (column + 1) * span])

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

    def _longest_usable(self, found: list[list[int]], columns: int) -> Hit:
        """Shorten until every window finds all the columns that the next token can see."""
        runs = [_run_lengths(group) for group in found]
        for usable in range(columns // self.whole * self.whole, 0, -self.whole):
            have = [usable * BLOCK // span for span in self.spans]  # columns of each group
            first = [self.first_visible(group, usable * BLOCK) for group in range(len(have))]
            if all(run[h - 1] >= h - f for run, h, f in zip(runs, have, first, strict=True)):
                kept = [tuple([RELEASED] * f + blocks[f:h]) for blocks, h, f in zip(found, have, first, strict=True)]
                return Hit(usable, tuple(kept))
        return NO_HIT

    def blocks_needed(self, request: RequestState, hit: Hit, step: int) -> int:
        """Blocks the pool must still give for the whole of `request.tokens`, computing `step` tokens at a time."""
        needed = 0
        for index, group in enumerate(self.layout.groups):
            blocks = hit.blocks[index] if hit.columns else ()
            held = sum(block >= 0 for block in blocks)
            cold = sum(self.pool.references[block] == 0 for block in blocks if block >= 0)
            whole = group.blocks(len(request.tokens), step)
            needed += max(blocks.count(ON_HOST), whole - held) + cold  # a cached block that is held is unavailable too
        return needed

    def open(self, request: RequestState, hit: Hit) -> None:
        """Give the request a row and the blocks of its hit. Blocks on the device are held first, so that making room
        for the others does not evict them."""
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
        self.count_filled(request)

    def count_filled(self, request: RequestState) -> None:
        """How much of what the request starts from the draft model has computed."""
        request.drafted = 0
        if not self.drafting:
            return
        for blocks in zip(*(self.held[request.row][group] for group in self.drafting), strict=True):
            if request.drafted >= request.computed or not self.pool.filled.issuperset(blocks):
                break
            request.drafted += BLOCK

    def fill(self, request: RequestState, start: int, end: int) -> list[int]:
        """The draft model has computed these positions, or a plan promises it. Returns the blocks that are newly whole.
        What came before `start` must have been filled."""
        blocks = [
            self.held[request.row][group][column]
            for group in self.drafting
            for column in range(start // BLOCK, end // BLOCK)
        ]
        fresh = [block for block in blocks if block not in self.pool.filled]
        self.pool.filled.update(fresh)
        return fresh

    def _bring_back(self, request: RequestState) -> None:
        """Blocks for the columns whose bytes are on the host, to be copied before the step that is being planned."""
        groups, host = self.held[request.row], self.pool.host
        places = [(g, c) for g, blocks in enumerate(groups) for c, block in enumerate(blocks) if block == ON_HOST]
        if host is None or not places:
            return
        names = [self.name(request, group, column) for group, column in places]
        for (group, column), name, slot in zip(places, names, host.claim(names), strict=True):
            block = groups[group][column] = self.pool.take()
            host.bring_back(slot, block)
            if slot in host.filled:
                self.pool.filled.add(block)
            self.pool.publish(block, name, self.tokens(request, group, column))

    def name(self, request: RequestState, group: int, column: int) -> Name:
        """The name of a column of a group: the hash at its end."""
        return Name(group, request.hashes[(column + 1) * self.spans[group] // BLOCK - 1])

    def close(self, request: RequestState) -> None:
        """Release all its blocks, the last ones first: they are evicted before the prefix that others may share. Of
        several groups the blocks of one place go together: a hit needs them all."""
        row, held = request.row, self.held[request.row]
        if len(held) == 1:
            ordered = held[0][::-1]
        else:
            ends = [
                (-(column + 1) * self.spans[g], b) for g, blocks in enumerate(held) for column, b in enumerate(blocks)
            ]
            ordered = [block for _, block in sorted(ends)]
        for block in ordered:
            if block != RELEASED:
                self.pool.release(block)
        for group in range(len(held)):
            held[group] = []
            self.released[row][group] = 0
        self.array[:, row] = 0
        self.free_rows.append(row)
        request.row = -1

    # ---- grow, publish, release ------------------------------------------------------------------------------------

    def room(self, request: RequestState) -> int:
        """Tokens the request's columns can hold."""
        return min(len(blocks) * span for blocks, span in zip(self.held[request.row], self.spans, strict=True))

    def missing(self, request: RequestState, length: int) -> int:
        """Blocks the pool must give before the request can hold `length` tokens."""
        held = self.held[request.row]
        return sum(max(0, -(-length // span) - len(held[group])) for group, span in enumerate(self.spans))

    def grow(self, request: RequestState, length: int) -> bool:
        """Make room for `length` tokens. False: there is none, and nothing was changed."""
        row = request.row
        if self.missing(request, length) > self.pool.available:
            return False
        for group, blocks in enumerate(self.held[row]):
            first, last = len(blocks), -(-length // self.spans[group])
            if last > first:
                blocks += [self.pool.take() for _ in range(first, last)]
                self.array[group, row, first:last] = blocks[first:]
        return True

    def shorten(self, request: RequestState, length: int) -> None:
        """Give back the columns after `length` tokens. They have no names yet."""
        row = request.row
        for group, blocks in enumerate(self.held[row]):
            needed = -(-length // self.spans[group])
            if len(blocks) > needed:
                self.array[group, row, needed : len(blocks)] = 0
                while len(blocks) > needed:
                    self.pool.release(blocks.pop())

    def publish(self, request: RequestState, length: int) -> list[int]:
        """Name the full blocks within the first `length` tokens. Returns those now findable under a new name."""
        row = request.row
        columns = min(length, len(request.tokens)) // BLOCK
        first = self.named[row]
        if columns <= first:
            return []
        self.hasher.extend(request.hashes, request.tokens, request.salt, columns)
        published: list[int] = []
        for group, (blocks, span) in enumerate(zip(self.held[row], self.spans, strict=True)):
            step, hashes, tokens, publish = span // BLOCK, request.hashes, request.tokens, self.pool.publish
            for column in range(first // step, columns // step):
                block = blocks[column]
                if block == RELEASED:
                    continue
                name = Name(group, hashes[(column + 1) * step - 1])
                if publish(block, name, tuple(tokens[column * span : (column + 1) * span])):
                    published.append(block)
        self.named[row] = columns
        return published

    def unfilled(self, request: RequestState, length: int) -> list[tuple[Name, int]]:
        """The request's blocks from what is computed up to `length`, with the names that they will have: those that a
        token at `length` sees."""
        self.hasher.extend(request.hashes, request.tokens, request.salt, length // BLOCK)
        return [
            (self.name(request, group, column), self.held[request.row][group][column])
            for group, span in enumerate(self.spans)
            for column in range(max(request.computed // span, self.first_visible(group, length)), length // span)
        ]

    def cut(self, request: RequestState, length: int) -> list[tuple[Name, int]]:
        """The request's blocks that `length` tokens fill in part, one of each group, named by these tokens. None where
        the length is a whole number of blocks, or an entry stands for several tokens: it may be computed in part."""
        column = length // BLOCK
        if length % BLOCK == 0 or not self.divisible:
            return []
        self.hasher.extend(request.hashes, request.tokens, request.salt, column)
        digest = self.hasher.cut(request.hashes, request.tokens[:length], request.salt)
        return [(Name(group, digest), blocks[column]) for group, blocks in enumerate(self.held[request.row])]

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
            last = min(self.first_visible(group, request.computed), len(blocks))
            for column in range(self.released[row][group], last):
                self.pool.release(blocks[column])
                blocks[column] = RELEASED
                self.array[group, row, column] = 0
            self.released[row][group] = max(self.released[row][group], last)

    def first_visible(self, group: int, position: int) -> int:
        """First column of the group that a token at `position` or later can see."""
        return self.layout.groups[group].entry.first_seen(position) // self.spans[group]

    def check(self) -> None:
        """Invariant: a block's references equal the tables and leases that hold it, and the runner's copy agrees."""
        counts = [0] * self.pool.total
        for block in self.lent.blocks():
            counts[block] += 1
        for row, groups in enumerate(self.held):
            ends = [len(blocks) * span for blocks, span in zip(groups, self.spans, strict=True)]
            assert max(ends) - min(ends) < max(self.spans), "tables of one request cover different lengths"
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
