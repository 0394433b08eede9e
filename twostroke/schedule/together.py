"""Prompts that arrive together can be read together: their answers begin when all of them are read. Torch-free.

While a stream runs, a step may last `max_gap`, and so it carries few tokens of prompts. Where many prompts arrive at an
idle engine, the first answers slow the reading of all others. Here their first tokens are kept back: no stream runs
yet, and steps carry as many tokens as they can. All answers end sooner that way, and the last ones begin sooner; the
first ones begin later. On a CPU answers begin at once: steps of few tokens are nearly as fast there.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from twostroke.types import Event, RequestState, Work, WorkKind

if TYPE_CHECKING:
    from twostroke.schedule.scheduler import Scheduler

LONGEST = {"cuda": 4.0, "cpu": 0.0}  # seconds from the first arrival for which a first token is kept back; 0: never
TOGETHER = 0.5  # seconds from the first arrival within which prompts arrive together with it
MANY = 8  # fewest prompts still to be read for which an answer waits


class Untold(NamedTuple):
    """An event that the request's caller has not received yet."""

    request: RequestState
    event: Event


class Together:
    def __init__(self, longest: float, within: float = TOGETHER, many: int = MANY):
        """longest: seconds; 0: every answer begins at once."""
        self.longest, self.within, self.many = longest, within, many
        self.coming: Callable[[], int] = int  # prompts that have arrived, and will be in the queue before the next plan
        self.reading = False  # a group of prompts is read; its answers wait, and are in no plan
        self.arrived = 0.0  # the first of the group
        self.kept: dict[int, Untold] = {}  # answers of the group that have begun, by request
        self.due: list[Untold] = []  # to be told when the next step ends

    def waits(self, request: RequestState) -> bool:
        """Whether the prompt is read, or about to be, and the answer waits for the group."""
        if request.id in self.kept:
            return True
        return self.reading and not request.output_length and request.params.deadline is None

    def before_plan(self, scheduler: Scheduler, now: float) -> None:
        if not self.longest:
            return
        if not self.reading:
            self.reading = self._begins(scheduler, now)
        elif self._over(now, (one.start < one.prompt_length for one in self._group(scheduler))):
            self.release()  # the last prompts may be in flight: all answers are planned again

    def keeps(self, work: Work, event: Event, begun: list[Untold]) -> bool:
        """Whether this event of a step is not told yet. The first of an answer joins `begun`. An answer that waits may
        have been in the next plan already when it began: it has one more token."""
        request = work.request
        if work.kind is WorkKind.READ and request.output_length == 1 and event.finish_reason is None:
            begun.append(Untold(request, event))
            return True
        if request.id not in self.kept:
            return False
        self.kept[request.id] = Untold(request, joined(self.kept[request.id].event, event))
        return True

    def after_step(self, scheduler: Scheduler, begun: Sequence[Untold], now: float) -> list[Event]:
        """The first events of answers: of those that this step began, and of those whose wait has ended."""
        if begun and self.longest and not self.reading:
            self.reading = self._begins(scheduler, now, {one.request.id for one in begun})
        if self.reading:
            self.kept |= {one.request.id: one for one in begun if one.request.params.deadline is None}
            begun = [one for one in begun if one.request.id not in self.kept]
            unread = (one.computed < one.prompt_length for one in self._group(scheduler))
            if self._over(now, unread) and not self.coming():
                self.release()
        return [*self.tell(now), *(event for _, event in begun)]

    def tell(self, now: float) -> list[Event]:
        """The events that are due."""
        due, self.due = self.due, []
        for request, event in due:
            count = len(event.token_ids)
            request.timeline.token_times[:count] = [now] * count
        return [event for _, event in due]

    def release(self) -> None:
        """All answers go on."""
        self.reading = False
        self.due += self.kept.values()
        self.kept.clear()

    def let_go(self, request: RequestState) -> None:
        """This answer goes on: its request starts again."""
        if request.id in self.kept:
            self.due.append(self.kept.pop(request.id))

    def last(self, event: Event) -> Event:
        """The last event of a request, with all that was not told before."""
        before = self.kept.pop(event.request_id, None)
        for one in self.due:
            if one.request.id == event.request_id:
                before = one
        self.due = [one for one in self.due if one is not before]
        return event if before is None else joined(before.event, event)

    def _begins(self, scheduler: Scheduler, now: float, own: Container[int] = ()) -> bool:
        """Whether a group begins: no stream is running, and many prompts are still to be read. own: requests whose
        answers have just begun."""
        if scheduler.limits.static or scheduler.policy.prompts_first:
            return False
        running = scheduler.running.values()
        if any(one.output_length and one.id not in own for one in running):
            return False
        self.arrived = min((one.timeline.arrival for one in chain(running, scheduler.waiting)), default=now)
        unread = sum(one.start < one.prompt_length for one in self._group(scheduler))
        return now < self.arrived + self.longest and (unread >= self.many or unread + self.coming() >= self.many)

    def _group(self, scheduler: Scheduler) -> Iterable[RequestState]:
        last = self.arrived + self.within
        every = chain(scheduler.running.values(), scheduler.waiting)
        return (request for request in every if request.timeline.arrival <= last)

    def _over(self, now: float, unread: Iterable[bool]) -> bool:
        return now >= self.arrived + self.longest or not any(unread)


def joined(first: Event, second: Event) -> Event:
    return second._replace(
        token_ids=first.token_ids + second.token_ids,
        logprobs=first.logprobs + second.logprobs,
        prompt_logprobs=first.prompt_logprobs or second.prompt_logprobs,
        facts=second.facts or first.facts,
    )
