"""The production scheduler on virtual time: a runner that computes nothing and knows how long it would have taken.

A worker here is the engine's own `Core` with a clock that only its runner moves. Steps in which nothing happens but
every stream writing one more token are made many at a time (`Stretch`): what the scheduler would have planned and
committed in them is known beforehand, so only its bookkeeping is done. In other steps most streams are set aside
(parked.py). Tests hold this and one step after another to the same timelines.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from math import inf
from typing import NamedTuple

import numpy as np

from twostroke.config import Resolved
from twostroke.cost.hardware import COLD_LEFT
from twostroke.cost.parked import WRITTEN, Parking, is_stream
from twostroke.cost.roofline import Roofline
from twostroke.engine.core import Core
from twostroke.ops.interface import BLOCK
from twostroke.schedule.make import make_scheduler
from twostroke.schedule.pace import Estimate
from twostroke.schedule.scheduler import Scheduler
from twostroke.types import Event, Plan, Request, RequestState, Result, WorkKind

SHORTEST = 3  # steps below which a stretch is not worth preparing
Jitter = Callable[[float, bool], float]  # what a step takes: as predicted, and whether it reads prompts


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class InRun(NamedTuple):
    done: float  # when the device will have finished it
    tokens: tuple[tuple[int, ...], ...]


class SimulatedRunner:
    """Takes as long as the roofline says. With depth 2 the next plan is made while a step runs, as on a GPU."""

    def __init__(self, roofline: Roofline, clock: Clock, depth: int = 1, jitter: Jitter | None = None):
        self.roofline = roofline
        self.clock = clock
        self.depth = depth
        self.jitter = jitter
        self.busy = 0.0  # when the device is free again
        self.cold = 0.0  # seconds that the next step takes longer if it reads no prompt
        self.others = self.deep = 0  # streams that are in every step without being planned, and their contexts' sum

    def launch(self, plan: Plan) -> InRun:
        chunks: list[tuple[int, int]] = []
        contexts: list[int] = []
        tokens = []
        for work in plan.works:
            if work.kind is WorkKind.READ:
                chunks.append((work.start, work.count))
            else:
                contexts.extend(range(work.start + 1, work.start + work.count + 1))
            tokens.append(WRITTEN if work.samples else ())
        seconds = self.roofline.step(chunks, contexts, sum(map(bool, tokens)), self.others, self.deep)
        seconds += self.roofline.copies(len(plan.moves))  # in the step's own stream: the step waits for them
        if chunks:
            self.cold = self.roofline.rates.cold_seconds
        else:
            seconds += self.cold
            self.cold *= COLD_LEFT
        if self.jitter is not None:
            seconds = self.jitter(seconds, bool(chunks))
        self.busy = max(self.busy, self.clock.now) + seconds
        return InRun(self.busy, tuple(tokens))

    def collect(self, handle: InRun) -> Result:
        self.clock.now = max(self.clock.now, handle.done)
        return Result(handle.tokens)


class Stretch(NamedTuple):
    """Steps to come in which every stream writes one token each; `times[i]` is when the i-th of them ends."""

    streams: list[RequestState]
    seconds: np.ndarray
    times: list[float]


class Worker:
    """One engine on virtual time. `advance` moves it to its next boundary between steps; `submit` may cut in before."""

    def __init__(
        self, roofline: Roofline, settings: Resolved, depth: int = 1, jitter: Jitter | None = None, fast: bool = True
    ):
        self.clock = Clock()
        self.roofline = roofline
        self.scheduler: Scheduler = make_scheduler(roofline.model.arch, settings, "simulated")
        self.runner = SimulatedRunner(roofline, self.clock, depth, jitter)
        self.core = Core(self.scheduler, self.runner, self.clock)
        self.fast = fast and depth == 1 and jitter is None
        self.parking = Parking(self.scheduler)
        self.inbox: deque[tuple[float, Request]] = deque()
        self.requests: dict[int, RequestState] = {}  # until their user takes them out
        self.pending: list[Event] = []  # of the step that ends at the next boundary
        self.ahead: Stretch | None = None
        self.busy_seconds = 0.0
        self.held_peak = 0  # KV blocks

    @property
    def next_time(self) -> float:
        """When something happens here next; never before that."""
        if self.ahead is not None:
            return self.ahead.times[-1]
        if self.pending or not self.core.idle:
            return self.clock.now
        return max(self.clock.now, self.inbox[0][0]) if self.inbox else inf

    def submit(self, request: Request, at: float) -> None:
        """A request comes at `at`, no earlier than anything that came or happened before."""
        self.inbox.append((at, request))
        if self.ahead is not None:
            self._commit_stretch(at)

    def advance(self) -> list[Event]:
        """What has happened by the boundary at `next_time`; then one more step, or a stretch, is begun."""
        if self.ahead is not None:
            self._commit_stretch(inf)
        self.clock.now = self.next_time if self.next_time < inf else self.clock.now
        events, self.pending = self.pending, []
        while self.inbox and self.inbox[0][0] <= self.clock.now:
            request = self.inbox.popleft()[1]
            self.requests[request.id] = self.core.submit(request)
        if self.core.idle:
            return events
        self.ahead = self._look_ahead() if self.fast else None
        if self.ahead is None:
            self._step()
        return events

    def _step(self) -> None:
        began, parking = self.clock.now, self.parking
        if self.fast:
            parking.before_step()
            self.runner.others, self.runner.deep = len(parking), parking.deep
        self.pending = self.core.step()
        parking.after_step(self.clock.now)
        self.busy_seconds += self.clock.now - began
        self._watch_blocks()

    def _watch_blocks(self) -> None:
        pool = self.scheduler.tables.pool
        self.held_peak = max(self.held_peak, pool.total - pool.available)

    # ---- many steps at once ----------------------------------------------------------------------------------------

    def _look_ahead(self) -> Stretch | None:
        """The steps up to just before the first that is not like the others; None if there are too few."""
        scheduler = self.scheduler
        if scheduler.waiting or scheduler.suspects or scheduler.leaving:
            return None
        if not all(map(is_stream, scheduler.running.values())):
            return None
        left = self.parking.steps_left()
        if left is not None and left < SHORTEST:
            return None
        self.parking.bring_all_back()
        streams = list(scheduler.running.values())
        if not streams or len(streams) > scheduler.limits.max_batch_tokens:
            return None
        steps = min(request.limit - len(request.tokens) - 1 for request in streams)
        count = self._that_fit(streams, steps)
        if count < SHORTEST:
            return None
        seconds = self.roofline.stretch([len(request.tokens) for request in streams], count)
        seconds += self.runner.cold * COLD_LEFT ** np.arange(count)
        return Stretch(streams, seconds, (self.clock.now + np.cumsum(seconds)).tolist())

    def _that_fit(self, streams: list[RequestState], steps: int) -> int:
        """As many steps as the pool has blocks for without asking anybody."""
        tables = self.scheduler.tables
        only_free = any(tables.windows) or tables.pool.host is not None  # what is evicted would have to be copied
        room = len(tables.pool.free) if only_free else tables.pool.available
        while steps >= SHORTEST:
            needed = sum(tables.missing(request, request.computed + steps) for request in streams)
            if needed <= room:
                return steps
            steps = min(steps - 1, steps // 2 if needed > 2 * room else steps - BLOCK // 2)
        return 0

    def _commit_stretch(self, until: float) -> None:
        """Do what the steps launched before `until` would have done; drop the rest."""
        assert self.ahead is not None
        streams, seconds, times = self.ahead
        self.ahead = None
        # Step i starts when step i − 1 ends. One that has started cannot be taken back.
        count = min(len(times), bisect_left(times, until) + 1) if until < inf else len(times)
        if until <= self.clock.now:
            return
        times = times[:count]
        self.runner.cold *= COLD_LEFT**count
        scheduler, tables = self.scheduler, self.scheduler.tables
        written = list(WRITTEN) * count
        for request in streams:
            grown = tables.grow(request, request.computed + count)
            assert grown, "a stretch was planned for blocks that are not there"
            request.tokens.extend(written)
            request.timeline.token_times.extend(times)
            request.computed += count
            tables.publish(request, request.computed)
            tables.release_behind(request)
        estimate = scheduler.pace.stream_steps.setdefault(len(streams).bit_length(), Estimate())
        for one in seconds[:count].tolist():
            estimate.add(one)
        counters = scheduler.counters
        scheduler.plans += count
        scheduler.batch_open = False
        counters.steps += count
        counters.computed_tokens += count * len(streams)
        counters.output_tokens += count * len(streams)
        self.busy_seconds += times[-1] - self.clock.now
        self.clock.now = self.core.collected = times[-1]
        self._watch_blocks()
