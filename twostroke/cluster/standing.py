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
from typing import NamedTuple

EXACT = 64  # leading blocks of a prompt of which each name is kept
STRIDE = 16  # of those after them: blocks from one name that is kept to the next

BlockName = bytes | int  # of a block; 8 bytes, or a number of 64 bits, are what the native core takes as it is


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


class Standing(NamedTuple):
    """What the router makes of a worker's report and of what was sent to it."""

    wait: float  # seconds for the prompts that it has
    place: float  # seconds until it can write one more answer
    sent_tokens: int  # of prompts, since its report
    sent_streams: int
    names: int  # that are kept
    blocks: int  # that these stand for


class RoutedWorker:
    __slots__ = (
        *("blocks", "held", "helps", "load", "number", "open", "place", "role", "sent_streams", "sent_tokens"),
        *("step", "streams", "token", "wait", "writes"),
    )

    def __init__(self, number: int, role: Role, load: WorkerLoad):
        self.number = number  # in the order in which workers joined
        self.held: dict[BlockName, int] = {}  # names of its blocks, the oldest first, and how many each stands for
        self.blocks = 0  # that they all stand for
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

    def standing(self) -> Standing:
        return Standing(self.wait, self.place, self.sent_tokens, self.sent_streams, len(self.held), self.blocks)

    def _count(self) -> None:
        load = self.load
        self.streams = load.streams + self.sent_streams
        self.wait = (load.queued_tokens + self.sent_tokens) * load.token_seconds  # for the prompts that it has
        over = self.streams + 1 - load.max_streams
        # Seconds until it can write one more answer: its streams end evenly over time.
        self.place = over * load.stream_seconds / load.max_streams if over > 0 else 0.0

    def cached(self, names: Sequence[BlockName], kept: Sequence[BlockName] | None = None, guess: int = 0) -> int:
        """Leading blocks that it has. Names are chained and the end of a prompt is forgotten first, so the border is
        found by bisection among the names that are kept. The end of another prompt may lie behind it. kept: `kept_of`
        the names, where that is known. guess: where the border may be."""
        held = self.held
        if not names or names[0] not in held:
            return 0
        if 0 < guess < EXACT and names[guess - 1] in held and (guess == len(names) or names[guess] not in held):
            return guess
        if names[-1] in held:
            return len(names)
        kept = kept_of(names) if kept is None else kept
        low, high = 0, len(kept) - 1  # the kept name `low` is there
        while low < high:
            middle = (low + high + 1) // 2
            if kept[middle] in held:
                low = middle
            else:
                high = middle - 1
        if low < EXACT:
            return low + 1
        found = EXACT + (low - EXACT) * STRIDE
        for place in range(min(found + STRIDE, len(names)) - 1, found, -1):
            if names[place] in held:
                return place + 1
        return found + 1


def kept_of(names: Sequence[BlockName]) -> Sequence[BlockName]:
    """The names that are kept of those of leading blocks, without that of the last one."""
    return names if len(names) <= EXACT else [*names[:EXACT], *names[EXACT::STRIDE]]


def stands_for(place: int) -> int:
    """For how many blocks the name at this place stands, if it is kept: itself, or those from one kept name to the
    next, or, as the last name of a prompt, those after the kept name before it."""
    return 1 if place < EXACT else (place - EXACT) % STRIDE or STRIDE
