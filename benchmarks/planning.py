"""Plans beside simulations of the whole load: chat, rag and code at five rates each, on H200s with an 8B model.

    python -m benchmarks.planning      # about twelve minutes on one core

A plan simulates until it is clear whether a fleet does. Here the same fleet, and the fleet with one worker fewer, serve
all 5,000 requests. The plan is right if its fleet meets the targets, the smaller one does not, and its 95th percentiles
are within 10 % of the whole simulation's.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from benchmarks.machine import save
from twostroke.bench.workload import make_load
from twostroke.config import make_config
from twostroke.cost.answers.steady import SHARE
from twostroke.cost.answers.workers import Demand, Need, workers_needed
from twostroke.cost.model.devices import find_device
from twostroke.cost.model.known_models import known_arch
from twostroke.cost.simulation.deployment import Deployment, Outcome
from twostroke.cost.simulation.fleet import Pools
from twostroke.cost.simulation.served import Targets
from twostroke.cost.simulation.trace import Arrival, at_rate
from twostroke.record import replace

TARGETS = Targets(1.0, 0.05)
WHOLE = 5000  # requests of a whole simulation
NEAR = 0.1  # relative difference of 95th percentiles
RATES = {"chat": (5.0, 30.0, 60.0, 150.0, 230.0), "rag": (5.0, 30.0, 80.0, 150.0, 240.0),
         "code": (2.0, 5.0, 10.0, 20.0, 40.0)}  # fmt: skip


@cache
def requests(workload: str) -> list[Arrival]:
    return make_load(workload, count=WHOLE).arrivals


def on_h200(rows: list[Arrival]) -> Deployment:
    longest = max(row.prompt + row.output for row in rows)
    config = make_config(max_model_len=longest + 1, seed=0)
    return Deployment(known_arch("llama-3.1-8b"), find_device("h200"), config)


def whole(rows: list[Arrival], per_second: float, workers: int) -> tuple[Outcome, bool]:
    """A simulation of all requests, and whether its last nine tenths meet the targets without a growing queue."""
    outcome = replace(on_h200(rows), pools=Pools(workers)).run(at_rate(rows, per_second))
    late = outcome.served[-WHOLE // 10 :]
    waited = sum(one.ttft for one in late) / len(late)
    return outcome, TARGETS.met_by_share(outcome.served[WHOLE // 10 :], SHARE) and waited < TARGETS.ttft


def cell(workload: str, per_second: float) -> dict[str, Any]:
    """One plan and its check."""
    rows = requests(workload)
    need = workers_needed(on_h200(rows), Demand(rows, per_second, TARGETS))
    if not isinstance(need, Need):
        return {"workload": workload, "rate": per_second, "right": False, "reason": str(need)}
    full, met = whole(rows, per_second, need.workers)
    fewer = need.workers > 1 and whole(rows, per_second, need.workers - 1)[1]
    ratios = {
        f"{name}_p95_planned_over_whole": getattr(need.outcome.summary, name).p95 / getattr(full.summary, name).p95
        for name in ("ttft", "tpot")
    }
    near = all(abs(ratio - 1) <= NEAR for ratio in ratios.values())
    found = {"workload": workload, "rate": per_second, "workers": need.workers, "met": met, "fewer_would_do": fewer}
    return {**found, **ratios, "right": met and not fewer and near}


def main() -> None:
    cells = []
    for workload, rates in RATES.items():
        for per_second in rates:
            cells.append(cell(workload, per_second))
            print(cells[-1], flush=True)
    save("planning", "planning", {"requests": WHOLE, "right": sum(one["right"] for one in cells), "cells": cells})


if __name__ == "__main__":
    main()
