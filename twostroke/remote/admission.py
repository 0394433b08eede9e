"""Which requests are admitted: a queue bounded by what its requests may cost, before anything is allocated. Torch-free.

A request's cost is the KV blocks it may hold in the end: samples × blocks for (prompt + longest answer). The engine can
run `kv_blocks` of them at once, and the queue may hold kv_blocks × max_queue / max_requests more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import ceil

from twostroke.config import Resolved
from twostroke.errors import InputError

LONGEST_WAIT = 120.0  # seconds ever advised
HISTORY = 256  # releases from which the pace is estimated


class BusyError(Exception):
    """The queue is full. `retry_after`: whole seconds after which there should be room."""

    def __init__(self, retry_after: int):
        super().__init__(f"the server is at capacity: try again in {retry_after} s.")
        self.retry_after = retry_after


class Admission:
    def __init__(self, settings: Resolved, max_queue: int, clock: Callable[[], float]):
        self.layout = settings.layout
        self.max_queue = max_queue
        self.adapt(settings)
        self.clock = clock
        self.samples = 0
        self.blocks = 0
        self._released: deque[tuple[float, int]] = deque(maxlen=HISTORY)  # (when, blocks)

    def adapt(self, settings: Resolved) -> None:
        """The limits under these settings; requests that were admitted stay."""
        self.step = settings.max_batch_tokens if settings.chunked_prefill else settings.max_model_len
        self.max_samples = settings.max_requests + self.max_queue
        self.max_blocks = ceil(settings.kv_blocks * self.max_samples / settings.max_requests)

    def cost(self, limit: int) -> int:
        """Blocks that one sample may hold on its way to `limit` tokens."""
        return self.layout.blocks_for(limit, min(self.step, limit))

    def check(self) -> None:
        """Refuse early, before a prompt is even tokenized, when not one more sample would fit."""
        if self.samples >= self.max_samples or self.blocks >= self.max_blocks:
            raise BusyError(self.retry_after(1))

    def take(self, samples: int, blocks: int) -> None:
        """Admit a request. InputError when it would not even fit an idle server."""
        if samples > self.max_samples:
            raise InputError(
                f"n: {samples} samples are more than the {self.max_samples} that this server runs and queues: lower n."
            )
        if blocks > self.max_blocks:
            raise InputError(
                f"n: {samples} samples of this length need {blocks} KV blocks, and this server runs and queues "
                f"{self.max_blocks}: lower n or max_tokens."
            )
        if self.samples + samples > self.max_samples or self.blocks + blocks > self.max_blocks:
            raise BusyError(self.retry_after(self.blocks + blocks - self.max_blocks))
        self.samples += samples
        self.blocks += blocks

    def release(self, blocks: int) -> None:
        """One sample has ended."""
        self.samples -= 1
        self.blocks -= blocks
        self._released.append((self.clock(), blocks))

    def retry_after(self, blocks: int) -> int:
        """Whole seconds until that many blocks should be free, at the pace of the last releases."""
        if len(self._released) < 2:
            return 1
        seconds = self.clock() - self._released[0][0]
        pace = (sum(count for _, count in self._released) - self._released[0][1]) / max(seconds, 1e-3)
        return int(min(LONGEST_WAIT, max(1.0, ceil(max(blocks, 1) / pace))))
