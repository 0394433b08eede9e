"""A plan as the arrays of one step: rows laid flat, no padding anywhere. Every runner starts from these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from twostroke.kv.layout import KVGroup
from twostroke.ops.interface import Batch, GroupBlocks
from twostroke.types import Choice, Plan, Work, WorkKind


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Rows of one work whose logits tell how likely the prompt itself was."""

    work: int  # index in the plan
    first: int  # index of the first such row among the step's logit rows
    position: int  # position of the first token predicted
    count: int


class StepRows:
    """The rows of a plan, request by request, each request's in order."""

    def __init__(self, plan: Plan):
        self.works = plan.works
        numbers = np.array([(work.start, work.count, work.request.row) for work in plan.works], np.int64)
        self.first, self.counts, self.table_rows = numbers.T
        self.contexts = self.first + self.counts  # tokens in the cache once the step has written its own
        self.starts = np.zeros(len(self.counts) + 1, np.int32)
        np.cumsum(self.counts, out=self.starts[1:])
        self.total = int(self.starts[-1])
        self.single = self.total == len(self.works)  # one row for each request
        if self.single:
            self.owner, self.positions = np.arange(self.total), self.first
        else:
            self.owner = np.repeat(np.arange(len(self.counts)), self.counts)
            self.positions = np.arange(self.total) - self.starts[self.owner] + self.first[self.owner]
        self.tokens = np.array([token for work in plan.works for token in input_tokens(work)], np.int64)
        self._choose_rows()

    def _choose_rows(self) -> None:
        """Which rows choose tokens, and which tell how likely the prompt was: the first kind comes first."""
        choices: list[Choice] = []
        chooser: list[int] = []  # the work that each choice belongs to
        rows: list[int] = []
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

    @cached_property
    def columns(self) -> int:
        """Tokens of the longest context."""
        return int(self.contexts.max())

    def blocks(self, tables: np.ndarray, groups: Sequence[KVGroup]) -> tuple[GroupBlocks, ...]:
        """tables: (groups, rows, columns) int32, the block tables of all running requests."""
        found = []
        for group, every in zip(groups, tables, strict=True):
            table = every[self.table_rows, : -(-self.columns // group.span)]
            found.append(GroupBlocks(self.slots(table, group), table))
        return tuple(found)

    def slots(self, table: np.ndarray, group: KVGroup) -> np.ndarray:
        """Where each row's cache entry is written: block · entries of a block + place in the block."""
        blocks, offsets = np.divmod(self.positions, group.span)
        tokens = group.entry.tokens
        return table[self.owner, blocks] * np.int64(group.span // tokens) + offsets // tokens

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


def input_tokens(work: Work) -> Sequence[int]:
    """What the work's rows are made of. A token that a step in flight chooses is named by its table row: -1 - row."""
    request, start, count, kind, draft = work
    if kind is WorkKind.WRITE:
        return (request.tokens[start] if start < len(request.tokens) else -1 - request.row,)
    return [*request.tokens[start : start + count], *draft]


def prompt_rows(work: Work) -> int:
    """How many of the work's first rows tell how likely the prompt itself was, for a request that asked."""
    request = work.request
    if request.params.prompt_logprobs is None or request.output_length or request.sample:
        return 0
    return max(0, min(work.count, request.prompt_length - 1 - work.start))  # the newest token predicts no prompt token
