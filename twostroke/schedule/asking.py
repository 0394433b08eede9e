"""Requests from other engines for which there is no room yet. They ask again and again, and get it in the order of the
policy, as the requests do that wait here. Torch-free.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from twostroke.types import Request, RequestState

if TYPE_CHECKING:
    from twostroke.schedule.scheduler import Scheduler

SILENT_SECONDS, SILENT_PLANS = 0.1, 2  # without a question, after which a request does not ask any more. Plans: an
# engine answers between two steps, which may be long


class RoomQuestion(NamedTuple):
    state: RequestState
    at: float  # when it asked last
    plans: int  # of the scheduler by then


class Asking:
    def __init__(self, scheduler: Scheduler):
        self.scheduler = scheduler
        self._asked: dict[int, RoomQuestion] = {}  # by request id

    def state_of(self, request: Request) -> RequestState:
        """The request's state. It keeps the turn that its API key had when it first asked."""
        before = self._asked.get(request.id)
        return RequestState(request) if before is None else before.state

    def goes_first(self, state: RequestState, now: float) -> bool:
        """Whether no other request that waits for room goes before it."""
        self._forget_silent(now)
        scheduler = self.scheduler
        key, shares = scheduler.policy.key, scheduler.shares()
        mine = key(state)
        before = [one for one, *_ in self._asked.values() if key(one) < mine]
        for waiting in scheduler.waiting:  # in the order of the policy
            if key(waiting) >= mine:
                break
            before.append(waiting)
        return all(shares.full(one.key) for one in before)

    def refuse(self, state: RequestState, now: float) -> None:
        self._asked[state.id] = RoomQuestion(state, now, self.scheduler.plans)

    def forget(self, request_id: int) -> None:
        """It has its room, or has ended."""
        self._asked.pop(request_id, None)

    def _forget_silent(self, now: float) -> None:
        plans, busy = self.scheduler.plans, bool(self.scheduler.running)
        for number, (_, at, then) in list(self._asked.items()):
            if now - at > SILENT_SECONDS and (plans - then > SILENT_PLANS or not busy):
                del self._asked[number]
