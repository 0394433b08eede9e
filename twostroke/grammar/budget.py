"""The CPU time that grammars may take of the engine's steps. Torch-free.

A step waits for the masks of all its rows, so a slow grammar delays every stream. Each call therefore has a budget that
follows from `max_gap`: what its masks take, all samples together, may on average be a share of `max_gap` for each step.
A call that exceeds its budget ends with an error. The budget never changes which tokens are chosen.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from twostroke.grammar.library import GrammarError
from twostroke.types import RequestState

TOO_SLOW = (
    "the grammar takes more time for each token than one request may use beside others: make it simpler (a rule that "
    "can match one text in many ways is slow), or lower n"
)
SHARE = 0.25  # of max_gap: what the grammars of one key may take of each step; its calls divide it
BURST = 0.5  # of max_gap: what a call may use before its share adds up, as in a slow first step
ONE_CALL = 0.8  # of the burst: the most that one measurement counts for, since a pause of the machine may be in it
LEAST = 0.001  # seconds of each step that a call may always use, however many calls its key has
CATCH_UP = 0.0002  # seconds for each token that is followed again, as after a preemption
LONGEST = 1.0  # seconds: a longer max_gap does not give grammars more


def call_of(request: RequestState) -> int:
    """The samples of one call share this number."""
    return request.id - request.sample


class GrammarBudgets:
    """What each call may still use, in seconds."""

    def __init__(self, max_gap: Callable[[], float]):
        self._max_gap = max_gap
        self._left: dict[int, float] = {}  # by call
        self._most = ONE_CALL * BURST * min(max_gap(), LONGEST)

    def begin_step(self, requests: Iterable[RequestState], others: Iterable[RequestState]) -> None:
        """requests: those with a grammar in this step; their calls get the step's share. others: that are not over."""
        calls = {call_of(request): request.salt for request in requests}
        of_key = Counter(calls.values())
        gap = min(self._max_gap(), LONGEST)
        self._most = ONE_CALL * BURST * gap
        left = {call: self._left[call] for call in map(call_of, others) if call in self._left}
        for call, key in calls.items():
            more = max(SHARE * gap / of_key[key], LEAST)
            left[call] = min(self._left.get(call, BURST * gap) + more, BURST * gap)
        self._left = left

    @contextmanager
    def charge(self, request: RequestState, again: int = 0) -> Iterator[None]:
        """Subtract the CPU time of the block. again: tokens that it follows for the second time."""
        call = call_of(request)
        if self._left[call] < 0:
            raise GrammarError(TOO_SLOW)
        began = time.thread_time()
        yield
        self._left[call] -= min(max(time.thread_time() - began - again * CATCH_UP, 0.0), self._most)
        if self._left[call] < 0:
            self._left[call] = float("-inf")  # its other samples end too
            raise GrammarError(TOO_SLOW)
