"""The draft model's part of a step: it reads what the plan says and writes the drafts that the target then verifies.

One pass for each position serves all requests: the first reads what the draft model lacks of each request, and each
pass after it computes one token of every draft that goes on. Tokens are chosen as the target chooses them, with the
same noise, so a draft model that agrees with the target draws the same token.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from twostroke.run.step import StepRows
from twostroke.types import UNWRITTEN, Choice, Plan, RequestState, Work, WorkKind

Passes = tuple[tuple[int, float], ...]  # rows and seconds of each


class DraftRows(StepRows):
    """Rows of the draft model. `written`: by index of the work, what the draft holds so far; works without an entry
    are only read. vocab: tokens that the draft model knows; others have rows in the target's padding alone."""

    def __init__(self, works: Sequence[Work], written: Mapping[int, list[int]], vocab: int):
        self.written = written
        super().__init__(works)
        np.minimum(self.tokens, vocab - 1, out=self.tokens)

    def _choose_rows(self) -> None:
        self.prompts, self.chooser, self.choices = (), list(self.written), []
        for index, tokens in self.written.items():
            request = self.works[index].request
            before = [*request.tokens, *tokens] if tokens else request.tokens
            self.choices.append(Choice(request, len(before), before))
        self.logit_rows = self.starts[1:][self.chooser].astype(np.int64) - 1


class DraftRunner(Protocol):
    """Runs the draft model's rows."""

    def next_tokens(self, rows: StepRows) -> list[int | None]: ...


class Drafting:
    def __init__(self, runner: DraftRunner, vocab: int):
        """vocab: of the draft model."""
        self.runner, self.vocab = runner, vocab

    def write(self, plan: Plan) -> tuple[tuple[Work, ...], Passes]:
        """The plan's works with their drafts written."""
        if not plan.drafts:
            return plan.works, ()
        drafts, passes = plan.drafts, []
        works = [Work(draft.request, draft.start, draft.count) for draft in drafts]
        written: dict[int, list[int]] = {index: [] for index, draft in enumerate(drafts) if draft.writes}
        going = dict(written)
        while works:
            began = time.perf_counter()
            rows = DraftRows(works, going, self.vocab)
            chosen = self.runner.next_tokens(rows)
            passes.append((rows.total, time.perf_counter() - began))
            for tokens, token in zip(going.values(), chosen, strict=True):
                tokens.append(0 if token is None else token)  # a guess like any other
            left = [index for index, tokens in written.items() if len(tokens) < drafts[index].writes]
            works = [newest_row(drafts[index].request, written[index]) for index in left]
            going = {n: written[index] for n, index in enumerate(left)}
        texts = {drafts[index].request.id: tuple(tokens) for index, tokens in written.items()}
        return tuple(fill_in(work, texts) for work in plan.works), tuple(passes)


def newest_row(request: RequestState, written: Sequence[int]) -> Work:
    """One row: the newest token of a draft."""
    return Work(request, len(request.tokens) + len(written) - 1, 1, WorkKind.VERIFY, (written[-1],))


def fill_in(work: Work, texts: Mapping[int, tuple[int, ...]]) -> Work:
    """The work with the draft that was written for it."""
    if not work.draft or work.draft[0] != UNWRITTEN:
        return work
    return work._replace(draft=texts[work.request.id][: len(work.draft)])
