"""Who computes what in the next step. One scheduler for prefill, chunks, decode and mixed batches. Torch-free.

`plan` lets every running stream advance by one, then spends what is left of the token budget on prompts, in the order
of the policy. `commit` takes the step's result in. `fail` takes a step back that raised. Nothing else changes state,
and every request that was added gets exactly one event with a finish reason.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from twostroke.kv.tables import KVTables
from twostroke.ops.interface import BLOCK
from twostroke.schedule.pace import Pace
from twostroke.schedule.policy import Policy
from twostroke.types import Details, Event, FinishReason, Plan, RequestState, Result, Status, Work

WATERMARK = 0.01  # of the pool kept free at admission, so that streams can grow before someone is preempted
NOTHING = Details()


@dataclass(frozen=True, slots=True)
class Limits:
    max_batch_tokens: int  # tokens of one step
    max_requests: int  # requests running at once
    chunked: bool = True  # False: a prompt runs in one step, over the budget if it must
    static: bool = False  # admit only into an empty batch: the baseline that shows what continuous batching buys


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


class Scheduler:
    def __init__(self, tables: KVTables, limits: Limits, policy: Policy, pace: Pace):
        self.tables = tables
        self.limits = limits
        self.policy = policy
        self.pace = pace
        self.waiting: list[RequestState] = []  # sorted by the policy's key
        self.running: dict[int, RequestState] = {}  # by id, in order of admission
        self.leaving: dict[int, RequestState] = {}  # finished, but a step in flight still writes their blocks
        # Part of a step that raised, by id: each is tried alone until it has computed so many tokens again.
        self.suspects: dict[int, int] = {}
        self.published: dict[int, list[int]] = {}  # plan number -> blocks whose content it promised
        self.batch_open = True  # static batching: whether the batch still takes requests
        self.plans = 0
        self.counters = Counters()

    # ---- requests come and go --------------------------------------------------------------------------------------

    def add(self, request: RequestState) -> None:
        request.status = Status.WAITING
        insort(self.waiting, request, key=self.policy.key)

    def find(self, request_id: int) -> RequestState | None:
        """A request that has not ended, by its id."""
        running = self.running.get(request_id)
        return running or next((request for request in self.waiting if request.id == request_id), None)

    def abort(self, request: RequestState, now: float) -> Event | None:
        """End a request wherever it is. None if it has already ended."""
        if request.status is Status.FINISHED:
            return None
        return self._finish(request, FinishReason.ABORT, now)

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.running or self.leaving)

    # ---- plan ------------------------------------------------------------------------------------------------------

    def plan(self, now: float) -> Plan:
        self.plans += 1
        draft = _Draft(self, now)
        if self.suspects:
            draft.add_suspect(self.suspects)
        elif self.policy.prompts_first:
            draft.add_prompts()
            draft.add_streams()
        else:
            draft.add_streams()
            draft.add_prompts()
        if draft.promised:
            self.published[self.plans] = draft.promised
        host = self.tables.pool.host
        moves = host.take_moves() if host is not None and draft.works else ()  # an empty plan is not run
        return Plan(self.plans, tuple(draft.works), moves)

    def waiting_in_order(self) -> list[RequestState]:
        if not self.policy.by_cached_prefix:
            return list(self.waiting)
        return sorted(self.waiting, key=lambda r: (-self.tables.match(r).columns, *self.policy.key(r)))

    def admit(self, request: RequestState) -> bool:
        """Move a waiting request into the batch if its whole prompt fits beside what is promised to others."""
        if not self.tables.free_rows or len(self.running) >= self.limits.max_requests:
            return False
        hit = self.tables.match(request)
        step = self.limits.max_batch_tokens if self.limits.chunked else len(request.tokens)
        needed = self.tables.blocks_needed(request, hit, step)
        if self.running:
            needed += int(WATERMARK * self.tables.pool.total) + 1 + self._promised_to_prompts(step)
        if needed > self.tables.pool.available:
            return False
        self.tables.open(request, hit)
        self.waiting.remove(request)
        self.running[request.id] = request
        request.status = Status.RUNNING
        self._count_admission(request)
        return True

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
        del self.running[request.id]
        self.tables.close(request)
        request.computed = 0
        self.add(request)

    # ---- commit ----------------------------------------------------------------------------------------------------

    def commit(self, plan: Plan, result: Result, now: float, seconds: float) -> list[Event]:
        self.published.pop(plan.number, None)
        self.pace.observe(plan, seconds)
        self.counters.steps += 1
        events = []
        for index, (work, tokens) in enumerate(zip(plan.works, result.tokens, strict=True)):
            details = result.details.get(index, NOTHING) if result.details else NOTHING
            event = self._commit_one(work, tokens, details, now)
            if event is not None:
                events.append(event)
        if self.suspects:
            for request, _, _ in plan.works:
                if request.computed >= self.suspects.get(request.id, inf):
                    del self.suspects[request.id]  # it came past what failed, alone: innocent
        return events

    def _commit_one(self, work: Work, tokens: tuple[int, ...], details: Details, now: float) -> Event | None:
        request, _, count = work
        request.in_flight -= count
        if request.status is Status.FINISHED:  # it ended while this step ran
            self._leave(request)
            return None
        if details.error is not None:
            return self._finish(request, FinishReason.ERROR, now, error=details.error)
        request.computed += count
        kept, reason = self._append(request, tokens, now)
        if count > 1 or request.computed % BLOCK == 0:  # else no block became full
            self.tables.publish(request, request.computed)
        if self.tables.windowed:
            self.tables.release_behind(request)
        if reason is not None:
            return self._finish(request, reason, now, kept, details)
        if kept or details.prompt_logprobs:
            facts = request.timeline.facts() if request.facts_changed else None
            request.facts_changed = False
            return Event(request.id, kept, None, details.logprobs, details.prompt_logprobs, None, facts)
        return None

    def _append(
        self, request: RequestState, tokens: tuple[int, ...], now: float
    ) -> tuple[tuple[int, ...], FinishReason | None]:
        known, times = request.tokens, request.timeline.token_times
        for index, token in enumerate(tokens, 1):
            known.append(token)
            times.append(now)
            self.counters.output_tokens += 1
            if token in request.stop_ids and request.output_length > request.params.min_tokens:
                return tokens[:index], FinishReason.STOP
            if len(known) >= request.limit:
                return tokens[:index], FinishReason.LENGTH
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
            del self.running[request.id]
            self.leaving[request.id] = request
        self.suspects.pop(request.id, None)
        request.status = Status.FINISHED
        self._leave(request)
        facts = request.timeline.facts()
        return Event(request.id, tokens, reason, details.logprobs, details.prompt_logprobs, error, facts)

    def _leave(self, request: RequestState) -> None:
        """Free a finished request's blocks, once no step in flight writes them any more."""
        if request.in_flight == 0 and self.leaving.pop(request.id, None) is not None:
            self.tables.close(request)

    # ---- fail ------------------------------------------------------------------------------------------------------

    def fail(self, plans: Sequence[Plan], error: str, now: float) -> list[Event]:
        """Take back steps that raised: all that were in flight. A request that failed alone is to blame and ends;
        others start again, each alone at first, so that a poisoned request cannot take its neighbours with it."""
        broken = {block for plan in plans for block in self.published.pop(plan.number, ())}
        if self.tables.pool.host is not None:
            broken |= self.tables.pool.host.undo(move for plan in plans for move in plan.moves)
        for block in broken:
            self.tables.pool.revoke(block)
        works = [work for plan in plans for work in plan.works]
        ends: dict[int, int] = {}  # how far each of them was to come
        for request, start, count in works:
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
            if self.tables.holds_any(request, broken):  # it was admitted on a promise that was not kept
                self._restart(request)
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
        rows = len(self.running) + len(self.leaving) + len(self.tables.free_rows)
        assert rows == len(self.tables.held), "a row is lost"


