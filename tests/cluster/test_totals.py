"""The counters of several workers as those of one engine."""

from __future__ import annotations

from twostroke.cluster.totals import added
from twostroke.metrics.counts import Counts


def test_counters_add_up_place_by_place() -> None:
    one, other = Counts(steps=3, drafts=2, accepted_at=(2, 1)), Counts(steps=1, accepted_at=(1,))
    assert added(one, other) == added(other, one) == Counts(steps=4, drafts=2, accepted_at=(3, 1))
    assert added(one, Counts()) == one
