"""Adjusts a machine's bandwidth and compute until a replay of the same arrivals matches the measurement.

Queues amplify small errors of a rate, so the rates must be right before a lever is tried. Bandwidth is adjusted to the
median TPOT, compute to the median prefill time without queueing. A rate on which the recording does not depend
(compute, where all chunks are memory-bound) stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, isfinite, log

import numpy as np

from twostroke.cost.model.rates import Rates
from twostroke.cost.simulation.deployment import Deployment
from twostroke.cost.simulation.served import Served
from twostroke.cost.simulation.trace import Arrival
from twostroke.record import replace

ROUNDS = 3
PROBE = 0.25  # trial change of a rate (all four are logarithms)
SENSITIVE = 0.3  # least dependence of a median on its rate
CLOSE = 0.01  # a median this near to the measured one is met
FURTHEST = 1.5  # largest change of a rate


def tune(
    deployment: Deployment, arrivals: Sequence[Arrival], served: Sequence[Served], among: Sequence[int] | None = None
) -> Deployment:
    """The deployment with rates under which the replay matches the measurement. among: places of the requests whose
    medians count; None: all."""
    among = range(len(arrivals)) if among is None else among
    target = medians(served, among)
    start = deployment.roofline().rates
    moved = [0.0, 0.0]  # logarithms: bandwidth, compute
    for _ in range(ROUNDS):
        far = [step(deployment, arrivals, among, target, start, moved, which) for which in (0, 1)]
        if not any(far):
            break
    return replace(deployment, rates=scaled(start, moved))


def step(
    deployment: Deployment,
    arrivals: Sequence[Arrival],
    among: Sequence[int],
    target: tuple[float, float],
    start: Rates,
    moved: list[float],
    which: int,
) -> bool:
    """Change one rate (as a logarithm) so that its median meets the measured one; whether it was changed."""
    wanted = target[which]
    now = medians(replace(deployment, rates=scaled(start, moved)).run(arrivals).served, among)[which]
    if not (isfinite(now) and isfinite(wanted) and min(now, wanted) > 0) or abs(log(now / wanted)) < CLOSE:
        return False
    probe = [value + (PROBE if index == which else 0.0) for index, value in enumerate(moved)]
    then = medians(replace(deployment, rates=scaled(start, probe)).run(arrivals).served, among)[which]
    dependence = log(now / then) / PROBE if isfinite(then) and then > 0 else 0.0
    if dependence <= SENSITIVE:
        return False
    moved[which] = min(FURTHEST, max(-FURTHEST, moved[which] + log(now / wanted) / dependence))
    return True


def scaled(rates: Rates, moved: Sequence[float]) -> Rates:
    bandwidth, compute = (exp(value) for value in moved)
    return replace(
        rates,
        bandwidth=bandwidth * rates.bandwidth,
        kv_bandwidth=bandwidth * rates.kv_bandwidth,
        compute=compute * rates.compute,
        attention_compute=compute * rates.attention_compute,
        tiles=rates.tiles and rates.tiles.faster(compute),
        source=f"{rates.source}, tuned to a recording",
    )


def medians(served: Sequence[Served], among: Sequence[int]) -> tuple[float, float]:
    """The medians of TPOT and of the prefill time."""
    done = [one for one in (served[place] for place in among) if one.answered]
    tpots = [one.tpot for one in done if one.tpot is not None]
    prefills = [one.first - one.scheduled for one in done]
    return (
        float(np.median(tpots)) if tpots else float("nan"),
        float(np.median(prefills)) if prefills else float("nan"),
    )
