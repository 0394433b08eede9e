"""Where one answer's time went. One clock, three phases, and E2E = queue + prefill + decode for every request.

    arrival ──queue──▶ first scheduled ──prefill──▶ first token ──decode──▶ end
            └──────────── TTFT ─────────────────────┘

Time lost to preemption counts in the phase where it happens. A request that ends early (aborted, failed) closes the
phase it was in, so the identity holds for it too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple


class Facts(NamedTuple):
    """What a timeline knows besides its arrival and the times of its tokens."""

    scheduled: float | None
    end: float | None
    cached_tokens: int
    chunks: int
    preemptions: int
    recomputed_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    transfer: float = 0.0  # seconds in which its KV blocks were on their way to another worker
    decode_queue: float = 0.0  # seconds in which it waited there, for a place and for its first step

    def shifted(self, seconds: float) -> Facts:
        """The same facts on a clock that is ahead by so many seconds."""
        return self._replace(
            scheduled=None if self.scheduled is None else self.scheduled + seconds,
            end=None if self.end is None else self.end + seconds,
        )


@dataclass(slots=True)
class Timeline:
    """All times in seconds of one clock. The scheduler keeps one for each request, the caller another, from events."""

    arrival: float
    scheduled: float | None = None
    end: float | None = None
    token_times: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens found in the prefix cache when first scheduled
    chunks: int = 0  # steps that computed a part of the prompt, the last one included
    preemptions: int = 0
    recomputed_tokens: int = 0
    drafted_tokens: int = 0  # guessed, and verified by a step
    accepted_tokens: int = 0  # of those: the model chose the same
    transfer: float = 0.0  # seconds of `decode` in which KV blocks were on their way to another worker
    decode_queue: float = 0.0  # seconds of `decode` in which it waited there, for a place and for its first step

    def facts(self) -> Facts:
        return Facts(
            self.scheduled, self.end, self.cached_tokens, self.chunks, self.preemptions, self.recomputed_tokens,
            self.drafted_tokens, self.accepted_tokens, self.transfer, self.decode_queue,
        )  # fmt: skip

    def update(self, facts: Facts) -> None:
        (
            self.scheduled, self.end, self.cached_tokens, self.chunks, self.preemptions, self.recomputed_tokens,
            self.drafted_tokens, self.accepted_tokens, self.transfer, self.decode_queue,
        ) = facts  # fmt: skip

    @property
    def first_token(self) -> float | None:
        return self.token_times[0] if self.token_times else None

    def _until(self, moment: float | None) -> float:
        """`moment`, or the end of a request that never reached it, or its last sign of life."""
        if moment is not None:
            return moment
        if self.end is not None:
            return self.end
        return self.token_times[-1] if self.token_times else self.scheduled or self.arrival

    @property
    def queue(self) -> float:
        return self._until(self.scheduled) - self.arrival

    @property
    def prefill(self) -> float:
        return self._until(self.first_token) - self.scheduled if self.scheduled is not None else 0.0

    @property
    def decode(self) -> float:
        return self._until(self.end) - self.first_token if self.first_token is not None else 0.0

    @property
    def ttft(self) -> float | None:
        return self.first_token - self.arrival if self.first_token is not None else None

    @property
    def e2e(self) -> float:
        return self._until(self.end) - self.arrival

    @property
    def output_tokens(self) -> int:
        return len(self.token_times)

    @property
    def tokens_per_step(self) -> float | None:
        """Output tokens of a decode step; None where there was no such step."""
        written = self.output_tokens - 1  # the first comes from the prompt's last step
        return written / (written - self.accepted_tokens) if written > self.accepted_tokens else None

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first; None when there was no second token."""
        if self.ttft is None or self.output_tokens < 2:
            return None
        return (self.e2e - self.ttft) / (self.output_tokens - 1)

    @property
    def itl(self) -> list[float]:
        """Gaps between consecutive tokens."""
        return [later - earlier for earlier, later in pairwise(self.token_times)]
