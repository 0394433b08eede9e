"""A few places that callers hold one after the other, and API keys take turns. Torch-free.

For work that a few threads do for all callers (trying a grammar, tokenizing a long text). A place that becomes free
goes to the key that has waited longest since its last turn, so a key with many waiting calls delays another key by one
of them. Where there are several places, one key leaves one of them to others.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from twostroke.remote.admission import FULL, KEY_FULL, BusyError
from twostroke.schedule.keys import most_of


class FairTurns:
    def __init__(self, places: int = 1, most: int | None = None):
        """places: how many hold one at a time; most: how many may hold or wait, None for any number."""
        self.places = places
        self.most = most
        self.inside = Counter[int]()  # that hold or wait, by key
        self._holding = Counter[int]()
        self._waiting: dict[int, deque[asyncio.Future[None]]] = {}  # by key, in the order of their turns

    @asynccontextmanager
    async def turn(self, key: int, share: float = 1.0) -> AsyncIterator[None]:
        """Waits for a place. BusyError when too many wait, or more of this key than its share."""
        self._refuse_over(key, share)
        self.inside[key] += 1
        try:
            await self._wait(key)
            try:
                yield
            finally:
                self._leave(key)
        finally:
            self.inside -= Counter({key: 1})

    def _refuse_over(self, key: int, share: float) -> None:
        if self.most is None:
            return
        total, mine = self.inside.total(), self.inside[key]
        if total >= self.most:
            raise BusyError(1, FULL)
        if key and mine >= most_of(share, self.most, total - mine):
            raise BusyError(1, KEY_FULL)

    def _free_for(self, key: int) -> bool:
        limit = max(1, self.places - 1) if key else self.places
        return self._holding.total() < self.places and self._holding[key] < limit

    async def _wait(self, key: int) -> None:
        if self._free_for(key) and key not in self._waiting:
            self._holding[key] += 1
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, deque()).append(future)
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self._leave(key)  # the turn came, and the caller went
            raise

    def _leave(self, key: int) -> None:
        self._holding -= Counter({key: 1})
        self._pass_on()

    def _pass_on(self) -> None:
        """Give free places to the next keys. A key that gets one goes to the end of the order."""
        for key in list(self._waiting):
            futures = self._waiting[key]
            while futures and futures[0].done():  # its caller has left
                futures.popleft()
            if futures and not self._free_for(key):
                continue
            del self._waiting[key]
            if futures:
                self._holding[key] += 1
                futures.popleft().set_result(None)
                if futures:
                    self._waiting[key] = futures
