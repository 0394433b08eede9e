"""How many guesses a step verifies: as many as raise the expected tokens per second.

A step with `rows` rows takes T(rows) seconds. If each guess is right with probability p, k guesses of one request bring
p + p² + … + p^k tokens more. The requests of a step are asked in turn, and each takes the k that gives the whole step
the most expected tokens over its predicted time. Where rows are dear (many streams) or guesses are poor, that is none.

Both p and T are learnt while serving. T of what is not chosen would grow old, so once in a while a step takes none
although it would pay, or a few although they would not.
"""

from __future__ import annotations

from collections.abc import Sequence

from twostroke.draft.lookup import Lookup
from twostroke.draft.rates import Acceptance, StepTimes
from twostroke.types import Plan, RequestState, Result, WorkKind

MOST = 16  # guesses for one request and step
STREAMS = 2  # with more of them nothing is guessed: rows are dear there, and what is learnt was too noisy to gain
GAIN = 1.1  # least predicted gain in tokens per second
WITHOUT_EVERY = 32  # steps that could draft: one of so many does not
TRY_EVERY = 64  # long matches that do not pay: one of so many is tried
TRIED = 3  # guesses of such a try
LONG = 8  # tokens of a match that is worth a try


def make_drafter(speculate: str, device: str) -> Speculation | None:
    """For a setting. "auto" is off on a GPU: steps with drafts are not captured there, and no gain was measured."""
    return Speculation() if speculate == "lookup" or (speculate == "auto" and device == "cpu") else None


class Guessing:
    """What is known of one request."""

    __slots__ = ("acceptance", "lookup", "match")

    def __init__(self, prior: Acceptance):
        self.lookup = Lookup()
        self.acceptance = Acceptance(prior)
        self.match = 0  # of the last proposal


class Speculation:
    """The drafter of a scheduler."""

    def __init__(self) -> None:
        self.of: dict[int, Guessing] = {}  # by the request's id
        self.acceptance = Acceptance()
        self.times = StepTimes()
        self.streams = self.rows = self.chances = self.declined = 0
        self.tokens = 0.0  # expected of the step that is being planned
        self.without = False

    def begin(self, streams: int) -> None:
        """A plan is being made: each stream writes one token."""
        self.streams, self.rows, self.tokens = streams, streams, float(streams)
        self.without = self.chances % WITHOUT_EVERY == WITHOUT_EVERY - 1

    def waits(self, request: RequestState) -> bool:
        """Whether the next plan of a request with a step in flight should wait for its result: it has a match."""
        known = self.of.get(request.id)
        return known is not None and known.lookup.length > 0

    def propose(self, request: RequestState, most: int) -> Sequence[int]:
        if self.streams > STREAMS:
            return ()
        known = self.of.get(request.id)
        if known is None:
            known = self.of[request.id] = Guessing(self.acceptance)
        match = known.match = known.lookup.update(request.tokens)
        if not match:
            return ()
        count = self._choose(known.acceptance.rate(match), min(most, MOST))
        if count == 0 and match >= LONG:
            self.declined += 1
            count = min(most, TRIED) if self.declined % TRY_EVERY == 0 else 0
        if count and self.without:
            count = 0
        draft = known.lookup.guess(request.tokens, count)
        self.rows += len(draft)
        return draft

    def _choose(self, rate: float, most: int) -> int:
        """The count with the most expected tokens per second."""
        best, gained, total, chance = 0, 0.0, 0.0, 1.0
        alone = self.times.predict(self.rows)
        if alone is None:
            return 0
        speed = GAIN * self.tokens / alone
        for count in range(1, most + 1):
            chance *= rate
            total += chance
            seconds = self.times.predict(self.rows + count)
            assert seconds is not None
            if (self.tokens + total) / seconds > speed:
                best, gained, speed = count, total, (self.tokens + total) / seconds
        self.chances += best > 0
        self.tokens += gained
        return best

    def learn(self, plan: Plan, result: Result, seconds: float) -> None:
        """From a step that was collected."""
        rows = 0
        plain = True
        for work, tokens in zip(plan.works, result.tokens, strict=True):
            rows += work.count
            plain = plain and work.kind is not WorkKind.READ
            if work.kind is WorkKind.VERIFY and tokens:
                self._count(work.request, len(work.draft), len(tokens) - 1)
        if plain:
            self.times.add(rows, seconds)

    def _count(self, request: RequestState, drafted: int, accepted: int) -> None:
        known = self.of.get(request.id)
        if known is not None:
            self.acceptance.add(known.match, drafted, accepted)
            known.acceptance.add(known.match, drafted, accepted)

    def forget(self, request: RequestState) -> None:
        self.of.pop(request.id, None)
