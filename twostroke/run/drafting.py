"""The draft model's part of a step: it reads what the plan says and writes the drafts that the target then verifies.

One pass for each position serves all requests: the first reads what the draft model lacks of each request, and each
pass after it computes one token of every draft that goes on. Tokens are chosen as the target chooses them, with the
same noise, so a draft model that agrees with the target draws the same token.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np

from twostroke.run.step import StepRows
from twostroke.types import UNWRITTEN, Choice, DraftWork, Plan, RequestState, Work, WorkKind

FEW = 8  # rows of a request
Passes = tuple[tuple[int, float], ...]  # rows and seconds of each


class DraftRows(StepRows):
    """Rows of the draft model, of which nothing is reported. `written`: by index of the work, what the draft holds so
    far; works without an entry are only read. vocab: tokens that the draft model knows; others have rows in the
    target's padding alone."""

    reports = False

    def __init__(self, works: Sequence[Work], written: Mapping[int, list[int]], vocab: int):
        self.written = written
        super().__init__(works)
        np.minimum(self.tokens, vocab - 1, out=self.tokens)

    def _choose_rows(self) -> None:
        self.prompts, self.chooser, self.choices = (), list(self.written), []
        for index, tokens in self.written.items():
            request = self.works[index].request
            known, position = request.tokens, len(request.tokens) + len(tokens)
            before = known if request.params.is_plain or not tokens else [*known, *tokens]
            self.choices.append(Choice(request, position, before))
        self.logit_rows = self.starts[1:][self.chooser].astype(np.int64) - 1


class Drafts:
    """The drafts of a plan while the draft model writes them."""

    def __init__(self, drafts: Sequence[DraftWork], vocab: int):
        """vocab: of the draft model."""
        self.drafts, self.vocab = drafts, vocab
        self.written: dict[int, list[int]] = {index: [] for index, draft in enumerate(drafts) if draft.writes}

    def passes(self) -> Iterator[DraftRows]:
        """The rows of each pass. What a pass chooses is added to its `written` before the next one is asked for."""
        works = [first_rows(draft) for draft in self.drafts]
        going: Mapping[int, list[int]] = self.written
        while works:
            yield DraftRows(works, going, self.vocab)
            left = [index for index, tokens in self.written.items() if len(tokens) < self.drafts[index].writes]
            works = [newest_row(self.drafts[index].request, self.written[index]) for index in left]
            going = {n: self.written[index] for n, index in enumerate(left)}

    def fill_in(self, works: Sequence[Work]) -> tuple[Work, ...]:
        """The plan's works with the drafts that were written for them."""
        texts = {self.drafts[index].request.id: tokens for index, tokens in self.written.items()}
        return tuple(
            work._replace(draft=tuple(texts[work.request.id][: len(work.draft)])) if is_unwritten(work) else work
            for work in works
        )


class DraftRunner(Protocol):
    """Runs the draft model's rows."""

    def next_tokens(self, rows: StepRows) -> list[int | None]: ...


class Drafting:
    """Writes the drafts of a plan, and waits for each pass."""

    def __init__(self, runner: DraftRunner, vocab: int):
        """vocab: of the draft model."""
        self.runner, self.vocab = runner, vocab

    def write(self, plan: Plan) -> tuple[tuple[Work, ...], Passes]:
        """The plan's works with their drafts written."""
        if not plan.drafts:
            return plan.works, ()
        drafts, passes = Drafts(plan.drafts, self.vocab), []
        began = time.perf_counter()
        for rows in drafts.passes():
            for tokens, token in zip(rows.written.values(), self.runner.next_tokens(rows), strict=True):
                tokens.append(0 if token is None else token)  # a guess like any other
            ended = time.perf_counter()
            passes.append((rows.total, ended - began))
            began = ended
        return drafts.fill_in(plan.works), tuple(passes)


def first_rows(draft: DraftWork) -> Work:
    """What the draft model lacks of a request. Few rows are computed as those of a draft are."""
    few = draft.writes and draft.count <= FEW
    return Work(draft.request, draft.start, draft.count, WorkKind.VERIFY if few else WorkKind.READ)


def newest_row(request: RequestState, written: Sequence[int]) -> Work:
    """One row of the draft model: the newest token of a draft, which takes the place of a verified row."""
    return Work(request, len(request.tokens) + len(written) - 1, 1, WorkKind.VERIFY, (written[-1],))


def is_unwritten(work: Work) -> bool:
    return bool(work.draft) and work.draft[0] == UNWRITTEN