class _Draft:
    """One plan in the making: the works so far and what is left of the budget."""

    def __init__(self, scheduler: Scheduler, now: float):
        self.scheduler = scheduler
        self.tables = scheduler.tables
        self.now = now
        self.works: list[Work] = []
        self.streams: list[RequestState] = []  # running: at most their newest token is left to compute
        self.prompts: list[RequestState] = []  # running: more is left, or the whole of a prompt
        for request in scheduler.running.values():
            start = request.computed + request.in_flight
            stream = start >= request.prompt_length and start >= len(request.tokens) - 1
            (self.streams if stream else self.prompts).append(request)
        self.promised: list[int] = []  # blocks published before their content is there
        self.tokens_left = scheduler.limits.max_batch_tokens
        self.seconds_left: float | None = None  # of prompt work; None: no stream is waiting for this step
        self.chunks = 0

    def add_streams(self) -> None:
        """Every running stream advances by one."""
        scheduler, tables = self.scheduler, self.tables
        if tables.pool.available < len(self.streams) * len(tables.windows):
            # Whoever must give way comes last and is not planned yet.
            self.streams.sort(key=_worth_keeping, reverse=True)
        for request in self.streams:
            if self.tokens_left < 1:
                return
            start = request.computed + request.in_flight
            if request.id not in scheduler.running or _is_complete(request, start):
                continue
            if start % BLOCK == 0 and not self._make_room(request, start + 1):
                continue
            self.works.append(Work(request, start, 1))
            request.in_flight += 1
            self.tokens_left -= 1
            scheduler.counters.computed_tokens += 1

    def add_prompts(self) -> None:
        """Prompts that are under way and prompts that wait, merged in the order of the policy."""
        scheduler = self.scheduler
        if not (self.prompts or scheduler.waiting):
            scheduler.batch_open = False
            return
        key = scheduler.policy.key
        if self.works:
            self.seconds_left = scheduler.pace.allowance(scheduler.policy.gentle, len(self.works))
        started = sorted((r for r in self.prompts if r.id in scheduler.running), key=key)
        waiting = self._admissible()
        while (started or waiting) and self._has_budget():
            if started and (not waiting or key(started[0]) <= key(waiting[0])):
                request = started.pop(0)
                if request.id in scheduler.running:
                    self._add_chunk(request)
            else:
                request = waiting.pop(0)
                if not scheduler.admit(request):
                    waiting = []
                    scheduler.batch_open = False
                elif not self._add_chunk(request):
                    waiting = []
        if not scheduler.waiting:
            scheduler.batch_open = False

    def add_suspect(self, suspects: dict[int, int]) -> None:
        """Only the first suspect, alone, and only when nothing else is in flight."""
        scheduler = self.scheduler
        if any(request.in_flight for request in (*scheduler.running.values(), *scheduler.leaving.values())):
            return
        first = next(iter(suspects))
        request = scheduler.running.get(first) or next(r for r in scheduler.waiting if r.id == first)
        if request.status is Status.WAITING and not scheduler.admit(request):
            for victim in sorted(scheduler.running.values(), key=_worth_keeping):
                scheduler.preempt(victim)
                if scheduler.admit(request):
                    break
        self._add_chunk(request)

    def _admissible(self) -> list[RequestState]:
        scheduler = self.scheduler
        if scheduler.limits.static:
            scheduler.batch_open = scheduler.batch_open or not scheduler.running
            if not scheduler.batch_open:
                return []
        return scheduler.waiting_in_order() if scheduler.waiting else []

    def _has_budget(self) -> bool:
        if not self.scheduler.limits.chunked:
            return self.tokens_left > 0 or self.chunks == 0
        return self.tokens_left > 0 and (self.seconds_left is None or self.seconds_left > 0 or self.chunks == 0)

    def _add_chunk(self, request: RequestState) -> bool:
        """As much of the prompt as the budget allows. False if none of it does."""
        start = request.start
        want = len(request.tokens) - start
        if want <= 0:
            return True
        count = self._affordable(start, want)
        if count < 1 or not self._make_room(request, start + count):
            return False
        self._add(request, start, count)
        self.chunks += 1
        if self.seconds_left is not None:
            self.seconds_left -= self.scheduler.pace.seconds(start, count)
        return True

    def _affordable(self, start: int, want: int) -> int:
        if not self.scheduler.limits.chunked:
            return want if want <= self.tokens_left or self.chunks == 0 else 0
        count = min(want, self.tokens_left)
        if self.seconds_left is not None:
            count = self.scheduler.pace.affordable(start, count, self.seconds_left)
        return count

    def _add(self, request: RequestState, start: int, count: int) -> None:
        self.works.append(Work(request, start, count))
        self.tokens_left -= count
        request.in_flight += count
        self.scheduler.counters.computed_tokens += count
        if start < request.prompt_length:
            request.timeline.chunks += 1
            request.facts_changed = True
        if start + count < len(request.tokens) or count > 1:
            self.promised += self.tables.publish(request, start + count)
        if request.timeline.scheduled is None:
            request.timeline.scheduled = self.now

    def _make_room(self, request: RequestState, length: int) -> bool:
        """Grow the request's tables, preempting whoever loses least. False if the request itself must wait."""
        scheduler = self.scheduler
        while not self.tables.grow(request, length):
            victim = min((r for r in scheduler.running.values() if not r.in_flight), key=_worth_keeping, default=None)
            if victim is None:
                return False
            scheduler.preempt(victim)
            if victim is request:
                return False
        return True


def _is_complete(request: RequestState, start: int) -> bool:
    """Steps in flight will bring it to its limit, or it is already one unknown token ahead."""
    known = len(request.tokens)
    return start > known or known + (start == known) >= request.limit


def _worth_keeping(request: RequestState) -> tuple[int, int, int]:
    """Smallest first: the least important, then the one that loses least, then the youngest."""
    return (-request.params.priority, request.computed, -request.id)
