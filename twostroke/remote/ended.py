"""A record of the last requests that ended, for a simulator to replay: times, lengths, and equal segments of prompts.

A prompt is cut into segments where its own tokens say so (not at fixed places), so that equal segments are found at any
position. Of a segment only its length and a keyed hash, salted by tenant, are kept: neither text nor tokens.
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
MAX_SEGMENTS = 1 << 17  # of all of them
SHORTEST, LONGEST = 8, 64  # tokens of a segment
MIX = 2654435761  # spreads token ids: about one in sixteen ends a segment
CONTENT_BITS = 38  # of a hash: what a trace's made-up token ids have room for


class Segment(NamedTuple):
    content: int
    length: int


class EndedRequest(NamedTuple):
    request: int
    timeline: Timeline  # without the times of single tokens
    ttft: float | None
    tpot: float | None
    output_tokens: int
    max_tokens: int | None
    priority: int
    reason: str
    segments: tuple[Segment, ...]


class EndedRequests:
    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)
        self._ended: deque[EndedRequest] = deque()
        self._segments = 0

    def add(self, request: Request, timeline: Timeline, salt: bytes, reason: str) -> None:
        params = request.params
        segments = tuple(self._cut(request.tokens[: timeline.prompt_tokens], salt))
        kept = Timeline(timeline.arrival, timeline.scheduled, timeline.end, timeline.token_times[:1])
        kept.prompt_tokens, kept.cached_tokens = timeline.prompt_tokens, timeline.cached_tokens
        kept.preemptions = timeline.preemptions
        self._ended.append(
            EndedRequest(request.id, kept, timeline.ttft, timeline.tpot, timeline.output_tokens, params.max_tokens,
                  params.priority, reason, segments)
        )  # fmt: skip
        self._segments += len(segments)
        while len(self._ended) > KEPT or self._segments > MAX_SEGMENTS:
            self._segments -= len(self._ended.popleft().segments)

    def _cut(self, tokens: Sequence[int], salt: bytes) -> Iterator[Segment]:
        begin = 0
        for end, token in enumerate(tokens, 1):
            length = end - begin
            ends = length >= SHORTEST and not (token * MIX >> 16) & 15
            if ends or length == LONGEST or end == len(tokens):
                data = array("i", tokens[begin:end]).tobytes() + salt
                digest = blake2b(data, key=self._secret, digest_size=8).digest()
                yield Segment(int.from_bytes(digest, "little") >> (64 - CONTENT_BITS), length)
                begin = end

    def latest(self, limit: int = KEPT) -> list[EndedRequest]:
        return list(self._ended)[-limit:]


def by_arrival(ended: Sequence[EndedRequest]) -> list[EndedRequest]:
    """Sorted by arrival. Neighbouring segments that only one of them has are joined."""
    seen = Counter(segment.content for one in ended for segment in one.segments)
    joined = [one._replace(segments=tuple(join(one.segments, seen))) for one in ended]
    return sorted(joined, key=lambda one: one.timeline.arrival)


def join(segments: Sequence[Segment], seen: Counter[int]) -> Iterator[Segment]:
    own: Segment | None = None
    for segment in segments:
        if seen[segment.content] == 1:
            own = segment if own is None else Segment(own.content, own.length + segment.length)
            continue
        if own is not None:
            yield own
            own = None
        yield segment
    if own is not None:
        yield own
