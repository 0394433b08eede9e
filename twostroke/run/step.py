"""A plan as the arrays of one step: rows laid flat, no padding anywhere. Every runner starts from these."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from twostroke.kv.layout import KVGroup
from twostroke.ops.interface import Batch, DecodeRow, GroupBlocks
from twostroke.record import Record
from twostroke.types import Choice, Work, WorkKind


class PromptRows(Record):
    """Rows of one work whose logits give the log probabilities of the prompt's own tokens."""

    work: int  # index in the plan
    first: int  # index of the first such row among the step's logit rows
    position: int  # position of the first token predicted
    count: int


class StepRows:
    """The rows of a plan's works, request by request, each request's in order."""

    kept_at: np.ndarray | None = None  # on a GPU: where each choice is kept; None: at its request's row
    reports = True  # log probabilities of the choices, where they are wanted

    def __init__(self, works: Sequence[Work]):
        self.works = works
        if all([work.count == 1 for work in works]):  # noqa: C419 - a list is faster here
            self._lay_single()
        else:
            self._lay_out()
        self._choose_rows()

    def _lay_single(self) -> None:
        """One row for each request: nearly every decode step. 8 µs instead of 21 for one stream, 150 instead of 219 for
        64."""
        works = self.works
        self.total, self.single = len(works), True
        places = [work.start for work in works]
        rows, newest = [work.request.row for work in works], [input_tokens(work)[0] for work in works]
        self.table_rows, self.first, self.tokens = np.array((rows, places, newest), np.int64)
        self.counts, self.owner, self.starts = ones_and_indices(self.total)
        self.contexts, self.positions = self.first + 1, self.first
        self.columns = max(places) + 1

    def _lay_out(self) -> None:
        self.table_rows = np.array([work.request.row for work in self.works], np.int64)
        self.first = np.array([work.start for work in self.works], np.int64)
        self.tokens = np.array([token for work in self.works for token in input_tokens(work)], np.int64)
        self.counts = np.array([work.count for work in self.works], np.int64)
        self.contexts = self.first + self.counts  # tokens in the cache once the step has written its own
        self.starts = np.zeros(len(self.counts) + 1, np.int32)
        np.cumsum(self.counts, out=self.starts[1:])
        self.total, self.single = int(self.starts[-1]), False
        self.owner = np.repeat(np.arange(len(self.counts)), self.counts)
        self.positions = np.arange(self.total) + np.repeat(self.first - self.starts[:-1], self.counts)
        self.columns = int(self.contexts.max())

    def _choose_rows(self) -> None:
        """The rows that choose tokens, then those that give log probabilities of the prompt."""
        choices: list[Choice] = []
        chooser: list[int] = []  # the work that each choice belongs to
        rows: list[int] = []
        self.prompts: tuple[PromptRows, ...] = ()
        if all(work.kind is WorkKind.WRITE for work in self.works):
            self.choices = [Choice(work.request, work.start + 1, work.request.tokens) for work in self.works]
            self.chooser, self.logit_rows = list(range(self.total)), self.owner
            return
        for index, work in enumerate(self.works):
            mine = work.choices()
            end = int(self.starts[index + 1])
            rows += range(end - len(mine), end)
            chooser += [index] * len(mine)
            choices += mine
        prompts = []
        for index, work in enumerate(self.works):
            known = prompt_rows(work)
            if known:
                prompts.append(PromptRows(index, len(rows), work.start + 1, known))
                rows += range(int(self.starts[index]), int(self.starts[index]) + known)
        self.choices, self.chooser, self.prompts = choices, chooser, tuple(prompts)
        self.logit_rows = np.array(rows, np.int64)

    def blocks(self, tables: np.ndarray, groups: Sequence[KVGroup]) -> tuple[GroupBlocks, ...]:
        """tables: (groups, rows, columns) int32, the block tables of all running requests."""
        found = []
        for group, every in zip(groups, tables, strict=True):
            table = every[self.table_rows, : -(-self.columns // group.span)]
            found.append(GroupBlocks(self.slots(table, group), table))
        return tuple(found)

    def slots(self, table: np.ndarray, group: KVGroup) -> np.ndarray:
        """Where each row's cache entry is written: block · entries of a block + place in the block."""
        span, tokens = group.span, group.entry.tokens
        blocks, offsets = np.divmod(self.positions, span)
        return table[self.owner, blocks] * np.int64(span // tokens) + offsets // tokens

    def batch(self, tables: np.ndarray, groups: Sequence[KVGroup]) -> Batch:
        return Batch(
            tokens=self.tokens,
            positions=self.positions,
            starts=self.starts,
            contexts=self.contexts.astype(np.int32),
            groups=self.blocks(tables, groups),
            logit_rows=self.logit_rows,
        )

    def accepted(self, chosen: Sequence[int | None]) -> list[tuple[int, ...]]:
        """What each work keeps of the tokens chosen at its positions: drafts up to the first that the model would not
        have chosen, and its own choice there. None: nothing could be chosen; that and what follows is left out."""
        if self.single and len(chosen) == self.total:  # no drafts, and every work chooses
            return [() if token is None else (token,) for token in chosen]
        kept: list[list[int]] = [[] for _ in self.works]
        open_works = [True] * len(self.works)
        for index, token in zip(self.chooser, chosen, strict=True):
            if not open_works[index]:
                continue
            mine, draft = kept[index], self.works[index].draft
            if token is None:
                open_works[index] = False
                continue
            mine.append(token)
            open_works[index] = len(mine) <= len(draft) and draft[len(mine) - 1] == token
        return [tuple(tokens) for tokens in kept]


class NewestRows(StepRows):
    """Rows of a step that only writes and verifies, for a backend that lays them out by itself. Every row chooses."""

    def __init__(self, works: Sequence[Work]):
        self.works, self.prompts = works, ()
        self.choices = [choice for work in works for choice in work.choices()]
        self.chooser = [index for index, work in enumerate(works) for _ in range(work.count)]
        self.total = len(self.choices)
        self.single = self.total == len(works)

    def given(self) -> list[DecodeRow]:
        return [(token, place, work.request.row)
                for work in self.works for place, token in enumerate(input_tokens(work), work.start)]  # fmt: skip


@lru_cache(maxsize=1024)
def ones_and_indices(count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`count` ones, 0 to count - 1, and 0 to count as int32."""
    return np.ones(count, np.int64), np.arange(count), np.arange(count + 1, dtype=np.int32)


def input_tokens(work: Work) -> Sequence[int]:
    """What the work's rows are made of. A token that a step in flight chooses is named by its table row: -1 - row."""
    request, start, count, kind, draft = work
    if kind is WorkKind.WRITE:
        return (request.tokens[start] if start < len(request.tokens) else -1 - request.row,)
    return [*request.tokens[start : start + count], *draft]


def prompt_rows(work: Work) -> int:
    """How many of the work's first rows give log probabilities of the prompt, for a request that asked for them."""
    request = work.request
    if not request.scores_prompt:
        return 0
    return max(0, min(work.count, request.prompt_length - 1 - work.start))  # the newest token predicts no prompt token
