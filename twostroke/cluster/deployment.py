"""A deployment on Ray as one `EngineClient`: workers are placed, join, and serve behind the router. Torch-free.

Deployment (router) ── socket pair ── Ray driver ── Ray ── actors: the processes of workers
     └══════════════════ a line to each worker ═══════════════════┘
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from twostroke.cluster.channel import derive
from twostroke.cluster.hub import Hub
from twostroke.cluster.mixed import DEPENDS, in_words, ways_of
from twostroke.cluster.placement import Placement
from twostroke.cluster.placing import Connected, PlaceWorkers, WorkerDied
from twostroke.cluster.pools import PlacedWorker, Pools
from twostroke.cluster.remote_worker import RemoteWorker, Silence
from twostroke.cluster.router import Role
from twostroke.cluster.transports import CHOICES
from twostroke.errors import ConfigError
from twostroke.hardware import usable_cores
from twostroke.remote.client import EngineListener
from twostroke.remote.messages import Ready

SECRET_BYTES = 32
LOST_SECONDS = 20.0  # without any worker, before Ray is asked anew to place them; twice as long each time
LONGEST_WAIT = 300.0  # seconds
LOOK_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class DeploymentPlan:
    """How many workers of which kind, and their settings."""

    workers: int = 0
    prefill: int = 0
    decode: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)  # of all
    prefill_settings: Mapping[str, Any] = field(default_factory=dict)  # beside them
    decode_settings: Mapping[str, Any] = field(default_factory=dict)
    apart: bool = False  # prefill workers compute every prompt with a full block
    share_cores: bool = False  # workers need no cores of their own
    address: str | None = None  # of the Ray cluster
    transport: str = "auto"  # of blocks between workers, see transports.py
    ttft: float | None = None  # target in seconds, to which routes keep where they can

    def roles(self) -> dict[str, Role]:
        """By the name of the worker, in the order of their numbers."""
        kinds = ((self.workers, "worker", Role.BOTH), (self.prefill, "prefill", Role.PREFILL))
        kinds += ((self.decode, "decode", Role.DECODE),)  # type: ignore[assignment]
        return {f"{name}-{number}": role for count, name, role in kinds for number in range(count)}

    def settings_of(self, role: Role) -> dict[str, Any]:
        own = {Role.PREFILL: self.prefill_settings, Role.DECODE: self.decode_settings, Role.BOTH: {}}
        return {**self.settings, **own[role]}


def check_shape(shape: DeploymentPlan) -> None:
    if shape.workers and (shape.prefill or shape.decode):
        raise ConfigError("--workers N makes workers that do both: give it without --prefill and --decode.")
    if not shape.workers and not (shape.prefill and shape.decode):
        raise ConfigError("give --prefill P and --decode D, both 1 or more, or --workers N.")
    if shape.workers and (shape.prefill_settings or shape.decode_settings):
        raise ConfigError("--prefill-set and --decode-set need --prefill and --decode: with --workers, use --set.")
    if shape.workers and shape.apart:
        raise ConfigError(
            "--route apart needs --prefill and --decode: with --workers, each prompt stays on one worker."
        )
    if shape.transport not in CHOICES:
        raise ConfigError(f"--transport: {shape.transport!r} is not known; use {', '.join(CHOICES)}.")


class Deployment(Pools):
    def __init__(self, model: Path, shape: DeploymentPlan, say: Callable[[str], None], silence: Silence | None = None):
        check_shape(shape)
        self.shape = shape
        self.say = say
        self.roles = shape.roles()
        seed = {"seed": secrets.randbits(63)}  # one for all: requests without a seed get theirs from it
        self.numbered = {
            number: RemoteWorker(
                name, model, {**seed, **shape.settings_of(role)}, lambda number=number: self._kill(number), silence  # type: ignore[misc]
            )
            for number, (name, role) in enumerate(self.roles.items())
        }  # fmt: skip
        names = dict(zip(self.roles, self.numbered.values(), strict=True))
        super().__init__(
            {name: PlacedWorker(role, names[name]) for name, role in self.roles.items()},
            apart=shape.apart,
            ttft=shape.ttft,
        )
        self.secret = secrets.token_bytes(SECRET_BYTES)
        self.hub = Hub(derive(self.secret, "control"), self.numbered)
        self.router_address = ""
        self.ways: tuple[str, ...] = ()  # in which workers compute, where these differ
        cores = max(usable_cores(), 1)
        self.placement = Placement(shape.address, cores, self._plan, self._on_died)
        self._looking: asyncio.Task[None] | None = None

    # ---- life ------------------------------------------------------------------------------------------------------

    async def start(self, listener: EngineListener) -> Ready:
        try:
            connected = await self.placement.start()
            where = "a local Ray was started, and ends with this server" if connected.own else "Ray is used"
            self.say(f"{where} ({connected.address}); its workers: {', '.join(self.roles)}")
            if self.ways:
                self.say(f"not exact: with {in_words(self.ways)} {DEPENDS}")
            ready = await self._until_ready(listener)
            self._looking = asyncio.get_running_loop().create_task(self._look())
            return ready
        except BaseException:
            await self._close()
            raise

    async def _until_ready(self, listener: EngineListener) -> Ready:
        """Unless they cannot be placed."""
        starting = asyncio.ensure_future(super().start(listener))
        impossible = asyncio.ensure_future(self.placement.impossible())
        try:
            await asyncio.wait((starting, impossible), return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                impossible.result()
            return await starting
        finally:
            impossible.cancel()
            starting.cancel()
            await asyncio.gather(starting, impossible, return_exceptions=True)

    async def stop(self, seconds: float) -> None:
        await super().stop(seconds)
        await self._close()

    async def _close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
        await self.hub.close()
        await self.placement.stop()

    async def _look(self) -> None:
        last, wait = time.monotonic(), LOST_SECONDS
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            now = time.monotonic()
            if any(worker.there for worker in self.numbered.values()):
                last, wait = now, LOST_SECONDS
            elif now - max(last, self.placement.placed_at) > wait and self.placement.renew():
                last, wait = now, min(2 * wait, LONGEST_WAIT)

    # ---- placement -------------------------------------------------------------------------------------------------

    def _plan(self, connected: Connected) -> PlaceWorkers:
        """Where the hub listens, and what each worker needs."""
        if not self.router_address:
            self.router_address = self.hub.listen(connected.interface)
        device = self._devices(connected)
        self.ways = ways_of([worker.settings for worker in self.numbered.values()])
        for worker in self.numbered.values():
            worker.mixed = self.ways
        cores = self._cores(connected, device)
        gpus = tuple(map(float, self._gpus(device)))
        return PlaceWorkers(self.router_address, self.secret, cores, gpus, self.shape.transport)

    def _devices(self, connected: Connected) -> list[str]:
        """A GPU for each rank of each worker, if there are so many; else none for all whose device is not given."""
        default = "cuda" if connected.gpus >= sum(self._gpus(["cuda"] * len(self.numbered))) else "cpu"
        devices = [worker.settings.setdefault("device", default) for worker in self.numbered.values()]
        needed = self._gpus(devices)
        if sum(needed) > connected.gpus:
            each = "a GPU" if max(needed) == 1 else f"{max(needed)} GPUs (parallel)"
            raise ConfigError(
                f"{devices.count('cuda')} workers with device=cuda need {each} each, and the Ray cluster has "
                f"{connected.gpus:g} free: start fewer, or use device=cpu."
            )
        return devices

    def _gpus(self, devices: list[str]) -> list[int]:
        """That each worker needs: one for each of its ranks."""
        ranks = [worker.settings.get("parallel", 1) for worker in self.numbered.values()]
        return [count if device == "cuda" else 0 for device, count in zip(devices, ranks, strict=True)]

    def _cores(self, connected: Connected, device: list[str]) -> tuple[float, ...]:
        total, count = int(sum(connected.cores)), len(self.numbered)
        each = max(1, min(int(max(connected.cores)), total // count))
        needed = []
        for number, worker in self.numbered.items():
            ranks = worker.settings.get("parallel", 1)
            threads = worker.settings.setdefault("threads", max(1, each // ranks) if device[number] == "cpu" else 1)
            needed.append(ranks * threads)
        if self.shape.share_cores:
            return (0.0,) * count
        if sum(needed) > total or max(needed) > max(connected.cores):
            raise ConfigError(
                f"{count} workers need {sum(needed)} cores together (parallel × threads), and the Ray cluster has "
                f"{total}: start fewer workers, set these lower, add machines, or let them share cores (--share-cores)."
            )
        return tuple(map(float, needed))

    def _on_died(self, died: WorkerDied) -> None:
        worker = self.numbered[died.worker]
        worker.not_placed(died.why)
        if died.fatal:
            worker.fail(ConfigError(f"{worker.name}: {died.why}."))
        elif self.ready is None:
            worker.fail(ConfigError(f"{worker.name}: its process ended while it started. Ray's logs have the reason."))

    def _kill(self, number: int) -> None:
        self.placement.kill(number)
