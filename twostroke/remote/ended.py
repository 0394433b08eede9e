"""A record of the last requests that ended, for a simulator to replay: times, lengths, and equal segments of prompts.

A prompt is cut into segments where its own tokens say so (not at fixed places), so that equal segments are found at any
position. Of a segment only its length and a keyed hash are kept: neither text nor tokens. The places of the cuts and
the hashes depend on a secret of this process and on the salt of the API key, so a reader cannot test candidate prompts
against them. The lengths of whole prompts are padded to a multiple of PADDED tokens for the same reason.

Of some answers it is also counted how often prompt lookup would have guessed right (draft/replay.py). Replays take at
most a hundredth of the time. Long requests are recorded in a thread: the caller's event loop does not wait.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from struct import Struct
from threading import Lock
from typing import NamedTuple

import numpy as np

from twostroke.draft.replay import LookupCounts, replay
from twostroke.metrics.timeline import Timeline
from twostroke.types import Request

KEPT = 1024  # requests
MAX_SEGMENTS = 1 << 17  # of all of them
SHORTEST, LONGEST = 8, 64  # tokens of a segment
CUT_BITS = 3  # one pair of neighbours in 2^3 ends a segment, if that is not too short
PADDED = 16  # tokens: lengths of prompts are shown as multiples of it
MAX_SALTS = 256  # whose cuts are remembered
AT_ONCE = 1024  # tokens: longer requests are recorded in a thread
REPLAYS = 0.01  # share of the time that replays of prompt lookup may take
REPLAYED = 8192  # longest request that is replayed, in tokens
PACKED = Struct("<qi")  # a segment's content and length
CONTENT_BITS = 38  # of a hash: what a trace's made-up token ids have room for


class PromptSegment(NamedTuple):
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
    determined: bool  # by its prompt and parameters: temperature 0, or a seed
    packed: bytes  # the segments as numbers: objects would take ten times the memory
    lookup: LookupCounts | None = None  # None: not replayed

    @property
    def segments(self) -> list[PromptSegment]:
        return [PromptSegment(*pair) for pair in PACKED.iter_unpack(self.packed)]


def pack(segments: Iterable[PromptSegment]) -> bytes:
    return b"".join(PACKED.pack(*segment) for segment in segments)


class EndedRequests:
    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)
        self._ended: deque[EndedRequest] = deque()
        self._segments = 0
        self._next_replay = 0.0
        self._cuts: dict[bytes, np.ndarray] = {}  # by salt: the multipliers and the addend of `_ends`
        self._lock = Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ended")

    def add(self, request: Request, timeline: Timeline, salt: bytes, reason: str, written: Sequence[int] = ()) -> None:
        """written: the tokens of the answer."""
        if len(request.tokens) + len(written) <= AT_ONCE:
            self._add(request, timeline, salt, reason, written)
        else:
            self._thread.submit(self._add, request, timeline, salt, reason, written)

    def _add(self, request: Request, timeline: Timeline, salt: bytes, reason: str, written: Sequence[int]) -> None:
        params = request.params
        segments = self._cut(request.tokens[: timeline.prompt_tokens], salt)
        kept = Timeline(timeline.arrival, timeline.scheduled, timeline.end, timeline.token_times[:1])
        kept.prompt_tokens, kept.cached_tokens = padded(timeline.prompt_tokens), timeline.cached_tokens
        kept.preemptions = timeline.preemptions
        kept.transfer, kept.decode_queue = timeline.transfer, timeline.decode_queue
        determined = params.temperature == 0 or params.seed is not None
        ended = EndedRequest(
            request.id, kept, timeline.ttft, timeline.tpot, timeline.output_tokens, params.max_tokens, params.priority,
            reason, determined, pack(segments), self._replayed(request.tokens, written),
        )  # fmt: skip
        with self._lock:
            self._ended.append(ended)
            self._segments += len(segments)
            while len(self._ended) > KEPT or self._segments > MAX_SEGMENTS:
                self._segments -= len(self._ended.popleft().packed) // PACKED.size

    def _replayed(self, prompt: Sequence[int], written: Sequence[int]) -> LookupCounts | None:
        """A replay of prompt lookup over this answer; None for most answers: replays take a small share of the time."""
        began = time.perf_counter()
        if len(written) < 2 or len(prompt) + len(written) > REPLAYED or began < self._next_replay:
            return None
        counts = replay(prompt, written)
        ended = time.perf_counter()
        self._next_replay = ended + (ended - began) / REPLAYS
        return counts

    def _cut(self, tokens: Sequence[int], salt: bytes) -> list[PromptSegment]:
        """The last segment holds the padding too: equal contents have equal lengths."""
        numbers = np.asarray(tokens, dtype=np.int32)
        total, begin, segments = len(numbers), 0, []
        for end in self._borders(numbers, salt):
            pad = padded(total) - total if end == total else 0
            content = self._content(numbers[begin:end].tobytes() + salt + bytes([pad]))
            segments.append(PromptSegment(content, end - begin + pad))
            begin = end
        return segments

    def _borders(self, numbers: np.ndarray, salt: bytes) -> Iterator[int]:
        """The end of each segment: after LONGEST tokens, or after a token that ends one."""
        begin, total = 0, len(numbers)
        for end in (*self._ends(numbers, salt), total):
            while end - begin > LONGEST:
                begin += LONGEST
                yield begin
            if end - begin >= SHORTEST or (end == total and end > begin):
                begin = end
                yield end

    def _ends(self, numbers: np.ndarray, salt: bytes) -> list[int]:
        """Where a segment may end: after pairs of tokens that a secret hash selects, another one for each salt."""
        with self._lock:
            if salt not in self._cuts:
                if len(self._cuts) == MAX_SALTS:
                    self._cuts.pop(next(iter(self._cuts)))
                digest = blake2b(salt, key=self._secret, digest_size=24, person=b"cut").digest()
                self._cuts[salt] = np.frombuffer(digest, dtype=np.uint64) | np.uint64(1)
            first, second, addend = self._cuts[salt]
        mixed = numbers.astype(np.uint64) * second + addend  # modulo 2^64
        mixed[1:] += numbers[:-1].astype(np.uint64) * first
        return (np.flatnonzero(mixed >> np.uint64(64 - CUT_BITS) == 0) + 1).tolist()

    def _content(self, data: bytes) -> int:
        digest = blake2b(data, key=self._secret, digest_size=8).digest()
        return int.from_bytes(digest, "little") >> (64 - CONTENT_BITS)

    def latest(self, limit: int = KEPT) -> list[EndedRequest]:
        with self._lock:
            return list(self._ended)[-limit:]


def padded(length: int) -> int:
    return -(-length // PADDED) * PADDED


def by_arrival(ended: Sequence[EndedRequest]) -> list[EndedRequest]:
    """Sorted by arrival. Neighbouring segments that only one of them has are joined."""
    seen = Counter(segment.content for one in ended for segment in one.segments)
    joined = [one._replace(packed=pack(join(one.segments, seen))) for one in ended]
    return sorted(joined, key=lambda one: one.timeline.arrival)


def join(segments: Sequence[PromptSegment], seen: Counter[int]) -> Iterator[PromptSegment]:
    own: PromptSegment | None = None
    for segment in segments:
        if seen[segment.content] == 1:
            own = segment if own is None else PromptSegment(own.content, own.length + segment.length)
            continue
        if own is not None:
            yield own
            own = None
        yield segment
    if own is not None:
        yield own
