"""What the router knows of one worker: its report, what was sent to it since, and the names of its blocks. Torch-free.

a prompt of t tokens    wait + token · t                     until it is computed
                        streams · token · t                  that the answers there wait meanwhile, all together
in place                max(wait + token · t, place) + step  until the second token
to a writer             max(ready, place) + step
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Role(StrEnum):
    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"  # it also computes prompts where that is sooner


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """What a worker reports of itself."""

    queued_tokens: int = 0  # of prompts that it has and has not computed
    streams: int = 0  # answers that it writes, or has taken to write
    max_streams: int = 1  # that it can write at once
    token_seconds: float = 0.0  # to compute a token of a prompt, beside the streams that it writes now
    step_seconds: float = 0.0  # of a step of its streams
    stream_seconds: float = 1.0  # that a stream takes on average: when a full worker has a place again
    blocks: int = 1 << 62  # that it can keep; of the names that the router knows, the oldest beyond that are forgotten


class RoutedWorker:
    __slots__ = (
        *("held", "helps", "load", "name", "number", "open", "place", "role", "sent_streams", "sent_tokens", "step"),
        *("streams", "token", "wait", "writes"),
    )

    def __init__(self, number: int, name: str, role: Role, load: WorkerLoad):
        self.number = number  # in the order in which workers joined
        self.name = name
        self.held: dict[bytes, None] = {}  # names of its blocks, the oldest first
        self.report(role, load)

    def report(self, role: Role, load: WorkerLoad) -> None:
        """Take a worker's report. It covers what was sent to the worker before."""
        self.role = role
        self.load = load
        self.open = True  # it may be asked
        self.writes, self.helps = role is not Role.PREFILL, role is not Role.DECODE
        self.token, self.step = load.token_seconds, load.step_seconds
        self.sent_tokens = self.sent_streams = 0
        self._count()

    def take(self, tokens: int, streams: int) -> None:
        """What was sent counts until the next report."""
        self.sent_tokens += tokens
        self.sent_streams += streams
        self._count()

    def _count(self) -> None:
        load = self.load
        self.streams = load.streams + self.sent_streams
        self.wait = (load.queued_tokens + self.sent_tokens) * load.token_seconds  # for the prompts that it has
        over = self.streams + 1 - load.max_streams
        # Seconds until it can write one more answer: its streams end evenly over time.
        self.place = over * load.stream_seconds / load.max_streams if over > 0 else 0.0

    def cached(self, names: Sequence[bytes], guess: int = 0) -> int:
        """Leading blocks that it has. Names are chained and the end of a prompt is evicted first, so the border is
        found by bisection. guess: where it may be."""
        held = self.held
        if not names or names[0] not in held:
            return 0
        if guess and names[guess - 1] in held and (guess == len(names) or names[guess] not in held):
            return guess
        if names[-1] in held:
            return len(names)
        low, high = 1, len(names)  # the first `low` are there
        while low < high:
            middle = (low + high + 1) // 2
            if names[middle - 1] in held:
                low = middle
            else:
                high = middle - 1
        return low
