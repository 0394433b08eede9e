"""How many guesses a step verifies: as many as raise the expected tokens per second.

A step with `rows` rows takes T(rows) seconds. If each guess is right with probability p, k guesses of one request bring
p + p² + … + p^k tokens more. The requests of a step are asked in turn, and each takes the source and the k that give
the whole step the most expected tokens over its predicted time. Where more rows cost much (many streams) or few guesses
are right, that is none.

Both p and T are learnt while serving. T of what is not chosen would become outdated. So now and then a step verifies no
guess although it would pay, or a few although they would not. And what was predicted is compared with what steps with
guesses really brought: where they were slower, guessing pauses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import NamedTuple

from twostroke.draft.answers import EarlierAnswers
from twostroke.draft.by_model import READY, TRIALS, Choice, ModelDrafts
from twostroke.draft.lookup import Lookup
from twostroke.draft.rates import FORCED, MODEL, Acceptance, Realised, StepTimes, kind_of
from twostroke.types import UNWRITTEN, Plan, RequestState, Result, WorkKind

MOST = 16  # guesses for one request and step
# With more streams nothing is guessed: no gain was measured (docs/speculation.md). By a draft model, and from the text:
STREAMS = {"cpu": 2, "cuda": 64}
TEXT_STREAMS = {"cpu": 2, "cuda": 1}  # on a GPU a stream that waits for its result leaves the step of the others
GAIN = 1.1  # least predicted gain in tokens per second
WITHOUT_EVERY = 32  # steps that could draft: one of so many does not
TRY_EVERY = 64  # long matches that do not pay: one of so many is tried
TRIED = 3  # guesses of such a try
LONG = 8  # tokens of a match that is worth a try


Forced = Callable[[RequestState], Sequence[int]]  # the tokens that a request's grammar leaves no choice about


def make_drafter(
    speculate: str,
    device: str,
    forced: Forced,
    draft_share: float | None = None,
    longest: Callable[[], float] = lambda: inf,
) -> Speculation | None:
    """For a setting. draft_share: None where there is no draft model, else its weights as a share of the target's.
    longest: seconds that a step with guesses may take."""
    by_text = speculate in ("auto", "lookup")
    by_model = speculate in ("auto", "draft") and draft_share is not None
    if not by_text and not by_model:
        return None
    model = ModelDrafts(draft_share) if by_model and draft_share is not None else None
    texts = TEXT_STREAMS[device] if by_text else 0
    return Speculation(forced, texts, model, STREAMS[device] if by_model else texts, longest)


def never_forced(request: RequestState) -> Sequence[int]:
    return ()


class Guessing:
    """The guesses of one request."""

    __slots__ = ("acceptance", "catching_up", "kind", "lookup", "missed", "reads", "trials")

    def __init__(self, prior: Acceptance, lookup: Lookup | None = None):
        self.lookup = lookup or Lookup()
        self.acceptance = Acceptance(prior)
        self.kind = 0  # of the last guesses
        self.reads: bool | None = None  # whether the draft model reads its prompt; None: not decided
        self.trials = 0  # steps in which the draft model writes although that does not seem to pay
        self.missed = 0.0  # seconds that the draft model would have saved, had it read the text
        self.catching_up = False


class Proposal(NamedTuple):
    """How many guesses of a kind a step verifies."""

    kind: int
    length: int
    gained: float  # tokens expected of them
    speed: float  # expected tokens per second of the whole step


class Speculation:
    """The drafter of a scheduler."""

    def __init__(
        self,
        forced: Forced = never_forced,
        text_streams: int = TEXT_STREAMS["cpu"],
        model: ModelDrafts | None = None,
        most_streams: int = STREAMS["cpu"],
        longest: Callable[[], float] = lambda: inf,
    ) -> None:
        """text_streams: with more streams nothing is looked up; 0: never."""
        self.forced, self.text_streams, self.model = forced, text_streams, model
        self.most_streams, self.longest = most_streams, longest
        self.of: dict[int, Guessing] = {}  # by the request's id
        self.earlier = EarlierAnswers()
        self.acceptance = Acceptance()
        self.times = StepTimes()
        self.realised: dict[int, Realised] = {}  # by doublings of streams
        self.streams = self.rows = self.chances = self.declined = 0
        self.context = 0  # tokens before the rows of the last step, all streams together
        self.tokens = 0.0  # expected of the step that is being planned
        self.drafting = 0.0  # seconds of the draft model in it
        self.without = False

    # ---- a plan ------------------------------------------------------------------------------------------------------

    def begin(self, streams: int) -> bool:
        """A plan is being made: each stream writes one token. False: nothing is guessed in it."""
        self.streams, self.rows, self.tokens, self.drafting = streams, streams, float(streams), 0.0
        self.without = self.chances % WITHOUT_EVERY == WITHOUT_EVERY - 1
        if streams > self.most_streams or not self._realised(streams).allows():
            return False
        self.times.at(self.context)
        if self.model is not None:
            chosen = self.model.chosen = self._for_all(self.model, streams)
            self.drafting = chosen.seconds if streams > 1 else 0.0  # one stream pays for its own passes
        return True

    def waits(self, request: RequestState) -> bool:
        """Whether the next plan of a request with a step in flight should wait for its result: guesses from what is
        known so far would pay."""
        if self.streams > self.text_streams or not request.params.speculate:
            return False
        known = self._known(request)
        match = known.lookup.update(request.tokens)
        return match > 0 and self._choose(known.acceptance, kind_of(match), MOST).length > 0

    def propose(self, request: RequestState, most: int) -> Sequence[int]:
        """The guesses of the source from which the step gains most: the grammar, the request's own tokens, or the draft
        model."""
        known = self._known(request)
        match = known.lookup.update(request.tokens) if self.streams <= self.text_streams else 0
        forced = self.forced(request) if request.params.grammar is not None else ()
        if not match and not forced and self.model is None:
            return ()  # most steps of most requests
        most = min(most, MOST)
        best = Proposal(kind_of(match), 0, 0.0, 0.0)
        if match:
            best = self._choose(known.acceptance, kind_of(match), most)
        if forced:
            best = max(best, self._choose(known.acceptance, FORCED, min(most, len(forced))), key=lambda c: c.speed)
        ready = self.model is not None and len(request.tokens) - request.drafted <= READY
        if ready:
            best = max(best, self._choose_model(request, known, most), key=lambda c: c.speed)
        if not best.length:
            if ready and known.trials and most:
                known.trials -= 1
                best = Proposal(MODEL, min(most, TRIED), 0.0, 0.0)
            elif match >= LONG and self._is_due():
                best = Proposal(kind_of(match), min(most, TRIED), 0.0, 0.0)
        elif self.without:
            self.chances += 1
            return ()
        return self._take(request, known, best, forced)

    def _is_due(self) -> bool:
        """Once in a while guesses are verified although they do not pay."""
        self.declined += 1
        return self.declined % TRY_EVERY == 0

    def _take(self, request: RequestState, known: Guessing, best: Proposal, forced: Sequence[int]) -> Sequence[int]:
        known.kind, count = best.kind, best.length
        self.chances += best.gained > 0
        self.tokens += best.gained
        draft: Sequence[int]
        if not count:
            return ()
        if best.kind == MODEL:
            draft = (UNWRITTEN,) * count
            if self.streams == 1 and self.model is not None:
                self.drafting = self._model_seconds(self.model, request, count)
        elif best.kind == FORCED:
            draft = forced[:count]
        else:
            draft = known.lookup.guess(request.tokens, count)
        self.rows += len(draft)
        return draft

    def _known(self, request: RequestState) -> Guessing:
        known = self.of.get(request.id)
        if known is None:
            known = self.of[request.id] = Guessing(self.acceptance, Lookup(self.earlier, request.salt))
        return known

    # ---- how many ----------------------------------------------------------------------------------------------------

    def _choose(
        self, acceptance: Acceptance, kind: int, most: int, drafting: Callable[[int], float] = lambda count: 0.0
    ) -> Proposal:
        """The count with the most expected tokens per second. drafting: seconds for writing so many guesses."""
        rate, total, chance = acceptance.rate(kind), 0.0, 1.0
        alone = self.times.predict(self.rows)
        if alone is None:
            return Proposal(kind, 0, 0.0, 0.0)
        least, longest = 1 + (GAIN - 1) / max(1.0, self.streams / 2), self.longest()  # one stream's part of the gain
        best = Proposal(kind, 0, 0.0, least * self.tokens / (alone + self.drafting))
        for count in range(1, most + 1):
            chance *= rate
            total += chance
            target = self.times.predict(self.rows + count)
            assert target is not None
            seconds = target + self.drafting + drafting(count)
            if seconds > longest:
                break
            if (self.tokens + total) / seconds > best.speed:
                best = Proposal(kind, count, total, (self.tokens + total) / seconds)
        return best

    def _choose_model(self, request: RequestState, known: Guessing, most: int) -> Proposal:
        """One stream pays for its passes. Several share them: what the whole step pays for was chosen before."""
        model = self.model
        assert model is not None
        if self.streams == 1:
            return self._choose(known.acceptance, MODEL, most, lambda count: self._model_seconds(model, request, count))
        return self._choose(known.acceptance, MODEL, min(most, model.chosen.length))

    def _for_all(self, model: ModelDrafts, streams: int) -> Choice:
        return model.choose(
            streams, self.acceptance.rate(MODEL), self.times.predict, gain=GAIN, most=MOST, longest=self.longest()
        )

    def _model_seconds(self, model: ModelDrafts, request: RequestState, count: int) -> float:
        alone = self.times.predict(self.streams)
        return inf if alone is None else model.draft_seconds(1, count, len(request.tokens) - request.drafted, alone)

    # ---- what the draft model reads ----------------------------------------------------------------------------------

    def reads(self, request: RequestState) -> bool:
        """Whether the draft model reads a prompt along with the target: where it pays to draft for one stream more."""
        if self.model is None or not request.params.speculate:
            return False
        known, streams = self._known(request), self.streams + 1
        if known.reads is None:
            unknown = self.times.predict(streams) is None
            pays = unknown or (streams <= self.most_streams and self._for_all(self.model, streams).length > 0)
            known.reads = pays or self.model.is_trial()
            known.trials = 0 if pays or not known.reads else TRIALS
        return known.reads

    def catches_up(self, request: RequestState) -> bool:
        """Whether the draft model reads what it has missed of a stream: its drafts would have saved more meanwhile."""
        model, known = self.model, self._known(request)
        missed = len(request.tokens) - request.drafted
        if model is None or not request.params.speculate or missed <= READY:
            known.catching_up, known.missed = False, 0.0
            return False
        known.missed += model.chosen.saved
        alone = self.times.predict(self.streams)
        if not known.catching_up and alone is not None:
            known.catching_up = known.missed > model.pass_seconds(missed, alone)
        return known.catching_up

    # ---- what was measured -------------------------------------------------------------------------------------------

    def learn(self, plan: Plan, result: Result, seconds: float) -> None:
        """From a step that was collected. Beside many streams nothing is guessed, so nothing is learnt there."""
        works = plan.works
        if len(works) > self.most_streams:
            return
        rows = kept = context = 0
        plain, guessed = True, False
        for work, tokens in zip(works, result.tokens, strict=True):
            rows += work.count
            kept += len(tokens)
            context += work.start
            plain = plain and work.kind is not WorkKind.READ
            if work.kind is WorkKind.VERIFY and tokens:
                guessed = True
                self._count(work.request, len(work.draft), len(tokens) - 1)
        if self.model is not None:
            for size, taken in result.passes:
                self.model.times.add(size, taken)
        if not plain:
            return
        self.context = context
        if guessed and (alone := self.times.predict(len(works))) is not None:
            self._realised(len(works)).add(alone * kept / len(works), seconds)
        self.times.add(rows, seconds - sum(taken for _, taken in result.passes))

    def _realised(self, streams: int) -> Realised:
        size = streams.bit_length()
        if size not in self.realised:
            self.realised[size] = Realised()
        return self.realised[size]

    def _count(self, request: RequestState, drafted: int, accepted: int) -> None:
        known = self.of.get(request.id)
        if known is not None:
            self.acceptance.add(known.kind, drafted, accepted)
            known.acceptance.add(known.kind, drafted, accepted)

    def forget(self, request: RequestState) -> None:
        if self.of.pop(request.id, None) is not None and self.text_streams:
            self.earlier.add(request.salt, request.tokens, request.prompt_length)
