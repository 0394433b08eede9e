"""What the engine did over the last seconds in which it had work. Torch-free."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from twostroke.metrics.counts import Counts

EVERY = 0.25  # seconds between two marks
MARKS = 256


class Done(NamedTuple):
    """Totals; as a difference, what was done between two moments."""

    busy: float  # seconds in which requests ran or waited
    steps: int = 0
    computed: int = 0  # tokens
    written: int = 0  # of those: tokens of answers


class Progress:
    def __init__(self, clock: Callable[[], float]):
        self.clock = clock
        self._at = clock()  # of the last report
        self._working = False  # since then
        self._last = Done(0.0)
        self._marks: deque[Done] = deque([self._last], maxlen=MARKS)

    def note(self, at: float, counts: Counts) -> None:
        """A report of the engine. Called for every step, so it does little."""
        busy = self._last.busy + (at - self._at if self._working else 0.0)
        self._at, self._working = at, counts.running + counts.waiting > 0
        self._last = Done(busy, counts.steps, counts.computed_tokens, counts.output_tokens)
        if busy - self._marks[-1].busy >= EVERY:
            self._marks.append(self._last)

    def over(self, seconds: float) -> Done | None:
        """What was done in the last so many seconds with work, up to now. None: the engine has no work at hand, or has
        not had it for so long."""
        if not self._working:
            return None
        busy = self._last.busy + max(0.0, self.clock() - self._at)
        before = [mark for mark in self._marks if mark.busy <= busy - seconds]
        if not before:
            return None
        then = before[-1]
        return Done(busy - then.busy, *(now - past for now, past in zip(self._last[1:], then[1:], strict=True)))
