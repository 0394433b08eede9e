"""Streams whose next steps are known are taken out of the scheduler and advanced many steps at a time.

Between two block borders a stream only writes: it takes no block, names none and does not end. Under load a hundred
streams do so beside every prompt chunk. Such a stream is skipped: the scheduler does not see it. The runner counts it
by its row and its context, the pace counts it among the streams, and the scheduler's limits shrink by it. When it
resumes, it gets the tokens that it wrote meanwhile, before anything else happens to it. At least one stream is never
skipped, so that the scheduler knows that streams are running.
"""

from __future__ import annotations

from typing import NamedTuple

from twostroke.ops.interface import BLOCK
from twostroke.record import replace
from twostroke.schedule.pace import Pace
from twostroke.schedule.scheduler import Scheduler
from twostroke.types import RequestState

TOKEN = (7,)  # every simulated output token
WORTH = 3  # fewest steps for which a stream is skipped


class PaceWithSkipped(Pace):
    """Counts skipped streams among the streams."""

    skipped = 0

    def learn(self, prompt: float, streams: int, seconds: float, scored: int = 0) -> None:
        super().learn(prompt, streams + self.skipped, seconds, scored)

    def allowance(self, gentle: bool, streams: int) -> float:
        return super().allowance(gentle, streams + self.skipped)


class Skipped(NamedTuple):
    request: RequestState
    since: int  # number of the step from which on it is skipped
    last: int  # number of the step that writes its last token


class FastForward:
    def __init__(self, scheduler: Scheduler):
        self.scheduler = scheduler
        self.limits = scheduler.limits
        self.pace = PaceWithSkipped(scheduler.pace.flops, scheduler.pace.max_gap, scheduler.pace.min_chunk)
        scheduler.pace = self.pace
        self.allowed = not (scheduler.tables.windowed or scheduler.limits.static or scheduler.policy.prompts_first)
        self.skipped: dict[int, Skipped] = {}
        self.due: dict[int, list[int]] = {}  # step number -> requests that must resume before it
        self.ends: list[float] = []  # end of each step during which streams were skipped
        self.context = 0  # sum of the contexts that the skipped streams attend to in the next step
        self.order: dict[int, int] = {}  # request -> its place in the order of admission

    def __len__(self) -> int:
        return len(self.skipped)

    def before_step(self) -> None:
        """Resume the streams for which something happens in the next step, skip those for which nothing does."""
        for number in self.due.pop(len(self.ends), ()):
            self._resume(number)
        if not self.allowed or self.scheduler.together.reading or not self._pool_has_room():
            self.resume_all()
            return
        if not self.skipped:
            self.order = {number: place for place, number in enumerate(self.scheduler.running)}
        else:
            self._note_order()
        first = True
        for request in list(self.scheduler.running.values()):
            if not is_stream(request):
                continue
            steps = steps_without_events(request)
            if steps >= WORTH and not first:
                self._skip(request, steps)
            first = False
        self._adjust_scheduler()

    def after_step(self, now: float) -> None:
        """A step has ended; every skipped stream wrote a token in it."""
        if not self.skipped:
            return
        self.ends.append(now)
        self.context += len(self.skipped)
        counters = self.scheduler.counters
        counters.computed_tokens += len(self.skipped)
        counters.output_tokens += len(self.skipped)
        self._note_order()
        if not any(is_stream(request) for request in self.scheduler.running.values()):
            self._resume(min(self.skipped, key=self.order.__getitem__))
            self._adjust_scheduler()

    def steps_left(self) -> int | None:
        """Steps before the first skipped stream writes its last token."""
        return min(one.last for one in self.skipped.values()) - len(self.ends) if self.skipped else None

    def resume_all(self) -> None:
        if not self.skipped:
            return
        self._note_order()
        for number in list(self.skipped):
            self._resume(number)
        self._adjust_scheduler()
        self.due.clear()
        self.ends.clear()

    def _pool_has_room(self) -> bool:
        """Whether the pool has blocks for any next step."""
        pool, limits = self.scheduler.tables.pool, self.limits
        return pool.available > limits.max_requests + 2 * (limits.max_batch_tokens // BLOCK + limits.max_requests)

    def _note_order(self) -> None:
        for number in self.scheduler.running:
            if number not in self.order:
                self.order[number] = len(self.order)

    def _skip(self, request: RequestState, steps: int) -> None:
        del self.scheduler.running[request.id]
        now = len(self.ends)
        self.skipped[request.id] = Skipped(request, now, now + request.limit - len(request.tokens) - 1)
        self.context += request.computed + 1
        self.due.setdefault(now + steps, []).append(request.id)

    def _resume(self, number: int) -> None:
        found = self.skipped.pop(number, None)
        if found is None:  # resumed earlier
            return
        request, written = found.request, len(self.ends) - found.since
        request.tokens.extend(TOKEN * written)
        request.timeline.token_times.extend(self.ends[found.since :])
        request.computed += written
        self.context -= request.computed + 1
        self.scheduler.running[number] = request

    def _adjust_scheduler(self) -> None:
        """Set the scheduler's order of requests and its limits, and the pace's number of streams, as without the
        skipped streams."""
        scheduler, count = self.scheduler, len(self.skipped)
        scheduler.running = dict(sorted(scheduler.running.items(), key=lambda pair: self.order[pair[0]]))
        self.pace.skipped = count
        scheduler.limits = replace(
            self.limits,
            max_requests=self.limits.max_requests - count,
            max_batch_tokens=self.limits.max_batch_tokens - count,
        )


def is_stream(request: RequestState) -> bool:
    return request.prompt_length <= request.computed == len(request.tokens) - 1


def steps_without_events(request: RequestState) -> int:
    """Steps in which the stream only writes: up to the last before a block is full, or before its last token."""
    inside = request.computed % BLOCK
    return min(BLOCK - 1 - inside, request.limit - len(request.tokens) - 1) if inside else 0
