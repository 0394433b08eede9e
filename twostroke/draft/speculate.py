"""How many guesses a step verifies: as many as raise the expected tokens per second.

A step with `rows` rows takes T(rows) seconds. If each guess is right with probability p, k guesses of one request bring
p + p² + … + p^k tokens more. Guesses from texts are chosen for all requests of a step together, so that the whole step
has the most expected tokens over its predicted time; then each request takes its best source. Where more rows cost much
(many streams) or few guesses are right, nothing is guessed. On a GPU a plan with guesses waits for the step before it,
which costs the host's time once, however many guesses there are.

Both p and T are learnt while serving. T of what is not chosen would become outdated. So now and then a step verifies no
guess although it would pay, or a few although they would not. And what was predicted is compared with what steps with
guesses really brought: where they were slower, guessing pauses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import inf
from typing import NamedTuple

import numpy as np

from twostroke.draft.answers import EarlierAnswers
from twostroke.draft.by_model import CAUGHT_UP, READY, TRIALS, DraftLength, ModelDrafts
from twostroke.draft.lookup import Lookup
from twostroke.draft.rates import FORCED, MODEL, NEAR, SHARED_GAIN, Acceptance, RealisedGain, StepTimes, kind_of
from twostroke.types import MOST_DRAFTED, UNWRITTEN, Plan, RequestState, Result, WorkKind

STREAMS = {"cpu": 2, "cuda": 32}  # with more streams nothing is guessed: some loads lost by it (docs/speculation.md)
GAIN = 1.1  # least predicted gain in tokens per second
WITHOUT_EVERY = 32  # steps that could draft: one of so many does not
TRY_EVERY = 64  # steps with long matches that do not pay: one of so many tries them; fewer where streams are many
TRIED = 3  # most guesses of such a try
TRY_LOSS = 0.25  # of a step's time: a try has fewer guesses where it would take so much longer
TRY_COST = 0.003  # of the time of steps without guesses: more than this is not spent on tries
LONG_KIND = kind_of(8)  # of matches that are worth a try
LEARN_EVERY = 4  # steps without guesses: the time of one of so many is kept
HELD = 16  # plans for which it holds that guesses do not pay, unless some are verified meanwhile
UNREADY = 4  # plans without guesses after a step that could not verify them yet
REST = 4  # plans, of which one looks at the texts where even long matches do not pay
UNLIKELY = 0.02  # chance of a guess below which it is not made


Forced = Callable[[RequestState], Sequence[int]]  # the tokens that a request's grammar leaves no choice about


def make_drafter(
    speculate: str,
    device: str,
    forced: Forced,
    draft_share: float | None = None,
    longest: Callable[[], float] = lambda: inf,
) -> Speculation | None:
    """The drafter for a setting. draft_share: None where there is no draft model, else its weights as a share of the
    target's. longest: seconds that a step with guesses may take."""
    by_text = speculate in ("auto", "lookup")
    by_model = speculate in ("auto", "draft") and draft_share is not None
    if not by_text and not by_model:
        return None
    model = ModelDrafts(draft_share) if by_model and draft_share is not None else None
    return Speculation(forced, STREAMS[device] if by_text else 0, model, STREAMS[device], longest)


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


def has_grammar(request: RequestState) -> bool:
    return request.params.grammar is not None


def is_ready(request: RequestState) -> bool:
    """Whether the draft model has read enough to write in the next step."""
    return len(request.tokens) - request.drafted <= READY


def proposals(kinds: dict[int, int], chances: Sequence[tuple[float, int]], speed: float) -> dict[int, Proposal]:
    """kinds: of each request's guesses; chances: of the guesses that are taken, with the request's id."""
    of: dict[int, list[float]] = {}
    for chance, name in chances:
        of.setdefault(name, []).append(chance)
    return {name: Proposal(kinds[name], len(taken), sum(taken), speed) for name, taken in of.items()}


