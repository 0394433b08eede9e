"""Hits that are computed as well, to learn whether sharing was right. They are computed while the server is quiet, so
that they do not take the cores from requests; under a load that never pauses, after a while."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from twostroke.remote.stream import Stream

QUIET = 1.0  # seconds without a request
LONGEST = 60.0  # seconds that a check waits for that
MOST = 64  # checks that wait: more are left out
LOOK = 0.25  # seconds between two looks

Submit = Callable[[], Stream | None]


class Waiting(NamedTuple):
    since: float
    submit: Submit


class Shadows:
    """Used on the event loop."""

    def __init__(self, clock: Callable[[], float], busy: Callable[[], bool]):
        """busy: whether requests are being computed."""
        self._clock, self._busy = clock, busy
        self._latest = clock()
        self._waiting: deque[Waiting] = deque()
        self._task: asyncio.Task[None] | None = None

    def request(self) -> None:
        """A request has come."""
        self._latest = self._clock()

    def add(self, submit: Submit) -> None:
        """submit: begins to compute; None: it cannot now."""
        if len(self._waiting) < MOST:
            self._waiting.append(Waiting(self._clock(), submit))
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        """One after the other."""
        while self._waiting:
            if not self._due():
                await asyncio.sleep(LOOK)
                continue
            stream = self._waiting.popleft().submit()
            while stream is not None and await stream.take():
                continue

    def _due(self) -> bool:
        now = self._clock()
        quiet = now - self._latest >= QUIET and not self._busy()
        return quiet or now - self._waiting[0].since >= LONGEST
