"""One holder at a time, and API keys take turns. Torch-free.

For work that a single thread does for all callers (trying a grammar): the next to get it is of the key that has waited
longest since its last turn, so that a key with many waiting calls delays another key by one of them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from twostroke.remote.admission import FULL, KEY_FULL, BusyError
from twostroke.schedule.keys import most_of


class FairTurns:
    def __init__(self, most: int):
        """most: how many may hold or wait."""
        self.most = most
        self.inside = 0
        self._of: dict[int, int] = {}  # inside, by key
        self._waiting: dict[int, deque[asyncio.Future[None]]] = {}  # by key, in the order of their turns
        self._busy = False

    @asynccontextmanager
    async def turn(self, key: int, share: float) -> AsyncIterator[None]:
        """Waits for a turn. BusyError when too many wait, or too many of this key."""
        mine = self._of.get(key, 0)
        if self.inside >= self.most:
            raise BusyError(1, FULL)
        if key and mine >= most_of(share, self.most, self.inside - mine):
            raise BusyError(1, KEY_FULL)
        self.inside += 1
        self._of[key] = mine + 1
        try:
            await self._wait(key)
            try:
                yield
            finally:
                self._pass_on()
        finally:
            self.inside -= 1
            self._of[key] -= 1
            if not self._of[key]:
                del self._of[key]

    async def _wait(self, key: int) -> None:
        if not self._busy:
            self._busy = True
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, deque()).append(future)
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self._pass_on()  # the turn came, and the caller went
            raise

    def _pass_on(self) -> None:
        """Give the turn to the next key, which then goes to the end of the order."""
        while self._waiting:
            key, futures = next(iter(self._waiting.items()))
            del self._waiting[key]
            future = futures.popleft()
            if futures:
                self._waiting[key] = futures
            if not future.done():
                future.set_result(None)
                return
        self._busy = False