class Speculation:
    """The drafter of a scheduler."""

    def __init__(
        self,
        forced: Forced = never_forced,
        text_streams: int = STREAMS["cpu"],
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
        self.times = StepTimes()  # of steps without guesses
        self.verified = StepTimes()  # of steps with guesses
        self.realised: dict[int, RealisedGain] = {}  # by doublings of streams
        self.streams = self.rows = self.chances = self.declined = self.plain = 0
        self.patience = float(TRY_EVERY)  # plans between two tries of guesses that do not pay
        self.tried = TRIED  # guesses of a try, for each stream
        self.context = 0  # tokens before the rows of the last step, all streams together
        self.size: tuple[int, int] | None = None  # of the context, and streams, to which the times belong
        self.tokens = 0.0  # expected of the step that is being planned
        self.drafting = 0.0  # seconds of the draft model in it
        self.without = self.counted = False  # this plan goes without guesses; it was counted among the chances
        self.trying = False  # guesses that do not pay are due to be tried
        self.on_try = False  # the last guesses were such
        self.refused: tuple[int, dict[int, int]] | None = None  # streams and kinds of guesses that did not pay,
        self.held = 0  # for so many plans more
        self.resting = 0  # plans in which no text is looked at
        self.unready = 0  # plans without guesses: the runner prepares for them
        self.texts: dict[int, Proposal] = {}  # guesses from the text that pay together, by the request's id
        self.on_trial = False  # a draft model that does not seem to pay writes for one of the streams

    # ---- a plan ------------------------------------------------------------------------------------------------------

    def begin(self, streams: Sequence[RequestState]) -> bool:
        """A plan is being made: each stream writes one token. False: nothing is guessed in it."""
        count = len(streams)
        self.streams, self.rows, self.tokens, self.drafting, self.texts = count, count, float(count), 0.0, {}
        self.without, self.counted = self.chances % WITHOUT_EVERY == WITHOUT_EVERY - 1, False
        if count > self.most_streams or not self._realised(count).allows():
            return False
        if self.unready:
            self.unready -= 1
            return False
        if (size := (self.context // NEAR, count)) != self.size:
            self.size = size
            self.times.at(self.context)
            self.verified.at(self.context, count)
        if self.model is not None:
            chosen = self.model.chosen = self._for_all(self.model, count)
            self.drafting = chosen.seconds if count > 1 else 0.0  # one stream pays for its own passes
            self.on_trial = any(self._is_on_trial(request) for request in streams)
        if count <= self.text_streams and not self._rests():
            self.texts = self._from_texts(streams)
        return bool(self.texts) or self.model is not None or any(map(has_grammar, streams))

    def waits(self) -> bool:
        """Whether a plan should wait for results in flight: guesses would pay, or are due to be tried."""
        return bool(self.texts) or (self.model is not None and (self.model.chosen.length > 0 or self.on_trial))

    def _from_texts(self, streams: Sequence[RequestState]) -> dict[int, Proposal]:
        """The guesses from the streams' own texts that bring the whole step most tokens per second, if that is enough.
        Those that are kept most likely come first: however many are taken, no other choice of so many brings more."""
        kinds = dict[int, int]()
        for request in streams:
            if request.params.speculate and (match := self._known(request).lookup.update(request.tokens)):
                kinds[request.id] = kind_of(match)
        alone = self.times.predict(self.streams) if kinds else None
        if alone is None:
            return {}
        if not self._is_refused(kinds):
            chances = sorted(self._chances_of(kinds), reverse=True)
            taken, speed = self._fastest([chance for chance, _ in chances], alone)
            if taken:
                return proposals(kinds, chances[:taken], speed)
            self.refused, self.held = (self.streams, kinds), HELD
            self._price_tries(len(kinds), alone)
        if max(kinds.values()) < LONG_KIND:
            return {}
        if not self._is_due():
            self.resting = REST - 1
            return {}
        return {name: Proposal(kind, self.tried, 0.0, 0.0) for name, kind in kinds.items() if kind >= LONG_KIND}

    def _rests(self) -> bool:
        """Long matches did not pay a moment ago. Looking at the texts again costs a share of a short step."""
        if not self.resting or self.refused is None or self.refused[0] != self.streams:
            return False
        self.resting -= 1
        self.held -= 1
        self.declined += 1
        return True

    def _is_refused(self, kinds: dict[int, int]) -> bool:
        """Such guesses do not pay, as a plan before has found: finding it out costs a share of a short step."""
        self.held -= 1
        return self.held > 0 and self.refused == (self.streams, kinds)

    def _chances_of(self, kinds: dict[int, int]) -> Iterator[tuple[float, int]]:
        """The chance of each guess that could be made, with the request's id."""
        for name, kind in kinds.items():
            for chance in self._chances(self.of[name].acceptance.rate(kind)):
                yield chance, name

    def _fastest(self, chances: list[float], alone: float) -> tuple[int, float]:
        """How many of the guesses make the step fastest, and its tokens per second; 0: without them it is as fast.
        alone: seconds of a step without guesses."""
        seconds = self._seconds_of(self.streams + 1 + np.arange(len(chances)), self.streams, alone)
        allowed = int(np.searchsorted(seconds, self.longest(), "right"))
        if not allowed:
            return 0, 0.0
        speeds = (self.streams + np.cumsum(chances[:allowed])) / seconds[:allowed]
        best = int(speeds.argmax())
        pays = speeds[best] > GAIN * self.streams / alone
        return (best + 1, float(speeds[best])) if pays else (0, 0.0)

    def _chances(self, rate: float) -> Iterator[float]:
        """That the first, the second, … guess of a request is kept."""
        chance = 1.0
        for _ in range(MOST_DRAFTED):
            chance *= rate
            if chance < UNLIKELY:
                return
            yield chance

    def propose(self, request: RequestState, most: int) -> Sequence[int]:
        """The guesses of the source from which the step gains most: the grammar, the request's own tokens, or the draft
        model."""
        text = self.texts.get(request.id)
        forced = self.forced(request) if request.params.grammar is not None else ()
        if text is None and not forced and self.model is None:
            return ()  # most steps of most requests
        known, most = self._known(request), min(most, MOST_DRAFTED)
        offers = [] if text is None else [text._replace(length=min(text.length, most))]
        if forced:
            offers.append(self._choose(known.acceptance, FORCED, min(most, len(forced))))
        ready = self.model is not None and is_ready(request)
        if ready:
            offers.append(self._choose_model(request, known, most))
        best = max((one for one in offers if one.length), key=self._worth, default=Proposal(0, 0, 0.0, 0.0))
        if not best.length:
            if ready and known.trials and most:
                known.trials -= 1
                best = Proposal(MODEL, min(most, TRIED), 0.0, 0.0)
        else:
            self.chances += not self.counted
            self.counted = True
            if self.without:
                return ()
        return self._take(request, known, best, forced)

    def _is_on_trial(self, request: RequestState) -> bool:
        known = self.of.get(request.id)
        return known is not None and known.trials > 0 and is_ready(request)

    def _worth(self, offer: Proposal) -> float:
        """What an offer is worth: for one stream its speed, with what its guesses cost. Several streams share that
        cost: there the tokens count."""
        return offer.speed if self.streams == 1 else offer.gained

    def _is_due(self) -> bool:
        """Once in a while guesses are verified although they do not pay. A plan that waits for a step in flight is made
        again, so a try stays due until it is made."""
        if not self.trying:
            self.declined += 1
            self.trying = self.declined >= self.patience
        if self.trying:
            self.declined = 0
        return self.trying

    def _price_tries(self, streams: int, alone: float) -> None:
        """Guesses of a try for so many streams, and plans between two tries: the more, the longer such a step takes."""
        rows = self.streams + streams * np.arange(1, TRIED + 1)
        lost = self._seconds_of(rows, self.streams, alone) / alone - 1
        self.tried = max(1, int(np.searchsorted(lost, TRY_LOSS, "right")))
        self.patience = max(TRY_EVERY * max(1, self.streams // 4), float(lost[self.tried - 1]) / TRY_COST)

    def _take(self, request: RequestState, known: Guessing, best: Proposal, forced: Sequence[int]) -> Sequence[int]:
        known.kind, count = best.kind, best.length
        self.tokens += best.gained
        self.trying = self.trying and not count
        draft: Sequence[int]
        if not count:
            return ()
        self.on_try = not best.gained
        if best.kind == MODEL:
            draft = (UNWRITTEN,) * count
            if self.streams == 1 and self.model is not None:
                self.drafting = float(np.max(self._model_seconds(self.model, request, count)))
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

    def _seconds_of(self, rows: np.ndarray, streams: int, alone: float) -> np.ndarray:
        """Predicted of steps with guesses and so many rows. alone: of a step without."""
        known = self.verified.predict_all(rows, (streams, alone))
        if known is None:
            known = self.times.predict_all(rows, (streams, alone))
        assert known is not None, "`alone` was predicted from measured times"
        return known

    def _choose(self, acceptance: Acceptance, kind: int, most: int, drafting: np.ndarray | float = 0.0) -> Proposal:
        """The count with the most expected tokens per second. drafting: seconds for writing 1, 2, … guesses."""
        alone = self.times.predict(self.streams)
        if alone is None or most < 1:
            return Proposal(kind, 0, 0.0, 0.0)
        before = alone if self.rows <= self.streams else self._seconds_of(np.array([self.rows]), self.streams, alone)[0]
        least = 1 + (GAIN - 1) / max(1.0, self.streams / 2)  # one stream's part of the gain
        counts = np.arange(1, most + 1)
        gained = np.cumsum(acceptance.rate(kind) ** counts)
        seconds = self._seconds_of(self.rows + counts, self.streams, alone) + self.drafting + drafting
        speeds = np.where(seconds <= self.longest(), (self.tokens + gained) / seconds, 0.0)
        best, enough = int(speeds.argmax()), least * self.tokens / (before + self.drafting)
        if speeds[best] <= enough:
            return Proposal(kind, 0, 0.0, enough)
        return Proposal(kind, best + 1, float(gained[best]), float(speeds[best]))

    def _choose_model(self, request: RequestState, known: Guessing, most: int) -> Proposal:
        """One stream pays for its passes. Several share them: what the whole step pays for was chosen before."""
        assert self.model is not None
        if self.streams == 1:
            return self._choose(known.acceptance, MODEL, most, self._model_seconds(self.model, request, most))
        return self._choose(known.acceptance, MODEL, min(most, self.model.chosen.length))

    def _for_all(self, model: ModelDrafts, streams: int) -> DraftLength:
        alone = self.times.predict(streams)
        if alone is None or not streams:
            return DraftLength(0)
        steps = self._seconds_of(streams * np.arange(2, MOST_DRAFTED + 2), streams, alone)
        return model.choose(
            streams, self.acceptance.rate(MODEL), alone, steps, gain=GAIN, longest=self.longest()
        )  # fmt: skip

    def _model_seconds(self, model: ModelDrafts, request: RequestState, most: int) -> np.ndarray | float:
        """Seconds of writing 1, 2, … guesses for one stream."""
        alone, missed = self.times.predict(self.streams), len(request.tokens) - request.drafted
        return inf if alone is None else model.draft_seconds(1, np.arange(1, most + 1), missed, alone)

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
        enough = CAUGHT_UP if known.catching_up else READY  # what it has not read makes the next draft longer
        if model is None or not request.params.speculate or missed <= enough:
            known.catching_up, known.missed = False, 0.0
            return False
        known.missed += model.chosen.saved
        alone = self.times.predict(self.streams)
        if not known.catching_up and alone is not None:
            known.catching_up = known.missed > model.pass_seconds(missed, alone)
        return known.catching_up

    # ---- what was measured -------------------------------------------------------------------------------------------

    def learn(self, plan: Plan, result: Result, seconds: float, elapsed: float) -> None:
        """Learn from a step that was collected. Beside many streams nothing is guessed, so nothing is learnt there.
        Steps with guesses are made one at a time, so the host's time is part of theirs."""
        works = plan.works
        if not result.verified:
            self.unready, self.trying = UNREADY, self.trying or self.on_try  # a try that has not been made stays due
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
        if not result.settled:
            return
        if guessed and (alone := self.times.predict(len(works))) is not None:
            self._realised(len(works)).add(alone * kept / len(works), elapsed)
        passes = sum(taken for _, taken in result.passes)
        if guessed:
            self.verified.add(rows, elapsed - passes)
            return
        self.plain += 1
        if self.plain % LEARN_EVERY == 0 or not self.times.is_full(rows):
            self.times.add(rows, seconds - passes)

    def _realised(self, streams: int) -> RealisedGain:
        size = streams.bit_length()
        if size not in self.realised:
            self.realised[size] = RealisedGain(SHARED_GAIN if streams > 1 else 1.0)
        return self.realised[size]

    def _count(self, request: RequestState, drafted: int, accepted: int) -> None:
        known, self.held = self.of.get(request.id), 0
        if known is not None:
            self.acceptance.add(known.kind, drafted, accepted)
            known.acceptance.add(known.kind, drafted, accepted)

    def forget(self, request: RequestState) -> None:
        if self.of.pop(request.id, None) is not None and self.text_streams:
            self.earlier.add(request.salt, request.tokens, request.prompt_length)
