"""Every step with what it computed and how long it took: the last few thousand, in memory. Torch-free.

The engine writes one entry for each collected step. The cost model is fitted to it, the lanes of a dashboard are drawn
from it, and a diagnosis reads from it how large the batches really were.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

KEPT = 4096  # steps


class LoggedWork(NamedTuple):
    """`count` tokens of one request, the first of them at position `start`."""

    request: int
    start: int
    count: int  # type: ignore[assignment]  # hides tuple.count
    kind: str = "write"  # "read", "write" or "verify", as in types.WorkKind


class BlockCounts(NamedTuple):
    """The KV pool while a step ran. `shared`: held by more than one request; `host`: evicted, and kept there."""

    free: int = 0
    held: int = 0
    cached: int = 0
    shared: int = 0
    host: int = 0


class Step(NamedTuple):
    number: int
    launched: float  # on the engine's clock
    seconds: float  # less what it spent waiting for the step before it
    works: tuple[LoggedWork, ...]
    sampled: int  # rows of logits made
    blocks: BlockCounts = BlockCounts()
    running: int = 0
    waiting: int = 0

    @property
    def tokens(self) -> int:
        return sum(work.count for work in self.works)

    @property
    def chunks(self) -> list[LoggedWork]:
        """Parts of prompts that were read."""
        return [work for work in self.works if work.kind == "read"]

    @property
    def streams(self) -> list[LoggedWork]:
        """Streams that wrote a token, or verified drafts."""
        return [work for work in self.works if work.kind != "read"]

    @property
    def contexts(self) -> list[int]:
        """Tokens that each row of a stream attends to."""
        return [work.start + row + 1 for work in self.streams for row in range(work.count)]


RawStep = tuple[int, float, float, tuple[tuple[int, int, int, str], ...], int, tuple[int, ...], int, int]


class StepLog:
    """Many steps are written and few are read. So a step is kept as tuples of numbers, which the garbage collector does
    not visit, and becomes a `Step` when it is read."""

    def __init__(self, kept: int = KEPT):
        self._steps: deque[RawStep] = deque(maxlen=kept)

    def add(self, step: RawStep) -> None:
        self._steps.append(step)

    def __iter__(self) -> Iterator[Step]:
        return map(make_step, self._steps)

    def __len__(self) -> int:
        return len(self._steps)

    def after(self, number: int, limit: int = KEPT) -> list[Step]:
        """The newest `limit` of the steps after this one, oldest first."""
        recent: list[Step] = []
        for step in reversed(self._steps):
            if step[0] <= number or len(recent) == limit:
                break
            recent.append(make_step(step))
        return recent[::-1]

    def clear(self) -> None:
        self._steps.clear()


def make_step(raw: Sequence[Any]) -> Step:
    """A step from numbers in the order of its fields. TypeError: too few or too many of them."""
    number, launched, seconds, works, sampled, blocks, running, waiting = raw
    made = tuple([LoggedWork(*work) for work in works])
    return Step(number, launched, seconds, made, sampled, BlockCounts(*blocks), running, waiting)
