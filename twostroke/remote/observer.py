"""Who counts what the engine does. Torch-free."""

from __future__ import annotations

from typing import Protocol

from twostroke.metrics.counts import Counts
from twostroke.metrics.timeline import Timeline
from twostroke.sampling import SamplingParams


class Observer(Protocol):
    """Called on the event loop."""

    def reported(self, counts: Counts, step_seconds: float) -> None:
        """A step has ended."""

    def tokens(self, timeline: Timeline, count: int) -> None:
        """An answer has got its first tokens, so many of them."""

    def gaps(self, seconds: list[float]) -> None:
        """Answers have got further tokens: the time of each since the one before it."""

    def ended(self, timeline: Timeline, reason: str, params: SamplingParams) -> None: ...

    def lost(self) -> None:
        """The engine is gone."""


class NoObserver:
    """Counts nothing."""

    def reported(self, counts: Counts, step_seconds: float) -> None:
        return

    def tokens(self, timeline: Timeline, count: int) -> None:
        return

    def gaps(self, seconds: list[float]) -> None:
        return

    def ended(self, timeline: Timeline, reason: str, params: SamplingParams) -> None:
        return

    def lost(self) -> None:
        return
