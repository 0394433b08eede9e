"""KV blocks for API keys: a key that holds more than its part makes room for one that waits. Torch-free.

Every key with requests has an equal part of the pool. A request that finds too few blocks may ask for room: keys that
hold more than their part then lose requests, the least worth keeping first, as far as that is enough and down to their
part. Lost requests wait until the asking one is in the batch. When the pool is full, the request that is preempted is
also one of a key above its part.

**All requests end.** A key always keeps its best request (by `worth_keeping`): no rule here takes it. So the best
request of the whole batch is never preempted, it reaches its end, and then the same holds for the rest.

**A key with less than its part does not wait for another key's answers to end**, unless one single request holds the
blocks: when the pool is full and one key holds less than its part, another one holds more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from twostroke.kv.tables import KVTables
from twostroke.types import RequestState, Status

if TYPE_CHECKING:
    from twostroke.schedule.scheduler import Scheduler


class Parts:
    """Blocks that each key in the batch holds, and the part of the pool that every key has."""

    def __init__(self, tables: KVTables, batch: Iterable[RequestState], waiting: Iterable[RequestState]):
        rows: dict[int, list[int]] = {}
        for request in batch:
            rows.setdefault(request.key, []).append(request.row)
        self.requests = {key: len(found) for key, found in rows.items()}
        self.held = {key: tables.blocks_of(found) for key, found in rows.items()}
        self.part = tables.pool.total // max(1, len(rows.keys() | {request.key for request in waiting}))

    def may_take(self, key: int, blocks: int) -> bool:
        """Whether so many blocks more are within the key's part. Its first request always is."""
        return not self.requests.get(key) or self.held[key] + blocks <= self.part

    def excess(self, key: int) -> int:
        """Blocks that the key holds beyond its part; 0 for a key with a single request, which it keeps."""
        return max(0, self.held[key] - self.part) if self.requests[key] > 1 else 0


class Room:
    """Which requests leave the batch, and which stay out of it, for a request of another key."""

    def __init__(self, scheduler: Scheduler):
        self.scheduler = scheduler
        self.asking: RequestState | None = None  # waits for blocks
        self.leaving: set[int] = set()  # ids of running requests that are not planned any more and lose their blocks

    @property
    def shared(self) -> bool:
        """Whether keys have parts at all."""
        return self.scheduler.limits.key_share < 1.0

    def begin_plan(self) -> None:
        """Preempt requests that leave, once no step in flight writes their blocks."""
        if self.asking is not None and self.asking.status is not Status.WAITING:
            self.asking = None
            self.leaving.clear()
        running = self.scheduler.running
        for number in sorted(self.leaving):
            if number not in running:
                self.leaving.discard(number)
            elif not running[number].in_flight:
                self.leaving.discard(number)
                self.scheduler.preempt(running[number])

    def stays_out(self, request: RequestState, blocks: int) -> bool:
        """Whether a waiting request that needs so many blocks must let the asking one go first."""
        asking = self.asking
        if asking is None or asking.key == request.key or request.params.priority < asking.params.priority:
            return False
        return not self._parts().may_take(request.key, blocks)

    def ask(self, request: RequestState, blocks: int, missing: int) -> None:
        """A waiting request needs so many blocks, of which some are missing."""
        if not request.key or not self.shared:
            return
        self.asking = request
        if self.leaving:
            return
        parts = self._parts()
        if not parts.may_take(request.key, blocks):
            return
        found: list[RequestState] = []
        for key in sorted(parts.held, key=parts.excess, reverse=True):
            allowed = parts.excess(key) if key != request.key else 0
            for victim in self._least_worth(key, request.params.priority)[: parts.requests[key] - 1]:
                if missing <= 0 or allowed <= 0:
                    break
                own = self.scheduler.tables.own_blocks(victim)
                missing -= own
                allowed -= own
                found.append(victim)
        if missing <= 0:  # else it would not help
            self.leaving = {victim.id for victim in found}

    def worth(self) -> Callable[[RequestState], tuple[int, ...]]:
        """By which requests are preempted when the pool is full, smallest first: the least important, then those of
        keys above their part without the best of each, then as `worth_keeping` says."""
        batch = self.scheduler.running.values()
        if not self.shared or len({request.key for request in batch}) < 2:
            return worth_keeping
        parts = self._parts()
        best = {request.key: request.id for request in sorted(batch, key=worth_keeping)}

        def worth(request: RequestState) -> tuple[int, ...]:
            kept = best[request.key] == request.id or not parts.excess(request.key)
            return (-request.params.priority, kept, *worth_keeping(request)[1:])

        return worth

    def _least_worth(self, key: int, priority: int) -> list[RequestState]:
        """Requests of a key that are no more important, those that are least worth keeping first."""
        running = self.scheduler.running.values()
        return sorted((r for r in running if r.key == key and r.params.priority >= priority), key=worth_keeping)

    def _parts(self) -> Parts:
        scheduler = self.scheduler
        return Parts(scheduler.tables, (*scheduler.running.values(), *scheduler.fetching.values()), scheduler.waiting)


def worth_keeping(request: RequestState) -> tuple[int, int, int]:
    """Smallest first: the least important, then the one that loses least, then the youngest."""
    return (-request.params.priority, request.computed, -request.id)
