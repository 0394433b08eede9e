"""The counters of several workers as those of one engine. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import zip_longest

from twostroke.cluster.member import Member
from twostroke.metrics.counts import Counts

PRESENT = (
    "running", "waiting", "blocks_total", "blocks_free", "blocks_cached", "blocks_on_host", "host_bytes",
)  # fmt: skip


class Totals:
    """Sums that never fall: what a lost worker has counted stays."""

    def __init__(self) -> None:
        self.retired = Counts()
        self.retired_seconds = 0.0

    def retire(self, member: Member) -> None:
        """A worker is lost, and counts from zero when it is back."""
        self.retired = added(self.retired, member.counts._replace(**dict.fromkeys(PRESENT, 0)))
        self.retired_seconds += member.step_seconds
        member.counts, member.step_seconds = Counts(), 0.0

    def of(self, members: Iterable[Member]) -> tuple[Counts, float]:
        total, seconds = self.retired, self.retired_seconds
        for member in members:
            total = added(total, member.counts)
            seconds += member.step_seconds
        return total, seconds


def added(one: Counts, other: Counts) -> Counts:
    places = tuple(map(sum, zip_longest(one.accepted_at, other.accepted_at, fillvalue=0)))
    numbers = {name: getattr(one, name) + getattr(other, name) for name in Counts._fields}
    return Counts(**numbers | {"accepted_at": places})
