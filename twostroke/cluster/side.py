"""One engine of several behind a single client: its events say where they come from. Torch-free."""

from __future__ import annotations

from typing import Protocol

from twostroke.config import Resolved
from twostroke.metrics.counts import Counts
from twostroke.remote.client import BlockClient, EngineListener
from twostroke.remote.messages import Ready, Report, Stage


class Owner(Protocol):
    """What the engines are parts of."""

    listener: EngineListener

    def on_report(self, side: Side, report: Report) -> None: ...

    def on_ready(self, side: Side, ready: Ready) -> None: ...

    def on_lost(self, side: Side, why: str) -> None: ...

    def on_settings(self, side: Side, settings: Resolved) -> None: ...


class Side:
    """Listens to one engine for its owner, and remembers the latest counts."""

    def __init__(self, owner: Owner, engine: BlockClient):
        self.owner = owner
        self.engine = engine
        self.counts = Counts()
        self.step_seconds = 0.0
        self.up = False  # it has said that it is ready, and was not lost since
        self.losses = 0

    def on_stage(self, stage: Stage) -> None:
        self.owner.listener.on_stage(stage)

    def on_ready(self, ready: Ready) -> None:
        total = ready.settings.kv_blocks
        self.counts, self.step_seconds = Counts(blocks_total=total, blocks_free=total), 0.0
        self.up = True
        self.owner.on_ready(self, ready)

    def on_report(self, report: Report) -> None:
        self.counts, self.step_seconds = report.counts, report.step_seconds
        self.owner.on_report(self, report)

    def on_settings(self, settings: Resolved) -> None:
        self.owner.on_settings(self, settings)

    def on_lost(self, why: str) -> None:
        self.counts, self.up = Counts(), False
        self.losses += 1
        self.owner.on_lost(self, why)
