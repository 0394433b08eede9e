"""Faults of a server's child processes: killed, or stopped for a while."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter

from tests.serve.server import Server, children, command_line

HEAL_SECONDS = 300.0  # for a new engine process to serve
EVERY = 15.0  # seconds between two faults, at least
NAMES = {"engine": b"remote.child_main", "checker": b"grammar.check", "renderer": b"text.render"}


def find(server: Server, name: str) -> int | None:
    """The child process with this part, if there is one now."""
    found = [pid for pid in children(server.process.pid) if NAMES[name] in command_line(pid)]
    return found[0] if found else None


class Faults:
    """Injects one fault after the other, and knows when requests could suffer from them."""

    def __init__(self, server: Server, seed: int):
        self.server = server
        self.rng = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.times: list[tuple[float, float]] = []  # from a fault to its end

    async def run(self, until: float) -> None:
        """The last fault ends before `until`."""
        engine_next = time.monotonic() + 20.0
        while time.monotonic() + 2 * EVERY < until:
            if time.monotonic() > engine_next:
                await self._kill("engine")
                engine_next = time.monotonic() + 75.0  # after a minute of life it is started again without delay
            else:
                await self.rng.choice(
                    [self._stop_engine, self._stop_checker, self._kill_checker, self._kill_renderer]
                )()
            await asyncio.sleep(EVERY * (1 + self.rng.random()))

    def near(self, begin: float, end: float) -> bool:
        """Whether a fault lasted at some time between the two."""
        return any(start <= end and begin <= over for start, over in self.times)

    async def _kill_checker(self) -> None:
        await self._kill("checker")

    async def _kill_renderer(self) -> None:
        await self._kill("renderer")

    async def _kill(self, name: str) -> None:
        pid, began = find(self.server, name), time.monotonic()
        if pid is not None:
            self.counts[f"{name} killed"] += 1
            os.kill(pid, signal.SIGKILL)
            await self._healed(began)

    async def _stop_checker(self) -> None:
        pid, began = find(self.server, "checker"), time.monotonic()
        if pid is not None:
            self.counts["checker stopped"] += 1
            os.kill(pid, signal.SIGSTOP)  # the server replaces it when it is needed
            await self._healed(began)

    async def _stop_engine(self) -> None:
        pid, began = find(self.server, "engine"), time.monotonic()
        if pid is not None:
            self.counts["engine stopped for a moment"] += 1
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(self.rng.choice([0.2, 1.0, 4.0]))  # less than it takes to be called dead
            os.kill(pid, signal.SIGCONT)
            await self._healed(began)

    async def _healed(self, began: float) -> None:
        deadline = time.monotonic() + HEAL_SECONDS
        await asyncio.sleep(0.5)
        while (await asyncio.to_thread(self.server.health))["status"] != "ok":
            assert time.monotonic() < deadline, "the server did not recover from a fault"
            await asyncio.sleep(0.1)
        self.times.append((began, time.monotonic() + 0.5))
