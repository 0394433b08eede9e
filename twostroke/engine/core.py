"""The engine's step: plan → run → commit. Synchronous, and the only place where the three meet."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from twostroke.metrics.counts import Counts
from twostroke.metrics.steplog import RawStep, StepLog
from twostroke.schedule.scheduler import Scheduler
from twostroke.types import Event, Plan, Request, RequestState, Result, Runner

log = logging.getLogger(__name__)


class InFlight(NamedTuple):
    plan: Plan
    handle: Any
    launched: float


class Core:
    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        clock: Callable[[], float] = time.perf_counter,
        steplog: StepLog | None = None,
    ):
        self.scheduler = scheduler
        self.runner = runner
        self.clock = clock
        self.steplog = steplog
        self.in_flight: deque[InFlight] = deque()
        self.collected = 0.0  # when the last step was collected

    def submit(self, request: Request) -> RequestState:
        state = RequestState(request)
        self.scheduler.add(state)
        return state

    def abort(self, request_id: int) -> Event | None:
        """End a request. None if it has ended already."""
        state = self.scheduler.find(request_id)
        return None if state is None else self.scheduler.abort(state, self.clock())

    @property
    def idle(self) -> bool:
        return self.scheduler.idle and not self.in_flight

    def counts(self) -> Counts:
        """Totals since the start, and the requests and KV blocks now."""
        c, tables = self.scheduler.counters, self.scheduler.tables
        pool, host = tables.pool, tables.pool.host
        kept = 0 if host is None else len(host.slot_of)
        moved = (0, 0) if host is None else (host.offloaded, host.restored)
        return Counts(
            c.steps, c.prompt_tokens, c.cached_tokens, c.computed_tokens, c.output_tokens, c.preemptions,
            c.recomputed_tokens, c.drafts, c.drafted_tokens, c.accepted_tokens,
            len(self.scheduler.running), len(self.scheduler.waiting), pool.total, len(pool.free), len(pool.cached),
            kept, kept * tables.layout.block_bytes, *moved, tuple(c.accepted_at),
        )  # fmt: skip

    def step(self) -> list[Event]:
        """Launch the next plan, and collect the oldest one once as many run as the runner allows."""
        now = self.clock()
        plan = self.scheduler.plan(now)
        try:
            if plan.works:
                self.in_flight.append(InFlight(plan, None, now))
                self.in_flight[-1] = InFlight(plan, self.runner.launch(plan), now)
            if not self.in_flight or (plan.works and len(self.in_flight) < self.runner.depth):
                return []
            oldest = self.in_flight[0]
            result = self.runner.collect(oldest.handle)
        except Exception as error:
            log.exception("a step of %d requests failed", len(plan.works))
            return self._fail(f"{type(error).__name__}: {error}")
        self.in_flight.popleft()
        now = self.clock()
        elapsed = now - max(oldest.launched, self.collected)  # a step that waited for the one before is not slower
        seconds = elapsed if result.seconds is None else result.seconds
        self.collected = now
        if self.steplog is not None:
            self.steplog.add(describe(oldest, result, seconds, self.scheduler))
        return self.scheduler.commit(oldest.plan, result, now, seconds, elapsed)

    def _fail(self, error: str) -> list[Event]:
        plans = [flight.plan for flight in self.in_flight]
        self.in_flight.clear()
        return self.scheduler.fail(plans, error, self.clock())


def describe(flight: InFlight, result: Result, seconds: float, scheduler: Scheduler) -> RawStep:
    """A collected step as the log keeps it: numbers only, so that it keeps no request alive."""
    plan, launched = flight.plan if result.verified else flight.plan.undrafted(), flight.launched
    works = tuple([(work.request.id, work.start, work.count, work.kind) for work in plan.works])
    pool = scheduler.tables.pool
    free, cached = len(pool.free), len(pool.cached)
    on_host = 0 if pool.host is None else len(pool.host.slot_of)
    blocks = (free, pool.total - free - cached, cached, pool.shared, on_host)
    sampled = len(result.tokens) - result.tokens.count(())
    return plan.number, launched, seconds, works, sampled, blocks, len(scheduler.running), len(scheduler.waiting)
