"""The counters of several workers as those of one engine. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import zip_longest
from operator import add

from twostroke.cluster.member import Member
from twostroke.metrics.counts import Counts


class Totals:
    """Sums that never fall: what a lost worker has counted stays."""

    def __init__(self) -> None:
        self.retired = Counts()
        self.retired_seconds = 0.0

    def retire(self, member: Member) -> None:
        """A worker is lost, and counts from zero when it is back."""
        self.retired = added(self.retired, without_present(member.counts))
        self.retired_seconds += member.step_seconds
        member.counts, member.step_seconds = Counts(), 0.0

    def of(self, members: Iterable[Member]) -> tuple[Counts, float]:
        total, seconds = self.retired, self.retired_seconds
        for member in members:
            total = added(total, member.counts)
            seconds += member.step_seconds
        return total, seconds


def without_present(counts: Counts) -> Counts:
    return counts._replace(
        running=0, waiting=0, blocks_total=0, blocks_free=0, blocks_cached=0, blocks_on_host=0, host_bytes=0
    )


def added(one: Counts, other: Counts) -> Counts:
    places = tuple(map(sum, zip_longest(one.accepted_at, other.accepted_at, fillvalue=0)))
    return Counts._make((*map(add, one[:-1], other[:-1]), places))  # the last field is no number
