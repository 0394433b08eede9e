"""Who is told what the engine does, to count it. Torch-free."""

from __future__ import annotations

from typing import Protocol

from twostroke.metrics.counts import Counts
from twostroke.metrics.timeline import Timeline


class Observer(Protocol):
    """Who counts. Called on the event loop, once for each report, all its plain tokens, other pieces and ends."""

    def reported(self, counts: Counts, step_seconds: float) -> None: ...

    def gaps(self, seconds: list[float]) -> None: ...

    def tokens(self, timeline: Timeline, count: int) -> None: ...

    def ended(self, timeline: Timeline, reason: str) -> None: ...

    def lost(self) -> None: ...


class Nobody:
    """Counts nothing."""

    def reported(self, counts: Counts, step_seconds: float) -> None:
        return

    def gaps(self, seconds: list[float]) -> None:
        return

    def tokens(self, timeline: Timeline, count: int) -> None:
        return

    def ended(self, timeline: Timeline, reason: str) -> None:
        return

    def lost(self) -> None:
        return
