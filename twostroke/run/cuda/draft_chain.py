"""The draft model's passes on a GPU, one after the other: the host waits for none of them.

A token that a pass chooses stays on the device, at a place of its own in `newest`. The next pass, and the target's rows
that verify the draft, name it by this place, as they name the tokens of steps in flight. The host learns the drafts
together with what the target chose.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from twostroke.run.cuda.steps import chosen_within
from twostroke.run.drafting import DraftRows, Drafts, Passes
from twostroke.types import MOST_DRAFTED, Choice, Plan, Work

if TYPE_CHECKING:
    from twostroke.run.cuda.runner import CudaRunner, Handle


class DraftPass(NamedTuple):
    """A pass that was launched."""

    rows: DraftRows
    handle: Handle


class DraftChain:
    def __init__(self, runner: CudaRunner, target: CudaRunner, vocab: int):
        """runner: of the draft model, with `vocab` tokens."""
        self.runner, self.vocab = runner, vocab
        self.first = target.tables.shape[1]  # places before this one are the requests' own
        places = self.first * (1 + MOST_DRAFTED)
        runner.newest = target.newest = torch.zeros(places, dtype=torch.int32, device=target.ops.device)
        runner.stream = target.stream  # the target's copies of blocks come before the draft model's step

    def can_write(self, plan: Plan) -> bool:
        """Whether the device chooses all tokens of the drafts by itself."""
        writing = (draft.request for draft in plan.drafts if draft.writes)
        return all(chosen_within(Choice(request, len(request.tokens), request.tokens), False) for request in writing)

    def launch(self, plan: Plan) -> tuple[tuple[Work, ...], tuple[DraftPass, ...]]:
        """The plan's works, with drafts whose tokens are named by their places."""
        drafts, launched = Drafts(plan.drafts, self.vocab), []
        for rows in drafts.passes():
            places = [self._place(rows, index) for index in rows.written]
            rows.kept_at = np.array(places, np.int64)
            launched.append(DraftPass(rows, self.runner.launch_rows(rows)))
            for tokens, place in zip(rows.written.values(), places, strict=True):
                tokens.append(-1 - place)
        return drafts.fill_in(plan.works), tuple(launched)

    def _place(self, rows: DraftRows, index: int) -> int:
        return self.first + rows.works[index].request.row * MOST_DRAFTED + len(rows.written[index])

    def collect(self, launched: Sequence[DraftPass], works: Sequence[Work]) -> tuple[tuple[Work, ...], Passes, bool]:
        """The works with the drafts' tokens, the passes' times where another of their shape would take as long, and
        whether all of them are such."""
        texts: dict[int, list[int]] = {}
        passes, settled = [], True
        for rows, handle in launched:
            tokens, seconds = self.runner.collect_rows(handle)
            if handle.settled and seconds is not None:
                passes.append((rows.total, seconds))
            settled = settled and handle.settled
            for index, token in zip(rows.written, tokens, strict=True):
                texts.setdefault(rows.works[index].request.id, []).append(token)
        return tuple(with_tokens(work, texts) for work in works), tuple(passes), settled


def with_tokens(work: Work, texts: dict[int, list[int]]) -> Work:
    """A draft that names places, with the tokens themselves."""
    if not work.draft or work.draft[0] >= 0:
        return work
    return work._replace(draft=tuple(texts[work.request.id][: len(work.draft)]))
