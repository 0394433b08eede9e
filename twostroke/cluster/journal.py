"""What has travelled between workers: the last transfers one by one, and the sums of each worker. Torch-free."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from typing import NamedTuple

from twostroke.cluster.handover import Moved

KEPT = 64  # transfers


class EndedTransfer(NamedTuple):
    """A transfer, and what it moved."""

    at: float  # when
    kind: str  # "request"; "early": blocks of a prompt that was still computed; "shared": of one that was to be
    request: int
    source: str  # the worker that had the blocks
    to: str
    moved: Moved


class Journal:
    def __init__(self) -> None:
        self.last: deque[EndedTransfer] = deque(maxlen=KEPT)
        self.sent: Counter[str] = Counter()  # bytes, by worker
        self.received: Counter[str] = Counter()  # the same
        self.seconds: Counter[str] = Counter()  # in which they came, by the worker that received them
        self.hear: Callable[[EndedTransfer], None] = lambda entry: None  # is told of each

    def add(self, kind: str, request: int, source: str, to: str, moved: Moved) -> None:
        entry = EndedTransfer(time.monotonic(), kind, request, source, to, moved)
        self.last.append(entry)
        self.sent[source] += moved.bytes
        self.received[to] += moved.bytes
        self.seconds[to] += moved.on_way  # type: ignore[assignment]
        self.hear(entry)
