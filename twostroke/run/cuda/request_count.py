"""How many requests run at once on a GPU: as many as measured steps and the memory allow.

A step of streams takes half of `max_gap` at most, so that prompts beside it have the other half. Its products are
measured with two numbers of rows; reading K and V takes as long for a byte as reading the weights does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from twostroke.kv.layout import KVLayout
from twostroke.ops.interface import BLOCK
from twostroke.run.cuda.buckets import BATCHES

MOST = BATCHES[-1]
LEAST = 64
CONTEXT = 1024  # tokens of a usual request
MEASURED = (128, 512)  # rows
SHARE = 0.5  # of max_gap


class RowTimes(NamedTuple):
    """Seconds of steps without contexts."""

    one: float
    some: float  # of MEASURED[0] rows
    many: float  # of MEASURED[1] rows

    @classmethod
    def measure(cls, seconds: Callable[[int], float]) -> RowTimes:
        return cls(seconds(1), *map(seconds, MEASURED))

    def of(self, rows: int) -> float:
        each = max(0.0, self.many - self.some) / (MEASURED[1] - MEASURED[0])
        return max(self.one, self.some + (rows - MEASURED[0]) * each)


def request_count(times: RowTimes, weight_bytes: int, layout: KVLayout, blocks: int, max_gap: float) -> int:
    """blocks: of the KV cache."""
    read = times.one / weight_bytes * layout.read_bytes(CONTEXT)  # seconds for the K and V of a request

    def fits(rows: int) -> bool:
        return times.of(rows) + rows * read <= SHARE * max_gap and rows * CONTEXT <= blocks * BLOCK

    return max([LEAST, *filter(fits, BATCHES)])
