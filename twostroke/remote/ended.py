"""The last requests that ended, as a simulator replays them: when, how long, and which stretches of prompts are equal.

Prompts are cut where their own tokens say so (not at fixed places), so that equal stretches are found wherever they
stand. A stretch is known by a keyed hash, salted by tenant, and by nothing else: neither text nor tokens are kept.
"""

from __future__ import annotations

import secrets
from array import array
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import NamedTuple

from twostroke.metrics.timeline import Timeline
from twostroke.types import Request

KEPT = 1024  # requests
MAX_PARTS = 1 << 17  # of all of them
SHORTEST, LONGEST = 8, 64  # tokens of a stretch
MIX = 2654435761  # spreads token ids: about one in sixteen ends a stretch
CONTENT_BITS = 38  # of a hash: what a trace's made-up token ids have room for


class Part(NamedTuple):
    content: int
    length: int


class Ended(NamedTuple):
    request: int
    timeline: Timeline  # without the times of single tokens
    ttft: float | None
    tpot: float | None
    output_tokens: int
    max_tokens: int | None
    priority: int
    reason: str
    parts: tuple[Part, ...]


class Arrivals:
    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)
        self._ended: deque[Ended] = deque()
        self._parts = 0

    def add(self, request: Request, timeline: Timeline, salt: bytes, reason: str) -> None:
        params = request.params
        parts = tuple(self._cut(request.tokens[: timeline.prompt_tokens], salt))
        kept = Timeline(timeline.arrival, timeline.scheduled, timeline.end, timeline.token_times[:1])
        kept.prompt_tokens, kept.cached_tokens = timeline.prompt_tokens, timeline.cached_tokens
        kept.preemptions = timeline.preemptions
        self._ended.append(
            Ended(request.id, kept, timeline.ttft, timeline.tpot, timeline.output_tokens, params.max_tokens,
                  params.priority, reason, parts)
        )  # fmt: skip
        self._parts += len(parts)
        while len(self._ended) > KEPT or self._parts > MAX_PARTS:
            self._parts -= len(self._ended.popleft().parts)

    def _cut(self, tokens: Sequence[int], salt: bytes) -> Iterator[Part]:
        begin = 0
        for end, token in enumerate(tokens, 1):
            length = end - begin
            ends = length >= SHORTEST and not (token * MIX >> 16) & 15
            if ends or length == LONGEST or end == len(tokens):
                data = array("i", tokens[begin:end]).tobytes() + salt
                digest = blake2b(data, key=self._secret, digest_size=8).digest()
                yield Part(int.from_bytes(digest, "little") >> (64 - CONTENT_BITS), length)
                begin = end

    def latest(self, limit: int = KEPT) -> list[Ended]:
        return list(self._ended)[-limit:]


def by_arrival(ended: Sequence[Ended]) -> list[Ended]:
    """Sorted by arrival. What only one of them has is one part."""
    seen = Counter(part.content for one in ended for part in one.parts)
    joined = [one._replace(parts=tuple(join(one.parts, seen))) for one in ended]
    return sorted(joined, key=lambda one: one.timeline.arrival)


def join(parts: Sequence[Part], seen: Counter[int]) -> Iterator[Part]:
    own: Part | None = None
    for part in parts:
        if seen[part.content] == 1:
            own = part if own is None else Part(own.content, own.length + part.length)
            continue
        if own is not None:
            yield own
            own = None
        yield part
    if own is not None:
        yield own
