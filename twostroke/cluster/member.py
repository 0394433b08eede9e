"""One worker of several behind a single client: its load, its speed, and events that say where they come from.
Torch-free."""

from __future__ import annotations

from typing import Protocol

from twostroke.cluster.holder import Offer, Parcel
from twostroke.cluster.router import Link, Role, WorkerLoad
from twostroke.cluster.worker import WorkerClient
from twostroke.config import Resolved
from twostroke.metrics.counts import Counts
from twostroke.record import replace
from twostroke.remote.messages import Ready, Report, Stage

SMOOTHING = 0.2
STREAM_SECONDS = 1.0  # until one was measured


class Owner(Protocol):
    """What the workers are parts of."""

    def on_stage(self, member: Member, stage: Stage) -> None: ...

    def on_report(self, member: Member, report: Report) -> None: ...

    def on_parcel(self, member: Member, request_id: int, parcel: Parcel) -> None: ...

    def on_offer(self, member: Member, request_id: int, offer: Offer) -> None: ...

    def on_ready(self, member: Member, ready: Ready) -> None: ...

    def on_lost(self, member: Member, why: str) -> None: ...

    def on_settings(self, member: Member, settings: Resolved) -> None: ...


class Member:
    """Listens to one worker for its owner."""

    def __init__(self, owner: Owner, name: str, role: Role, worker: WorkerClient):
        self.owner = owner
        self.name = name
        self.role = role
        self.worker = worker
        self.counts = Counts()
        self.step_seconds = 0.0
        self.up = False  # it has said that it is ready, and was not lost since
        self.losses = 0
        self.queued = 0  # tokens of prompts that it has and has not computed
        self.streams = 0  # answers that it writes, or is to write
        self.speed = Speed()

    @property
    def usable(self) -> bool:
        return self.up and self.worker.healthy

    @property
    def caches(self) -> bool:
        """Whether it keeps blocks that no request holds."""
        ready = self.worker.ready
        return ready is not None and ready.settings.prefix_cache

    @property
    def settings(self) -> Resolved:
        """The worker's own settings, as they are now."""
        ready = self.worker.ready
        assert ready is not None, "it was ready at the start"
        return replace(ready.settings, **self.worker.changed)

    @property
    def machine(self) -> str:
        """What computes there, by its own name."""
        ready = self.worker.ready
        return "" if ready is None else ready.machine

    def load(self) -> WorkerLoad:
        ready, speed = self.worker.ready, self.speed
        assert ready is not None, "only workers that have been ready are asked"
        return WorkerLoad(
            self.queued, self.streams, ready.settings.max_requests, speed.token, speed.step, speed.stream,
            ready.settings.kv_blocks if self.caches else 0,
        )  # fmt: skip

    # ---- what the worker says --------------------------------------------------------------------------------------

    def on_stage(self, stage: Stage) -> None:
        self.owner.on_stage(self, stage)

    def on_ready(self, ready: Ready) -> None:
        total = ready.settings.kv_blocks
        self.counts, self.step_seconds = Counts(blocks_total=total, blocks_free=total), 0.0
        self.speed = Speed(*ready.warm_up)
        self.up = True
        self.owner.on_ready(self, ready)

    def on_report(self, report: Report) -> None:
        self.speed.learn(self.counts, report.counts, report.step_seconds - self.step_seconds)
        self.counts, self.step_seconds = report.counts, report.step_seconds
        self.owner.on_report(self, report)

    def on_parcel(self, request_id: int, parcel: Parcel) -> None:
        self.owner.on_parcel(self, request_id, parcel)

    def on_offer(self, request_id: int, offer: Offer) -> None:
        self.owner.on_offer(self, request_id, offer)

    def on_settings(self, settings: Resolved) -> None:
        self.owner.on_settings(self, settings)

    def on_lost(self, why: str) -> None:
        self.up = False
        self.losses += 1
        self.owner.on_lost(self, why)


class Speed:
    """How fast a worker is, as moving means of what it reports. A report covers one step."""

    def __init__(self, tokens: int = 1, seconds: float = 0.0):
        """tokens, seconds: of the warm-up's prompt."""
        self.token = seconds / max(1, tokens)  # seconds for a token of a prompt
        self.step = self.token  # seconds of a step that reads no prompt
        self.stream = STREAM_SECONDS  # seconds that an answer is written for
        self._measured = False  # a step without prompts

    def learn(self, before: Counts, now: Counts, seconds: float) -> None:
        computed = now.computed_tokens - before.computed_tokens
        written = now.output_tokens - before.output_tokens
        if now.steps != before.steps + 1 or seconds <= 0 or computed <= 0:
            return
        if computed > 2 * max(1, written):  # mostly prompts
            self.token = moved(self.token, max(0.0, seconds - self.step * (written > 1)) / computed)
        elif written:
            self.step = moved(self.step, seconds) if self._measured else seconds
            self._measured = True

    def ended(self, seconds: float) -> None:
        """An answer was written for so long."""
        self.stream = moved(self.stream, seconds)


def moved(mean: float, value: float) -> float:
    return mean + SMOOTHING * (value - mean)


class LinkSpeed:
    """Latency and bandwidth between workers: a line through (bytes, seconds) of the transfers, older ones counting
    less."""

    def __init__(self, guess: Link):
        self.link = guess
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def learn(self, size: int, seconds: float) -> None:
        x = size / 1e6
        keep = 1 - SMOOTHING / 4
        self._weight, self._x, self._y = (
            keep * self._weight + 1, keep * self._x + x, keep * self._y + seconds
        )  # fmt: skip
        self._xx, self._xy = keep * self._xx + x * x, keep * self._xy + x * seconds
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        spread = self._xx / self._weight - mean_x**2
        slope = (self._xy / self._weight - mean_x * mean_y) / spread if spread > 1e-9 else 0.0
        if not 0.0 < slope * mean_x < mean_y:  # all transfers have one size, or times stray: half and half
            slope = mean_y / mean_x / 2 if mean_x else 0.0
        if slope:
            self.link = Link(1e6 / slope, mean_y - slope * mean_x)
