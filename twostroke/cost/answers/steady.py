"""A fleet under a load, simulated until it is clear whether it meets the targets.

The load is fed in parts. The first fills the fleet and does not count. After each further part the simulation stops if
the fleet is overloaded (its queue grows with every part), if too many requests miss the targets, or if their share and
the 95th percentiles are steady: the standard error over the parts is small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, sqrt
from typing import NamedTuple

import numpy as np

from twostroke.cost.simulation.deployment import Deployment, Outcome
from twostroke.cost.simulation.fleet import Fleet
from twostroke.cost.simulation.served import Served, Targets
from twostroke.cost.simulation.trace import Arrival

SHARE = 0.95  # of the requests that must meet the targets
PART = 100  # fewest requests in a part
FEWEST = 6  # parts that must have been judged before a fleet is accepted
MOST = 4000  # requests in one simulation
CLOSE = 0.03  # standard error of a 95th percentile that is steady, as a share of it
SURE = 2.0  # standard errors between the share that meets the targets and SHARE
LAG = 0.02  # growth of the requests under way, as a share of the arrivals, from which on a queue grows
FAR = 0.2  # the same where the simulation stops at once
UNKNOWN = 1e9  # seconds: a percentile of a part without an answer
CHANCE = 2.5  # square roots of the requests under way: growth by less than this may be chance


class JudgedPart(NamedTuple):
    """One part of the load, judged."""

    share: float  # of the requests that met the targets
    ttft: float  # 95th percentiles
    tpot: float


@dataclass(frozen=True, slots=True)
class Trial:
    """A fleet that was tried. `outcome` leaves the first part out; None: the simulation stopped before the end."""

    met: bool
    outcome: Outcome | None
    requests: int  # that were simulated
    seconds: float  # that were simulated
    lag: float  # of the served rate behind the offered one, as a share of it
    close: float  # the standard error at which its percentiles counted as steady


def try_fleet(
    deployment: Deployment,
    load: Sequence[Arrival],
    targets: Targets,
    part: int = PART,
    least: int = 0,
    close: float = CLOSE,
) -> Trial:
    """`part`: requests in a part; `least`: fewest requests that are simulated before the fleet is accepted; `close`:
    the standard error at which a percentile is steady."""
    fleet, waiting = deployment.fleet(), []
    settled: list[JudgedPart] = []
    decided: bool | None = None
    fed = 0
    while decided is None and fed < len(load):
        fleet.feed(load[fed : fed + part])
        fed = min(len(load), fed + part)
        waiting.append(fleet.outstanding)
        parts = judged(fleet, load, targets, part, fed, settled)
        decided = decide(parts, lag_of(waiting, part), fed >= least, close)
    lag, now = lag_of(waiting, part), fleet.now
    if decided is False:
        return Trial(False, None, fed, now, lag, close)
    fleet.drain()
    outcome = deployment.outcome(fleet, part if fed > part else 0)
    met = targets.met_by_share(outcome.served, SHARE) and lag <= LAG
    return Trial(met, outcome, fed, now, lag, close)


def lag_of(waiting: Sequence[int], part: int) -> float:
    """How much the served rate lags the offered one, as a share of it: from the growth of the requests under way since
    the fleet was filled. 0 where it may be chance."""
    filled = waiting[1:]
    if len(filled) < 3:
        return 0.0
    edge = 2 if len(filled) > 4 else 1
    first, last = float(np.mean(filled[:edge])), float(np.mean(filled[-edge:]))
    growth = last - first
    return growth / (part * (len(filled) - edge)) if growth > CHANCE * sqrt(max(last, 1.0)) else 0.0


def judged(
    fleet: Fleet, load: Sequence[Arrival], targets: Targets, part: int, fed: int, settled: list[JudgedPart]
) -> list[JudgedPart]:
    """The parts after the first and before the last, whose requests have had time to end. `settled`: the leading parts
    all of whose requests have ended; they are added to and not judged again."""
    found = list(settled)
    for first in range(part * (1 + len(settled)), fed - part, part):
        found.append(judge(fleet, load, targets, first, first + part))
        if len(settled) == len(found) - 1 and all(map(has_ended, fleet.served[first : first + part])):
            settled.append(found[-1])
    return found


def has_ended(served: Served) -> bool:
    return served.refused or served.end < inf


def judge(fleet: Fleet, load: Sequence[Arrival], targets: Targets, first: int, last: int) -> JudgedPart:
    ttfts, tpots, met, missed = [], [], 0, 0
    for served, arrival in zip(fleet.served[first:last], load[first:last], strict=True):
        if has_ended(served):
            hit = targets.met_by(served)
            met, missed = met + hit, missed + (not hit)
            if served.answered:
                ttfts.append(served.ttft)
                tpots.append(served.tpot or 0.0)
        elif fleet.now - served.arrival > targets.ttft + targets.tpot * arrival.output:
            missed += 1
    if not ttfts:
        return JudgedPart(0.0 if missed else 1.0, UNKNOWN, UNKNOWN)
    return JudgedPart(met / max(1, met + missed), float(np.percentile(ttfts, 95)), float(np.percentile(tpots, 95)))


def decide(parts: Sequence[JudgedPart], lag: float, enough: bool, close: float) -> bool | None:
    """True: it meets the targets; False: it does not, or is overloaded; None: not clear yet."""
    if len(parts) < 2:
        return None
    share, error = mean_and_error([one.share for one in parts])
    if share + SURE * error < SHARE and (len(parts) > 2 or share < 0.5):
        return False
    if len(parts) < FEWEST:
        return None
    if lag > FAR:
        return False
    clear = share - SURE * error >= SHARE and lag <= LAG
    steady = all(error <= close * mean for mean, error in map(mean_and_error, zip(*parts, strict=True)))
    return True if clear and enough and steady else None


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean and its standard error."""
    return float(np.mean(values)), float(np.std(values, ddof=1)) / sqrt(len(values))
