"""One engine on virtual time: its runner computes nothing and takes as long as the roofline predicts.

A simulated worker is the engine's own `Core` with a clock that only the runner moves. Consecutive steps in which every
stream writes one token and nothing else happens are committed together (`DecodeRun`): the scheduler's plans for them
are known in advance, so only its bookkeeping is done. In other steps most streams are skipped (fast_forward.py). Tests
compare both with a simulation step by step: the timelines are equal.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from math import inf
from typing import NamedTuple

import numpy as np

from twostroke.config import Resolved
from twostroke.cost.model.rates import COLD_LEFT
from twostroke.cost.model.roofline import Roofline
from twostroke.cost.simulation.fast_forward import TOKEN, FastForward, is_stream
from twostroke.engine.core import Core
from twostroke.kv.addresses import QuickNames
from twostroke.ops.interface import BLOCK
from twostroke.schedule.make import make_scheduler
from twostroke.schedule.pace import Estimate
from twostroke.schedule.scheduler import Scheduler
from twostroke.types import Event, Plan, Request, RequestState, Result, WorkKind

SHORTEST = 3  # fewest steps of a decode run
Jitter = Callable[[float, bool], float]  # (predicted seconds, whether the step reads prompts) -> seconds


class VirtualClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Launched(NamedTuple):
    done: float  # when the device finishes it
    tokens: tuple[tuple[int, ...], ...]


class SimulatedRunner:
    """A step takes what the roofline predicts. With depth 2 the next plan is made while a step runs, as on a GPU."""

    def __init__(self, roofline: Roofline, clock: VirtualClock, depth: int = 1, jitter: Jitter | None = None):
        self.roofline = roofline
        self.clock = clock
        self.depth = depth
        self.jitter = jitter
        self.busy = 0.0  # when the device is free again
        self.cold = 0.0  # extra seconds of the next step if it reads no prompt
        self.more_streams = self.more_context = 0  # of every step, beside its plan

    def launch(self, plan: Plan) -> Launched:
        chunks: list[tuple[int, int]] = []
        contexts: list[int] = []
        tokens = []
        for work in plan.works:
            if work.kind is WorkKind.READ:
                chunks.append((work.start, work.count))
            else:
                contexts.extend(range(work.start + 1, work.start + work.count + 1))
            tokens.append(TOKEN if work.samples else ())
        seconds = self.roofline.step(chunks, contexts, sum(map(bool, tokens)), self.more_streams, self.more_context)
        seconds += self.roofline.copies(len(plan.moves))  # the step waits for the copies
        if chunks:
            self.cold = self.roofline.rates.cold_seconds
        else:
            seconds += self.cold
            self.cold *= COLD_LEFT
        if self.jitter is not None:
            seconds = self.jitter(seconds, bool(chunks))
        self.busy = max(self.busy, self.clock.now) + seconds
        return Launched(self.busy, tuple(tokens))

    def collect(self, handle: Launched) -> Result:
        self.clock.now = max(self.clock.now, handle.done)
        return Result(handle.tokens)


class DecodeRun(NamedTuple):
    """The next steps, if every stream writes one token in each; `times[i]` is when the i-th of them ends."""

    streams: list[RequestState]
    seconds: np.ndarray
    times: list[float]


class SimulatedWorker:
    """`advance` moves it to its next boundary between steps; `submit` may come before that."""

    def __init__(
        self, roofline: Roofline, settings: Resolved, depth: int = 1, jitter: Jitter | None = None, fast: bool = True
    ):
        self.clock = VirtualClock()
        self.roofline = roofline
        self.scheduler: Scheduler = make_scheduler(roofline.model.arch, settings, "simulated")
        self.scheduler.tables.hasher = QuickNames("simulated", key=b"")
        self.runner = SimulatedRunner(roofline, self.clock, depth, jitter)
        self.core = Core(self.scheduler, self.runner, self.clock)
        self.fast = fast and depth == 1 and jitter is None
        self.fast_forward = FastForward(self.scheduler)
        self.inbox: deque[tuple[float, Request]] = deque()
        self.requests: dict[int, RequestState] = {}  # until the fleet takes them out
        self.pending: list[Event] = []  # of the step that ends at the next boundary
        self.ahead: DecodeRun | None = None
        self.busy_seconds = 0.0
        self.held_peak = 0  # KV blocks

    @property
    def next_time(self) -> float:
        """Time of the next event of this worker."""
        if self.ahead is not None:
            return self.ahead.times[-1]
        if self.pending or not self.core.idle:
            return self.clock.now
        return max(self.clock.now, self.inbox[0][0]) if self.inbox else inf

    def submit(self, request: Request, at: float) -> None:
        """A request arrives at `at`; arrivals come in order of time."""
        self.inbox.append((at, request))
        if self.ahead is not None:
            self._commit_decode_run(at)

    def advance(self) -> list[Event]:
        """Return the events up to the boundary at `next_time`, then begin one more step or a decode run."""
        if self.ahead is not None:
            self._commit_decode_run(inf)
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
        began, skipping = self.clock.now, self.fast_forward
        if self.fast:
            skipping.before_step()
            self.runner.more_streams, self.runner.more_context = len(skipping), skipping.context
        self.pending = self.core.step()
        skipping.after_step(self.clock.now)
        self.busy_seconds += self.clock.now - began
        self._watch_blocks()

    def _watch_blocks(self) -> None:
        pool = self.scheduler.tables.pool
        self.held_peak = max(self.held_peak, pool.total - pool.available)

    # ---- decode runs -----------------------------------------------------------------------------------------------

    def _look_ahead(self) -> DecodeRun | None:
        """The steps before the first in which a stream ends or a block is missing; None if there are too few."""
        scheduler = self.scheduler
        if scheduler.waiting or scheduler.suspects or scheduler.leaving or scheduler.together.reading:
            return None
        if not all(map(is_stream, scheduler.running.values())):
            return None
        left = self.fast_forward.steps_left()
        if left is not None and left < SHORTEST:
            return None
        self.fast_forward.resume_all()
        streams = list(scheduler.running.values())
        if not streams or len(streams) > scheduler.limits.max_batch_tokens:
            return None
        steps = min(request.limit - len(request.tokens) - 1 for request in streams)
        count = self._steps_with_blocks(streams, steps)
        if count < SHORTEST:
            return None
        seconds = self.roofline.decode_run([len(request.tokens) for request in streams], count)
        seconds += self.runner.cold * COLD_LEFT ** np.arange(count)
        return DecodeRun(streams, seconds, (self.clock.now + np.cumsum(seconds)).tolist())

    def _steps_with_blocks(self, streams: list[RequestState], steps: int) -> int:
        """The number of steps that the pool has blocks for without preempting or copying."""
        tables = self.scheduler.tables
        only_free = any(tables.windows) or tables.pool.host is not None  # an evicted block would be copied
        room = len(tables.pool.free) if only_free else tables.pool.available
        while steps >= SHORTEST:
            needed = sum(tables.missing(request, request.computed + steps) for request in streams)
            if needed <= room:
                return steps
            steps = min(steps - 1, steps // 2 if needed > 2 * room else steps - BLOCK // 2)
        return 0

    def _commit_decode_run(self, until: float) -> None:
        """Commit the steps launched before `until`; drop the rest."""
        assert self.ahead is not None
        streams, seconds, times = self.ahead
        self.ahead = None
        # Step i starts when step i − 1 ends. A step that has started is committed.
        count = min(len(times), bisect_left(times, until) + 1) if until < inf else len(times)
        if until <= self.clock.now:
            return
        times = times[:count]
        self.runner.cold *= COLD_LEFT**count
        scheduler, tables = self.scheduler, self.scheduler.tables
        written = list(TOKEN) * count
        for request in streams:
            grown = tables.grow(request, request.computed + count)
            assert grown, "a decode run was planned without the blocks for it"
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
