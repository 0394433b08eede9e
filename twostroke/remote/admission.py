"""Which requests are admitted: a queue bounded by what its requests may cost, before anything is allocated. Torch-free.

A request costs samples, and KV blocks: those it may hold in the end, samples × blocks for (prompt + longest answer).
The engine can run `max_requests` samples and `kv_blocks` blocks at once; the queue may hold `max_queue` samples more,
and as many blocks in proportion. Of both, one API key may have `key_share` of what other keys leave free
(schedule/keys.py).

A refusal says when there should be room: what is missing, at the rate at which samples and blocks were given back in
the last seconds. Where none was given back, the lengths of the answers under way say when the first of them ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import ceil

from twostroke.config import Resolved
from twostroke.errors import InputError
from twostroke.schedule.keys import most_of

LONGEST_WAIT = 120.0  # seconds ever advised
HISTORY = 1024  # releases that are remembered
RECENT = 30.0  # seconds over which their rate is measured
FULL = "The server is at capacity"
KEY_FULL = "This API key has reached its share of the server"
Finishing = Callable[[int, int], float | None]


class BusyError(Exception):
    """There is no room. `retry_after`: whole seconds after which there should be."""

    def __init__(self, retry_after: int, why: str = FULL):
        super().__init__(f"{why}: try again in {retry_after} s.")
        self.retry_after = retry_after
        self.why = why


class HeldByKey:
    """What one key holds."""

    __slots__ = ("blocks", "samples")

    def __init__(self) -> None:
        self.samples = 0
        self.blocks = 0


NOTHING = HeldByKey()


class Admission:
    def __init__(self, settings: Resolved, max_queue: int, clock: Callable[[], float], finishing: Finishing):
        """finishing: (samples, key) → seconds until so many of the answers that are being written have reached their
        longest length, None if that is unknown. key 0: of all keys."""
        self.layout = settings.layout
        self.max_queue = max_queue
        self.adapt(settings)
        self.clock = clock
        self.finishing = finishing
        self.samples = 0
        self.blocks = 0
        self.held: dict[int, HeldByKey] = {}  # by key
        self._busy_since = 0.0  # when the first sample came that the present ones overlap with
        self._released: deque[tuple[float, int, int]] = deque(maxlen=HISTORY)  # (when, key, blocks)

    def adapt(self, settings: Resolved) -> None:
        """The limits under these settings; requests that were admitted stay."""
        self.step = settings.max_batch_tokens if settings.chunked_prefill else settings.max_model_len
        self.share = settings.key_share
        self.max_samples = settings.max_requests + self.max_queue
        self.max_blocks = ceil(settings.kv_blocks * self.max_samples / settings.max_requests)

    def cost(self, limit: int) -> int:
        """Blocks that one sample may hold on its way to `limit` tokens."""
        return self.layout.blocks_for(limit, min(self.step, limit))

    def check(self, key: int = 0) -> None:
        """Refuse early, before a prompt is even tokenized, when not one more sample of this key would fit."""
        self._refuse_over(1, 1, key)

    def take(self, samples: int, blocks: int, key: int = 0) -> None:
        """Admit a request. InputError when it would not even fit an idle server."""
        self._check_size(samples, blocks, key)
        self._refuse_over(samples, blocks, key)
        if not self.samples:
            self._busy_since = self.clock()
        self.samples += samples
        self.blocks += blocks
        if key:
            held = self.held.setdefault(key, HeldByKey())
            held.samples += samples
            held.blocks += blocks

    def release(self, blocks: int, key: int = 0) -> None:
        """One sample has ended."""
        self.samples -= 1
        self.blocks -= blocks
        if key:
            held = self.held[key]
            held.samples -= 1
            held.blocks -= blocks
            if not held.samples:
                del self.held[key]
        self._released.append((self.clock(), key, blocks))

    # ---- limits ----------------------------------------------------------------------------------------------------

    def _check_size(self, samples: int, blocks: int, key: int) -> None:
        share = self.share if key else 1.0
        most, room = most_of(share, self.max_samples, 0), most_of(share, self.max_blocks, 0)
        who = "one key may run and queue here" if key else "this server runs and queues"
        if samples > most:
            raise InputError(f"n: {samples} samples are more than the {most} that {who}: lower n.")
        if blocks > room:
            raise InputError(
                f"n: {samples} samples of this length need {blocks} KV blocks, more than the {room} that {who}: "
                "lower n or max_tokens."
            )

    def _refuse_over(self, samples: int, blocks: int, key: int) -> None:
        """BusyError if so much more is over the limits of the server, or over those of the key."""
        over, over_blocks = self.samples + samples - self.max_samples, self.blocks + blocks - self.max_blocks
        if over > 0 or over_blocks > 0:
            raise BusyError(self.retry_after(over, over_blocks))
        if not key:
            return
        held = self.held.get(key, NOTHING)
        over = held.samples + samples - most_of(self.share, self.max_samples, self.samples - held.samples)
        over_blocks = held.blocks + blocks - most_of(self.share, self.max_blocks, self.blocks - held.blocks)
        if over > 0 or over_blocks > 0:
            raise BusyError(self.retry_after(over, over_blocks, key), KEY_FULL)

    # ---- when there is room ----------------------------------------------------------------------------------------

    def retry_after(self, samples: int, blocks: int, key: int = 0) -> int:
        """Whole seconds until so many samples and blocks should be free: of this key, or of all (0)."""
        now = self.clock()
        begin = max(self._busy_since, now - RECENT)
        ended = [count for when, of, count in self._released if when >= begin and key in (0, of)]
        span = max(now - begin, 1e-3)
        if ended:
            wait = span * max(samples / len(ended), blocks / max(1, sum(ended)))
        else:
            wait = self.finishing(max(samples, 1), key) or 1.0
        return int(min(LONGEST_WAIT, max(1.0, ceil(wait))))
