"""How many guesses a step verifies: as many as raise the expected tokens per second.

A step with `rows` rows takes T(rows) seconds. If each guess is right with probability p, k guesses of one request bring
p + p² + … + p^k tokens more. The requests of a step are asked in turn, and each takes the k that gives the whole step
the most expected tokens over its predicted time. Where more rows cost much (many streams) or few guesses are right,
that is none.

Both p and T are learnt while serving. T of what is not chosen would become outdated. So now and then a step verifies no
guess although it would pay, or a few although they would not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from twostroke.draft.lookup import Lookup
from twostroke.draft.rates import FORCED, Acceptance, StepTimes, kind_of
from twostroke.types import Plan, RequestState, Result, WorkKind

MOST = 16  # guesses for one request and step
STREAMS = 2  # with more streams nothing is guessed: rows cost much there, and no gain was measured
GAIN = 1.1  # least predicted gain in tokens per second
WITHOUT_EVERY = 32  # steps that could draft: one of so many does not
TRY_EVERY = 64  # long matches that do not pay: one of so many is tried
TRIED = 3  # guesses of such a try
LONG = 8  # tokens of a match that is worth a try


Forced = Callable[[RequestState], Sequence[int]]  # the tokens that a request's grammar leaves no choice about


def make_drafter(speculate: str, device: str, forced: Forced) -> Speculation | None:
    """For a setting. "auto" is off on a GPU: steps with drafts are not captured there, and no gain was measured."""
    if speculate == "lookup" or (speculate == "auto" and device == "cpu"):
        return Speculation(forced)
    return None


def never_forced(request: RequestState) -> Sequence[int]:
    return ()


class Guessing:
    """The guesses of one request."""

    __slots__ = ("acceptance", "kind", "lookup")

    def __init__(self, prior: Acceptance):
        self.lookup = Lookup()
        self.acceptance = Acceptance(prior)
        self.kind = 0  # of the last guesses


class Proposal(NamedTuple):
    """How many guesses of a kind a step verifies."""

    kind: int
    length: int
    gained: float  # tokens expected of them
    speed: float  # expected tokens per second of the whole step


class Speculation:
    """The drafter of a scheduler."""

    def __init__(self, forced: Forced = never_forced) -> None:
        self.forced = forced
        self.of: dict[int, Guessing] = {}  # by the request's id
        self.acceptance = Acceptance()
        self.times = StepTimes()
        self.streams = self.rows = self.chances = self.declined = 0
        self.tokens = 0.0  # expected of the step that is being planned
        self.without = False

    def begin(self, streams: int) -> bool:
        """A plan is being made: each stream writes one token. False: nothing is guessed in it."""
        self.streams, self.rows, self.tokens = streams, streams, float(streams)
        self.without = self.chances % WITHOUT_EVERY == WITHOUT_EVERY - 1
        return streams <= STREAMS

    def waits(self, request: RequestState) -> bool:
        """Whether the next plan of a request with a step in flight should wait for its result: it has a match."""
        known = self.of.get(request.id)
        return known is not None and known.lookup.length > 0

    def propose(self, request: RequestState, most: int) -> Sequence[int]:
        """The guesses of the source from which the step gains most: the grammar, or the request's own tokens."""
        known = self.of.get(request.id)
        if known is None:
            known = self.of[request.id] = Guessing(self.acceptance)
        match = known.lookup.update(request.tokens)
        forced = self.forced(request) if request.params.grammar is not None else ()
        if not match and not forced:
            return ()
        most = min(most, MOST)
        best = Proposal(kind_of(match), 0, 0.0, 0.0)
        if match:
            best = self._choose(known.acceptance, kind_of(match), most)
        if forced:
            best = max(best, self._choose(known.acceptance, FORCED, min(most, len(forced))), key=lambda c: c.speed)
        return self._take(request, known, best, forced, min(most, TRIED) if match >= LONG else 0)

    def _take(
        self, request: RequestState, known: Guessing, best: Proposal, forced: Sequence[int], tried: int
    ) -> Sequence[int]:
        """tried: so many guesses are verified once in a while although they do not pay."""
        known.kind, count = best.kind, best.length
        self.chances += count > 0
        self.tokens += best.gained
        if count == 0 and tried:
            self.declined += 1
            count = tried if self.declined % TRY_EVERY == 0 else 0
        if count and self.without:
            count = 0
        draft = forced[:count] if best.kind == FORCED else known.lookup.guess(request.tokens, count)
        self.rows += len(draft)
        return draft

    def _choose(self, acceptance: Acceptance, kind: int, most: int) -> Proposal:
        """The count with the most expected tokens per second."""
        rate, total, chance = acceptance.rate(kind), 0.0, 1.0
        alone = self.times.predict(self.rows)
        if alone is None:
            return Proposal(kind, 0, 0.0, 0.0)
        best = Proposal(kind, 0, 0.0, GAIN * self.tokens / alone)
        for count in range(1, most + 1):
            chance *= rate
            total += chance
            seconds = self.times.predict(self.rows + count)
            assert seconds is not None
            if (self.tokens + total) / seconds > best.speed:
                best = Proposal(kind, count, total, (self.tokens + total) / seconds)
        return best

    def learn(self, plan: Plan, result: Result, seconds: float) -> None:
        """From a step that was collected. Nothing is guessed beside many streams, so nothing is learnt there."""
        if len(plan.works) > STREAMS:
            return
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
            self.acceptance.add(known.kind, drafted, accepted)
            known.acceptance.add(known.kind, drafted, accepted)

    def forget(self, request: RequestState) -> None:
        self.of.pop(request.id, None)
