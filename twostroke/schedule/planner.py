"""Makes one plan: running streams first, then prompts in the order of the policy, within the budgets. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from twostroke.kv.lending import copied_out
from twostroke.ops.interface import BLOCK
from twostroke.schedule.draft_rows import choose_guesses, read_for_draft
from twostroke.types import DraftWork, RequestState, Status, Work, WorkKind

if TYPE_CHECKING:
    from twostroke.schedule.scheduler import Scheduler

TAIL_FROM = 16  # smallest chunks: a shorter last part of a prompt is computed in one step, also for another engine
WRITE = WorkKind.WRITE  # looked up once: every stream of every step needs it


class Planner:
    """One plan in the making: the works so far and what is left of the budget."""

    def __init__(self, scheduler: Scheduler, now: float):
        self.scheduler = scheduler
        self.tables = scheduler.tables
        self.now = now
        self.works: list[Work] = []
        self.streams: list[RequestState] = []  # running: at most their newest token is left to compute
        self.prompts: list[RequestState] = []  # running: more is left, or the whole of a prompt
        together = scheduler.together
        reading = together.reading
        for request in scheduler.running.values():
            start = request.computed + request.in_flight
            stream = start >= request.prompt_length and start >= len(request.tokens) - 1
            if not (stream and reading and together.waits(request)):
                (self.streams if stream else self.prompts).append(request)
        self.pauses = False  # nothing is planned before a step in flight has ended
        self.drafting = False  # whether streams may guess
        self.guesses: list[tuple[int, tuple[int, ...]]] = []  # of the work at this place; they have rows, but no blocks
        self.promised: list[int] = []  # blocks published before their content is there
        self.drafts: list[DraftWork] = []
        self.filled: list[int] = []  # blocks that the draft model has promised to compute
        self.draft_rows_left = scheduler.limits.max_batch_tokens
        self.seconds_read = 0.0  # at most, by the draft model to catch up with streams
        self.tokens_left = scheduler.limits.max_batch_tokens
        self.seconds_left: float | None = None  # of prompt work; None: no stream is waiting for this step
        self.chunks = 0

    def fill(self) -> Self:
        """Works for streams and prompts, in the order of the policy."""
        scheduler = self.scheduler
        if scheduler.suspects:
            self.add_suspect(scheduler.suspects)
        elif self.waits():
            self.pauses = True
        elif scheduler.policy.prompts_first:
            self.add_prompts()
            self.add_streams()
        else:
            self.add_streams()
            self.add_prompts()
        return self

    def waits(self) -> bool:
        """Whether nothing is planned now: guesses are being verified; or streams have a step in flight, and a draft
        continues its unknown token; or the draft model is reading a prompt, of which it reads one part after the other.
        Where nothing is drafted, the next step is planned while one runs."""
        drafter = self.scheduler.drafter
        if self.scheduler.verifying:
            return True
        if drafter is None:
            return False
        self.drafting = drafter.begin(self.streams)
        if self.tables.drafting and any(request.in_flight and drafter.reads(request) for request in self.prompts):
            return True
        return self.drafting and drafter.waits() and any(request.in_flight for request in self.streams)

    def add_streams(self) -> None:
        """Every running stream advances by one. Guesses share the rows that are left."""
        scheduler, tables, drafting = self.scheduler, self.tables, self.drafting
        if tables.pool.available < len(self.streams) * len(tables.windows):
            # Requests that would be preempted first are planned last.
            self.streams.sort(key=worth_keeping, reverse=True)
        running, works, budget = scheduler.running, self.works, self.tokens_left
        add, make, guessing = works.append, tuple.__new__, list[int]()
        for request in self.streams:
            if budget < 1:
                break
            in_flight, known = request.in_flight, len(request.tokens)
            start = request.computed + in_flight
            # Steps in flight bring it to its limit, or it is already one unknown token ahead.
            if start > known or known + (start == known) >= request.limit or request.id not in running:
                continue
            if start % BLOCK == 0 and not self._make_room(request, start + 1):
                continue
            if drafting and not in_flight:
                guessing.append(len(works))
            add(make(Work, (request, start, 1, WRITE, ())))  # a third sooner than Work(...): every stream needs one
            request.in_flight = in_flight + 1
            budget -= 1
        scheduler.counters.computed_tokens += self.tokens_left - budget
        self.tokens_left = budget
        for index in guessing:
            choose_guesses(self, index)

    def add_prompts(self) -> None:
        """Prompts that are under way and prompts that wait, merged in the order of the policy."""
        scheduler = self.scheduler
        if not (self.prompts or scheduler.waiting):
            scheduler.batch_open = False
            return
        key = scheduler.policy.key
        if self.works:
            rows = sum(work.count for work in self.works) + sum(len(draft) for _, draft in self.guesses)
            self.seconds_left = scheduler.pace.allowance(scheduler.policy.gentle, rows) - self.seconds_read
        started = sorted((r for r in self.prompts if r.id in scheduler.running), key=key)
        waiting = self._admissible()
        shares = scheduler.shares()
        while (started or waiting) and self._has_budget():
            if started and (not waiting or key(started[0]) <= key(waiting[0])):
                request = started.pop(0)
                if request.id in scheduler.running:
                    self._add_chunk(request)
            else:
                request = waiting.pop(0)
                if shares.full(request.key):
                    continue  # the slots that are left are for other keys
                if not scheduler.admit(request):
                    waiting = []
                    scheduler.batch_open = False
                    continue
                shares.take(request.key)
                if not self._add_chunk(request):
                    waiting = []
        if not scheduler.waiting:
            scheduler.batch_open = False

    def add_suspect(self, suspects: dict[int, int]) -> None:
        """Plan the first suspect alone, and only when nothing else is in flight."""
        scheduler = self.scheduler
        if any(request.in_flight for request in (*scheduler.running.values(), *scheduler.leaving.values())):
            return
        first = next(iter(suspects))
        request = scheduler.running.get(first) or next(r for r in scheduler.waiting if r.id == first)
        if request.status is Status.WAITING and not scheduler.admit(request):
            for victim in sorted(scheduler.running.values(), key=worth_keeping):
                scheduler.preempt(victim)
                if scheduler.admit(request):
                    break
        if request.status is Status.RUNNING:
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
        """Add as much of the prompt as the budget allows. False if it allows none."""
        scheduler, start = self.scheduler, request.start
        want = len(request.tokens) - start
        if want <= 0:
            return True
        count = self._affordable(request, start, want)
        if count == want and copied_out(request.request):
            count = self._up_to_tail(start, want)
        if count < 1 or not self._make_room(request, start + count):
            return False
        self._add(request, start, count)
        drafter = scheduler.drafter
        if self.tables.drafting and drafter is not None and request.drafted >= start - BLOCK and drafter.reads(request):
            read_for_draft(self, request, start + count)
        self.chunks += 1
        if self.seconds_left is not None:
            self.seconds_left -= scheduler.pace.seconds(start, count, request.scores_prompt)
        return True

    def _affordable(self, request: RequestState, start: int, want: int) -> int:
        if not self.scheduler.limits.chunked:
            return want if want <= self.tokens_left or self.chunks == 0 else 0
        count = min(want, self.tokens_left)
        if self.seconds_left is not None:
            count = self.scheduler.pace.affordable(start, count, self.seconds_left, request.scores_prompt)
        return count

    def _up_to_tail(self, start: int, want: int) -> int:
        """How many tokens to compute of the last part of a prompt whose blocks another engine wants: those up to its
        last full block. These blocks travel while the next step computes the few tokens after them, so hardly any bytes
        follow the first token. All of it where the prompt is short: there the second step costs more than the
        transfer."""
        unit = self.tables.unit
        body = (start + want - 1) // unit * unit - start
        worth = self.scheduler.limits.chunked and not self.tables.windowed and not self.tables.layout.state_bytes
        return body if worth and body >= TAIL_FROM * self.scheduler.pace.min_chunk else want

    def _add(self, request: RequestState, start: int, count: int) -> None:
        self.works.append(Work(request, start, count, WorkKind.READ))
        self.tokens_left -= count
        request.in_flight += count
        self.scheduler.counters.computed_tokens += count
        if start < request.prompt_length:
            request.timeline.chunks += 1
            request.facts_changed = True
        self.promised += self.tables.publish(request, start + count)
        if request.timeline.scheduled is None:
            request.timeline.scheduled = self.now

    def _make_room(self, request: RequestState, length: int) -> bool:
        """Grow the request's tables, preempting the request that loses least. False if the request itself must wait."""
        scheduler = self.scheduler
        while not self.tables.grow(request, length):
            victim = min((r for r in scheduler.running.values() if not r.in_flight), key=worth_keeping, default=None)
            if victim is None:
                return False
            scheduler.preempt(victim)
            if victim is request:
                return False
        return True


def worth_keeping(request: RequestState) -> tuple[int, int, int]:
    """Smallest first: the least important, then the one that loses least, then the youngest."""
    return (-request.params.priority, request.computed, -request.id)
