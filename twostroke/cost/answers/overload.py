"""Whether requests arrived faster than they were served. Found in what was measured, without any replay.

Only the busiest period counts: requests before and after a moment in which the server was idle say nothing about each
other. In it an overload shows in one of three ways.

- The wait for the first token grows from request to request.
- Most requests still waited in the queue when the last one arrived. A short load may show no growing wait: a cold
  prefix cache or a pause makes the first requests slow, too.
- Most answers were unfinished when the last request arrived, more of them than before, and finishing them took far
  longer than any of them takes alone. Prompts that are read at once and long answers show only this.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

import numpy as np

from twostroke.cost.simulation.served import Served
from twostroke.cost.units import per_second, seconds

FEWEST = 8  # requests
AT_ONCE = 0.05  # arrivals within this share of the whole time may be a batch job, which may queue
TOGETHER = 0.005  # seconds between two requests of a batch job, at most
PART = 1 / 3  # least share of the requests that are in the busiest period
STEEP = 0.1  # seconds that the wait grows in a second, from which on it is an overload
STRAIGHT = 0.75  # least share of pairs of requests in which the later one waited longer
GROWN = 3.0  # growth over the whole load, in short waits (the 10th percentile)
MOST = 0.5  # share of the requests that waited, or were unfinished, when the last one arrived
FASTEST = 5  # percentile over requests
IN_A_ROW = 8  # gaps
MORE = 1.5  # unfinished ones then, over those at the middle one's arrival: a closed loop has as many at all times


class Overload(NamedTuple):
    offered: float  # requests a second that arrived
    served: float  # requests a second that were served
    why: str

    @property
    def fact(self) -> str:
        arrive = "arrives" if rounded(self.offered) == 1 else "arrive"
        are = "is" if rounded(self.served) == 1 else "are"
        return (
            f"Overloaded: {per_second(rounded(self.offered))} {arrive}, {rounded(self.served):,.10g} {are} served "
            f"({self.why})"
        )

    def __str__(self) -> str:
        return f"{self.fact}: more capacity, or admit less"


def find_overload(served: Sequence[Served], paced: bool = False, alone: float | None = None) -> Overload | None:
    """None: the requests were served as they arrived, or they all came at once.
    paced: they were sent at a rate that was asked for, so they are no batch job however soon the last one came.
    alone: seconds that the longest request takes alone, where that is known better than the fastest gaps tell."""
    done = busiest_period(served)
    if len(done) < max(FEWEST, PART * len(served)):
        return None
    begin, last = done[0].arrival, done[-1].arrival
    whole = max(one.end for one in done) - begin
    arrived = sum(begin <= one.arrival <= last for one in served)  # refused ones too
    if last == begin or (not paced and came_at_once(done)):
        return None
    offered, rate = (arrived - 1) / (last - begin), len(done) / whole
    if rate * (1 + STEEP) > offered:
        return None
    why = _growing_wait(done) or _long_queue(done) or _unfinished(done, quickest(done) if alone is None else alone)
    return None if why is None else Overload(offered, rate, why)


def busiest_period(served: Sequence[Served]) -> list[Served]:
    """The most answered requests, by their arrival, between which there was always one under way."""
    rows = sorted((one for one in served if one.answered), key=lambda one: one.arrival)
    begin, until, best = 0, -inf, slice(0, 0)
    for place, one in enumerate(rows):
        begin = place if one.arrival > until else begin
        until = max(until, one.end)
        if place + 1 - begin >= best.stop - best.start:
            best = slice(begin, place + 1)
    return rows[best]


def came_at_once(done: Sequence[Served]) -> bool:
    """Whether requests came as those of a batch job do, which are sent together and may wait. done: by arrival."""
    span, whole = done[-1].arrival - done[0].arrival, max(one.end for one in done) - done[0].arrival
    return span < AT_ONCE * whole and span <= TOGETHER * len(done)


def _growing_wait(done: Sequence[Served]) -> str | None:
    at, wait = np.array([one.arrival for one in done]), np.array([one.ttft for one in done])
    span = float(at.max() - at.min())
    if not wait.std():
        return None
    earlier, later = np.triu_indices(len(done), 1)
    apart = at[later] - at[earlier]
    slopes = (wait[later] - wait[earlier])[apart > 0] / apart[apart > 0]
    slope, straight = float(np.median(slopes)), float(np.mean(slopes > 0))  # a few long waits do not count
    if slope < STEEP or straight < STRAIGHT or slope * span < GROWN * float(np.percentile(wait, 10)):
        return None
    return f"the wait for the first token grows by {seconds(slope)} every second"


def _long_queue(done: Sequence[Served]) -> str | None:
    """Most requests waited in the queue when the last one arrived, far longer than reading a prompt takes."""
    last = done[-1].arrival
    waiting = [one.scheduled - one.arrival for one in done if one.scheduled > last]
    reading = float(np.median([one.first - one.scheduled for one in done]))
    if len(waiting) < MOST * len(done) or np.median(waiting) < GROWN * reading:
        return None
    return f"{len(waiting)} of {len(done)} still waited when the last one arrived"


def _unfinished(done: Sequence[Served], alone: float) -> str | None:
    middle, last = done[len(done) // 2].arrival, done[-1].arrival
    then, now = (sum(one.arrival <= at < one.end for one in done) for at in (middle, last))
    rest = max(one.end for one in done) - last
    if now < max(MOST * len(done), MORE * then) or rest < GROWN * alone:
        return None
    return f"{now} of {len(done)} were unfinished when the last one arrived"


def quickest(done: Sequence[Served]) -> float:
    """Seconds that the longest request takes at the speed of the fastest gaps and of the fastest prompts."""
    new = np.array([max(1, one.prompt - one.cached) for one in done])
    token = np.percentile(np.array([one.first - one.scheduled for one in done]) / new, FASTEST)
    gaps = [one.gaps if len(one.gaps) else np.array([one.end - one.first]) for one in done]
    gap = np.percentile([fastest(each) for each in gaps], FASTEST)
    return float(np.max(token * new + gap * np.array([len(each) for each in gaps])))


def fastest(gaps: np.ndarray) -> float:
    """The mean of the fastest gaps in a row: a single one may be two tokens that came together."""
    count = min(IN_A_ROW, len(gaps))
    return float(np.convolve(gaps, np.ones(count) / count, "valid").min())


def rounded(rate: float) -> float:
    """The rate to two digits behind the point, or three in all."""
    return round(rate, 2) if rate < 10 else float(f"{rate:.3g}")
