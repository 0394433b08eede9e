"""Whether more requests arrived than were served, so that the wait grew from request to request.

A queue that is served in order makes each request wait longer than the one before it. If λ requests arrive a second and
μ are served, the wait grows by λ/μ − 1 seconds in a second. So the slope of TTFT over the time of arrival gives μ.

A short load may show no such slope: a cold prefix cache or a pause makes the first requests slow, too. There the queue
tells: if most requests still waited in it when the last one arrived, the rate of first tokens gives μ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from twostroke.cost.simulation.served import Served
from twostroke.cost.units import per_second, seconds

FEWEST = 8  # requests
AT_ONCE = 0.05  # arrivals within this share of the whole time are a batch job, which may queue
STEEP = 0.1  # seconds that the wait grows in a second, from which on it is an overload
STRAIGHT = 0.75  # least share of pairs of requests in which the later one waited longer
GROWN = 3.0  # growth over the whole load, in short waits (the 10th percentile)
MOST = 0.5  # share of the requests that waited when the last one arrived, from which on a queue is an overload


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


def find_overload(served: Sequence[Served], paced: bool = False) -> Overload | None:
    """None: the requests were served as they arrived, or they all came at once.
    paced: they were sent at a rate that was asked for, so they are no batch job however soon the last one came."""
    done = sorted((one for one in served if one.answered), key=lambda one: one.arrival)
    if len(done) < FEWEST:
        return None
    span = done[-1].arrival - done[0].arrival
    whole = max(one.end for one in done) - done[0].arrival
    if span <= 0 or (not paced and span < AT_ONCE * whole):
        return None
    offered = (len(served) - 1) / span
    return _growing_wait(done, offered) or _long_queue(done, offered)


def _growing_wait(done: Sequence[Served], offered: float) -> Overload | None:
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
    why = f"the wait for the first token grows by {seconds(slope)} every second"
    return Overload(offered, offered / (1 + slope), why)


def _long_queue(done: Sequence[Served], offered: float) -> Overload | None:
    """Most requests waited in the queue when the last one arrived, far longer than reading a prompt takes."""
    last = done[-1].arrival
    waiting = [one.scheduled - one.arrival for one in done if one.scheduled > last]
    reading = float(np.median([one.first - one.scheduled for one in done]))
    rate = len(done) / (max(one.first for one in done) - done[0].arrival)
    if len(waiting) < MOST * len(done) or rate * (1 + STEEP) > offered or np.median(waiting) < GROWN * reading:
        return None
    return Overload(offered, rate, f"{len(waiting)} of {len(done)} still waited when the last one arrived")


def rounded(rate: float) -> float:
    """To two digits behind the point, or three in all."""
    return round(rate, 2) if rate < 10 else float(f"{rate:.3g}")
