"""Streams that have nothing to tell for a while: set aside, so that a step costs what happens in it.

Between two borders of blocks a stream only writes: it takes no block, names none and does not end. Under load a
hundred of them do so beside every chunk of a prompt. Set aside, they are a number of rows and a sum of contexts to the
runner, a number of streams to the pace, and fewer places to the scheduler; what they wrote is made up when they come
back, before anything else happens to them. At least one stream stays, so that the scheduler sees that there are some.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from twostroke.ops.interface import BLOCK
from twostroke.schedule.pace import Pace
from twostroke.schedule.scheduler import Scheduler
from twostroke.types import RequestState

WRITTEN = (7,)  # every token of a simulated answer: nobody reads it
WORTH = 3  # steps below which it is not worth it


class SharedPace(Pace):
    """Counts those that were set aside among the streams."""

    aside = 0

    def learn(self, prompt: float, streams: int, seconds: float) -> None:
        super().learn(prompt, streams + self.aside, seconds)

    def allowance(self, gentle: bool, streams: int) -> float:
        return super().allowance(gentle, streams + self.aside)


class Aside(NamedTuple):
    request: RequestState
    since: int  # steps that had been made
    last: int  # those that will have been made before its last


class Parking:
    def __init__(self, scheduler: Scheduler):
        self.scheduler = scheduler
        self.limits = scheduler.limits
        self.pace = SharedPace(scheduler.pace.flops, scheduler.pace.max_gap, scheduler.pace.min_chunk)
        scheduler.pace = self.pace
        self.usable = not (scheduler.tables.windowed or scheduler.limits.static or scheduler.policy.prompts_first)
        self.aside: dict[int, Aside] = {}
        self.due: dict[int, list[int]] = {}  # step before which they have to be back
        self.ends: list[float] = []  # of the steps that were made with some set aside
        self.deep = 0  # sum of the contexts that those will attend to in the next step
        self.order: dict[int, int] = {}  # in which requests were admitted

    def __len__(self) -> int:
        return len(self.aside)

    def before_step(self) -> None:
        """Set aside whoever has nothing to tell, and bring back whoever has."""
        for number in self.due.pop(len(self.ends), ()):
            self._bring_back(number)
        if not self.usable or not self._plenty():
            self.bring_all_back()
            return
        if not self.aside:
            self.order = {number: place for place, number in enumerate(self.scheduler.running)}
        else:
            self._note_order()
        first = True
        for request in list(self.scheduler.running.values()):
            if not is_stream(request):
                continue
            steps = quiet_steps(request)
            if steps >= WORTH and not first:
                self._set_aside(request, steps)
            first = False
        self._tell()

    def after_step(self, now: float) -> None:
        """Another step has ended, in which everybody set aside wrote a token."""
        if not self.aside:
            return
        self.ends.append(now)
        self.deep += len(self.aside)
        counters = self.scheduler.counters
        counters.computed_tokens += len(self.aside)
        counters.output_tokens += len(self.aside)
        self._note_order()
        if not any(is_stream(request) for request in self.scheduler.running.values()):
            self._bring_back(min(self.aside, key=self.order.__getitem__))
            self._tell()

    def steps_left(self) -> int | None:
        """Before the first of those set aside writes its last token."""
        return min(one.last for one in self.aside.values()) - len(self.ends) if self.aside else None

    def bring_all_back(self) -> None:
        if not self.aside:
            return
        self._note_order()
        for number in list(self.aside):
            self._bring_back(number)
        self._tell()
        self.due.clear()
        self.ends.clear()

    def _plenty(self) -> bool:
        """Whether no stream and no chunk of the next step can find the pool empty."""
        pool, limits = self.scheduler.tables.pool, self.limits
        return pool.available > limits.max_requests + 2 * (limits.max_batch_tokens // BLOCK + limits.max_requests)

    def _note_order(self) -> None:
        for number in self.scheduler.running:
            if number not in self.order:
                self.order[number] = len(self.order)

    def _set_aside(self, request: RequestState, steps: int) -> None:
        del self.scheduler.running[request.id]
        made = len(self.ends)
        self.aside[request.id] = Aside(request, made, made + request.limit - len(request.tokens) - 1)
        self.deep += request.computed + 1
        self.due.setdefault(made + steps, []).append(request.id)

    def _bring_back(self, number: int) -> None:
        found = self.aside.pop(number, None)
        if found is None:  # it came back before
            return
        request, written = found.request, len(self.ends) - found.since
        request.tokens.extend(WRITTEN * written)
        request.timeline.token_times.extend(self.ends[found.since :])
        request.computed += written
        self.deep -= request.computed + 1
        self.scheduler.running[number] = request

    def _tell(self) -> None:
        """The scheduler's places and order, and the pace's number of streams, as those set aside leave them."""
        scheduler, count = self.scheduler, len(self.aside)
        scheduler.running = dict(sorted(scheduler.running.items(), key=lambda pair: self.order[pair[0]]))
        self.pace.aside = count
        scheduler.limits = replace(
            self.limits,
            max_requests=self.limits.max_requests - count,
            max_batch_tokens=self.limits.max_batch_tokens - count,
        )


def is_stream(request: RequestState) -> bool:
    return request.prompt_length <= request.computed == len(request.tokens) - 1


def quiet_steps(request: RequestState) -> int:
    """How many steps it will only write in: up to the last before a block is full, or before its last token."""
    inside = request.computed % BLOCK
    return min(BLOCK - 1 - inside, request.limit - len(request.tokens) - 1) if inside else 0
