"""Which requests compute which tokens in the next step. Torch-free.

There is one scheduler for prefill, chunks, decode and mixed batches.

`plan` lets every running stream advance by one, then spends what is left of the token budget on prompts, in the order
of the policy. `commit` applies the step's result. `fail` undoes a step that raised an exception. Nothing else changes
state, and every request that was added gets exactly one event with a finish reason.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter as Count
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf

from twostroke.kv.addresses import Name
from twostroke.kv.tables import Hit, KVTables
from twostroke.ops.interface import BLOCK
from twostroke.record import Record
from twostroke.schedule.draft_rows import add_guesses
from twostroke.schedule.keys import Shares, Turns
from twostroke.schedule.pace import MARGIN, Pace
from twostroke.schedule.planner import WRITE, Planner
from twostroke.schedule.policy import Policy
from twostroke.schedule.together import Together, Untold
from twostroke.types import (
    Details,
    Drafter,
    DraftWork,
    Event,
    FinishReason,
    Plan,
    RequestState,
    Result,
    Status,
    Work,
    WorkKind,
)

WATERMARK = 0.01  # of the pool kept free at admission, so that streams can grow before a request is preempted
FINISHED, VERIFY = Status.FINISHED, WorkKind.VERIFY  # looked up once: every work of every step needs them
NOTHING = Details()


class Limits(Record):
    max_batch_tokens: int  # tokens of one step
    max_requests: int  # requests running at once
    chunked: bool = True  # False: a prompt runs in one step, over the budget if it must
    static: bool = False  # admit only into an empty batch: the baseline that shows what continuous batching buys
    key_share: float = 1.0  # most of what other API keys leave of max_requests that one key may have


@dataclass(slots=True)
class Counters:
    """Totals since start."""

    steps: int = 0
    prompt_tokens: int = 0  # of admitted requests, cached or not
    cached_tokens: int = 0
    computed_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    drafts: int = 0  # verified
    drafted_tokens: int = 0
    accepted_tokens: int = 0  # of these, what the model itself chose
    accepted_at: list[int] = field(default_factory=list)  # the same by their place in the draft


class Scheduler:
    def __init__(self, tables: KVTables, limits: Limits, policy: Policy, pace: Pace, together: Together | None = None):
        self.tables = tables
        self.limits = limits
        self.policy = policy
        self.pace = pace
        self.together = together or Together(0.0)
        self.drafter: Drafter | None = None  # proposes tokens that a step verifies
        self.forced: Callable[[RequestState], Sequence[int]] = lambda request: ()  # a grammar's tokens, for drafters
        self.draft_share: float | None = None  # weights of the draft model over the target's; None: there is none
        self.waiting: list[RequestState] = []  # sorted by the policy's key
        self.running: dict[int, RequestState] = {}  # by id, in order of admission
        self.leaving: dict[int, RequestState] = {}  # finished, but a step in flight still writes their blocks
        self.fetching: dict[int, RequestState] = {}  # admitted, and waiting for bytes of blocks from elsewhere
        self.broken: set[int] = set()  # ids of fetching requests that lost a block which they start from
        # Requests of a step that raised, by id: each runs alone until it has computed so many tokens again.
        self.suspects: dict[int, int] = {}
        self.published: dict[int, list[int]] = {}  # plan number -> blocks whose content it promised
        self.filled: dict[int, list[int]] = {}  # the same of the draft model
        self.verifying = 0  # number of a plan in flight with guesses; 0: there is none
        self.turns = Turns()  # of API keys
        self.batch_open = True  # static batching: whether the batch still takes requests
        self.plans = 0
        self.counters = Counters()

    def longest_step(self) -> float:
        """Seconds that a step with drafts may be predicted to take."""
        return MARGIN * self.pace.max_gap

    # ---- add, find, abort ------------------------------------------------------------------------------------------

    def add(self, request: RequestState) -> None:
        request.status = Status.WAITING
        if request.turn < 0:
            request.turn = self.turns.give(request.key)
        insort(self.waiting, request, key=self.policy.key)

    def find(self, request_id: int) -> RequestState | None:
        """A request that has not ended, by its id."""
        running = self.running.get(request_id) or self.fetching.get(request_id)
        return running or next((request for request in self.waiting if request.id == request_id), None)

    def abort(self, request: RequestState, now: float) -> Event | None:
        """End a request wherever it is. None if it has already ended."""
        if request.status is Status.FINISHED:
            return None
        return self._finish(request, FinishReason.ABORT, now)

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.running or self.leaving or self.fetching)

    # ---- plan ------------------------------------------------------------------------------------------------------

    def plan(self, now: float) -> Plan:
        self.plans += 1
        self.together.before_plan(self, now)
        planner = Planner(self, now).fill()
        if self.together.reading and not (planner.works or planner.pauses):  # no room for those prompts
            self.together.release()
            planner = Planner(self, now).fill()
        if planner.guesses and add_guesses(planner):
            self.verifying = self.plans
        if planner.promised:
            self.published[self.plans] = planner.promised
        if planner.filled:
            self.filled[self.plans] = planner.filled
        host = self.tables.pool.host
        moves = host.take_moves() if host is not None and planner.works else ()  # an empty plan is not run
        return Plan(self.plans, tuple(planner.works), moves, tuple(planner.drafts))

    def waiting_in_order(self) -> list[RequestState]:
        if not self.policy.by_cached_prefix:
            return list(self.waiting)
        return sorted(self.waiting, key=lambda r: (-self.tables.match(r).columns, *self.policy.key(r)))

    def shares(self) -> Shares:
        """The shares of the API keys in the batch."""
        held = Count(request.key for request in (*self.running.values(), *self.fetching.values()))
        return Shares(self.limits.key_share, self.limits.max_requests, held)

    def admit(self, request: RequestState) -> bool:
        """Move a waiting request into the batch if its whole prompt fits beside what is promised to others."""
        if not self._open(request):
            return False
        self.running[request.id] = request
        request.status = Status.RUNNING
        self._count_admission(request)
        return True

    def _open(self, request: RequestState) -> bool:
        """Give a waiting request a row and the cached blocks it starts from. What is found is held before anything is
        evicted for the rest."""
        if not self.tables.free_rows or len(self.running) + len(self.fetching) >= self.limits.max_requests:
            return False
        hit = self.tables.match(request)
        while self.needed(request, hit) > self.tables.pool.available:
            if self.running or self.fetching or self.leaving or self.tables.lent.reading:
                return False
            if not self.tables.lent.take_back_oldest():
                return False
            hit = self.tables.match(request)
        self.tables.open(request, hit)
        self.waiting.remove(request)
        self.turns.take(request.turn)
        return True

    def needed(self, request: RequestState, hit: Hit) -> int:
        """Blocks for its prompt, and some for streams and prompts that are in the batch already."""
        step = self.limits.max_batch_tokens if self.limits.chunked else len(request.tokens)
        needed = self.tables.blocks_needed(request, hit, step)
        if self.running:
            needed += int(WATERMARK * self.tables.pool.total) + 1 + self._promised_to_prompts(step)
        return needed

    # ---- blocks from elsewhere ---------------------------------------------------------------------------------------

    def expect(self, request: RequestState, tokens: int) -> list[tuple[Name, int]] | None:
        """Admit a waiting request whose first `tokens` tokens were computed elsewhere. It gets blocks for them and
        waits in FETCHING. Returns the blocks to be filled with their names; None: there is no room now."""
        tokens = min(tokens, len(request.tokens) - 1)
        if not self.tables.divisible:
            tokens -= tokens % self.tables.unit
        if self.shares().full(request.key) or not self._open(request):
            return None
        if tokens <= request.computed or not self.tables.grow(request, tokens):
            tokens = request.computed
        request.status = Status.FETCHING
        request.in_flight = tokens - request.computed  # until their bytes arrive, no other request gets these blocks
        self.fetching[request.id] = request
        return self.tables.unfilled(request, tokens - tokens % self.tables.unit)

    def arrived(self, request: RequestState, count: int, filled: Sequence[int] = ()) -> None:
        """The bytes of `count` tokens have arrived, and no more will: the request continues after them and computes
        the others. filled: the draft model's blocks among them."""
        del self.fetching[request.id]
        request.in_flight = 0
        if request.status is Status.FINISHED:  # it ended meanwhile
            self._leave(request)
            return
        request.status = Status.RUNNING
        self.running[request.id] = request
        if request.id in self.broken:
            self.broken.remove(request.id)
            self._restart(request)
            return
        if count:
            request.computed += count
            self.tables.pool.filled.update(filled)
            self.tables.count_filled(request)
            self.tables.release_behind(request)  # blocks behind a window were not fetched: they get no name
            self.tables.publish(request, request.computed)
        self._count_admission(request)

    def _promised_to_prompts(self, step: int) -> int:
        """Blocks that admitted prompts will still take."""
        return sum(
            self.tables.missing(request, min(len(request.tokens), request.start + step))
            if any(self.tables.windows)
            else self.tables.missing(request, len(request.tokens))
            for request in self.running.values()
            if request.start < len(request.tokens) - 1
        )

    def _count_admission(self, request: RequestState) -> None:
        timeline, hit = request.timeline, request.computed
        if timeline.scheduled is None:
            timeline.cached_tokens = hit
            self.counters.prompt_tokens += request.prompt_length
            self.counters.cached_tokens += hit
        again = max(0, request.lost - hit)
        timeline.recomputed_tokens += again
        request.facts_changed = True
        self.counters.recomputed_tokens += again
        request.lost = 0

    def preempt(self, request: RequestState) -> None:
        """Back to the queue with nothing computed; full blocks may still be found by their names."""
        request.timeline.preemptions += 1
        request.facts_changed = True
        self.counters.preemptions += 1
        self._restart(request)

    def _restart(self, request: RequestState) -> None:
        request.lost = max(request.lost, request.computed)
        self.together.let_go(request)
        del self.running[request.id]
        self.tables.close(request)
        request.computed = request.drafted = 0
        self.add(request)

    # ---- commit ----------------------------------------------------------------------------------------------------

    def commit(
        self, plan: Plan, result: Result, now: float, seconds: float, elapsed: float | None = None
    ) -> list[Event]:  # fmt: skip
        """seconds: that the step took; elapsed: with what the host did meanwhile, where that is not part of them."""
        self.published.pop(plan.number, None)
        self.filled.pop(plan.number, None)
        if self.verifying == plan.number:
            self.verifying = 0
        done = plan
        if not result.verified:
            done = plan.undrafted()
            self.counters.computed_tokens -= sum([len(work.draft) for work in plan.works])
        self.pace.observe(done, seconds)
        if self.drafter is not None:
            self.drafter.learn(done, result, seconds, seconds if elapsed is None else elapsed)
        self.counters.steps += 1
        together = self.together
        events, begun, keeps = together.tell(now), list[Untold](), together.longest > 0
        described, written = result.details, 0
        for index, (work, tokens) in enumerate(zip(plan.works, result.tokens, strict=True)):
            found = described.get(index, NOTHING) if described else NOTHING
            event = self._commit_one(work, tokens, found, now, result.verified)
            if event is not None:
                if not (keeps and together.keeps(work, event, begun)):
                    events.append(event)
                written += len(event.token_ids)
        if begun or together.reading:
            events += together.after_step(self, begun, now)
        self.counters.output_tokens += written
        for draft in plan.drafts:
            self._commit_draft(draft)
        if self.suspects:
            for request in (work.request for work in plan.works):
                if request.computed >= self.suspects.get(request.id, inf):
                    del self.suspects[request.id]  # alone it passed the point of failure: it was not the cause
        return events

    def _commit_one(
        self, work: Work, tokens: tuple[int, ...], details: Details, now: float, verified: bool
    ) -> Event | None:  # fmt: skip
        request, _, count, kind, _ = work
        request.in_flight -= count
        if request.status is FINISHED:  # it ended while this step ran
            self._leave(request)
            return None
        if details.error is not None:
            return self._finish(request, FinishReason.ERROR, now, error=details.error)
        # Of a draft only what was kept counts: K and V of the rest lie beyond `computed` and are written again.
        request.computed += len(tokens) if kind is VERIFY else count
        kept, reason = self._append(request, tokens, now)
        if kind is VERIFY:
            self.tables.shorten(request, request.computed)
            if verified:
                self._count_draft(request, count - 1, max(0, len(kept) - 1))
        if kind is not WRITE or request.computed % BLOCK == 0:  # else no block became full
            self.tables.publish(request, request.computed)
        if self.tables.windowed:
            self.tables.release_behind(request)
        if reason is not None:
            return self._finish(request, reason, now, kept, details)
        if kept or details.prompt_logprobs:
            if details is NOTHING and not request.facts_changed:
                return Event(request.id, kept)
            facts = request.timeline.facts() if request.facts_changed else None
            request.facts_changed = False
            return Event(request.id, kept, None, details.logprobs[: len(kept)], details.prompt_logprobs, None, facts)
        return None

    def _commit_draft(self, draft: DraftWork) -> None:
        """What the draft model has computed of the tokens that were kept."""
        request = draft.request
        if request.status is Status.RUNNING:
            request.drafted = min(draft.end, request.computed)
            self.tables.fill(request, draft.start, request.drafted)

    def _count_draft(self, request: RequestState, drafted: int, accepted: int) -> None:
        self.counters.drafts += 1
        self.counters.drafted_tokens += drafted
        self.counters.accepted_tokens += accepted
        places = self.counters.accepted_at
        places.extend([0] * (accepted - len(places)))
        for place in range(accepted):
            places[place] += 1
        request.timeline.drafted_tokens += drafted
        request.timeline.accepted_tokens += accepted

    def _append(
        self, request: RequestState, tokens: tuple[int, ...], now: float
    ) -> tuple[tuple[int, ...], FinishReason | None]:
        known, times, before = request.tokens, request.timeline.token_times, len(request.tokens)
        for token in tokens:
            known.append(token)
            times.append(now)
            if token in request.stop_ids and request.output_length > request.params.min_tokens:
                return tokens[: len(known) - before], FinishReason.STOP
            if len(known) >= request.limit:
                return tokens[: len(known) - before], FinishReason.LENGTH
        return tokens, None

    def _finish(
        self,
        request: RequestState,
        reason: FinishReason,
        now: float,
        tokens: tuple[int, ...] = (),
        details: Details = NOTHING,
        error: str | None = None,
    ) -> Event:
        request.finish_reason = reason
        request.timeline.end = now
        if request.status is Status.WAITING:
            self.waiting.remove(request)
        else:
            self.running.pop(request.id, None)
            self.leaving[request.id] = request
        self.suspects.pop(request.id, None)
        request.status = Status.FINISHED
        if self.drafter is not None:
            self.drafter.forget(request)
        self._leave(request)
        facts = request.timeline.facts()
        scores = details.logprobs[: len(tokens)]
        return self.together.last(Event(request.id, tokens, reason, scores, details.prompt_logprobs, error, facts))

    def _leave(self, request: RequestState) -> None:
        """Free a finished request's blocks, once no step in flight writes them any more."""
        if request.in_flight == 0 and self.leaving.pop(request.id, None) is not None:
            if request.request.lend >= 0:
                self.tables.lent.lend(request, self.published)
            self.tables.close(request)

    # ---- fail ------------------------------------------------------------------------------------------------------

    def fail(self, plans: Sequence[Plan], error: str, now: float) -> list[Event]:
        """Undo all steps in flight, because one of them raised. A request that was alone caused the error and ends.
        Others start again, each alone at first, so that one faulty request does not end its neighbours."""
        self.verifying = 0
        broken = {block for plan in plans for block in self.published.pop(plan.number, ())}
        if self.tables.pool.host is not None:
            broken |= self.tables.pool.host.undo(move for plan in plans for move in plan.moves)
        for block in broken:
            self.tables.pool.revoke(block)
        for plan in plans:
            self.tables.pool.filled.difference_update(self.filled.pop(plan.number, ()))
        works = [work for plan in plans for work in plan.works]
        ends: dict[int, int] = {}  # the position that each should have reached
        for request, start, count, *_ in works:
            request.in_flight -= count
            ends[request.id] = min(start + count, len(request.tokens))
        requests = {work.request.id: work.request for work in works}
        events = []
        for request in requests.values():
            if request.status is Status.FINISHED:
                self._leave(request)
            elif len(requests) == 1:
                events.append(self._finish(request, FinishReason.ERROR, now, error=error))
            else:
                self._restart(request)
                self.suspects[request.id] = max(ends[request.id], self.suspects.get(request.id, 0))
        for request in list(self.running.values()):
            if self.tables.holds_any(request, broken):  # it was admitted with blocks that the step should have filled
                self._restart(request)
        self.broken |= {number for number, r in self.fetching.items() if self.tables.holds_any(r, broken)}
        return events

    # ---- invariants ------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """What must hold between any two calls."""
        self.tables.check()
        for request in self.waiting:
            assert request.status is Status.WAITING and request.computed == 0 and request.row < 0
        for request in self.running.values():
            assert 0 <= request.computed < len(request.tokens), "computed ran past the known tokens"
            assert self.tables.room(request) >= request.start, "blocks do not cover what is computed or planned"
            assert request.drafted <= request.computed, "the draft model is ahead of the target"
        fetching = [request for request in self.fetching.values() if request.status is Status.FETCHING]
        rows = len(self.running) + len(self.leaving) + len(fetching) + len(self.tables.free_rows)
        assert rows == len(self.tables.held), "a row is lost"
