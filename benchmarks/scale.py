"""From 8 to 10,000 workers: goodput of mixed, split and auto in the simulator, with the deployment's router.

    python -m benchmarks.scale      # about five minutes on two cores

A worker is one core with SmolLM2-135M, at half the rates that were measured for two cores; lengths of the traces are
divided so that it can serve them. Workers run the engine's scheduler, and the deployment's router decides. Requests
come at the same rate for each worker: the excerpt of the trace, repeated by other users. Up to 320 workers a run is
long enough for queues to settle, and its first quarter is left out; small fleets are simulated several times with other
parts of the load. Runs of larger fleets are short: three requests for each worker, of which the first come faster, so
that the fleet is as full as it would be, and are left out. A fleet of 100 is simulated in both ways, to compare.

    mixed   all workers do both
    split   the share of the workers that prompts take by the cost model; every prompt goes to a prefill worker (apart)
    auto    the division that `twostroke cluster --auto` takes, routes by cost
"""

from __future__ import annotations

import gc
import json
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

from benchmarks.machine import RESULTS, save
from twostroke.bench.workload import shipped_trace
from twostroke.cli.cluster_auto import part_of
from twostroke.config import make_config
from twostroke.cost.answers.split import divide
from twostroke.cost.answers.workers import prefill_share
from twostroke.cost.model.devices import find_device
from twostroke.cost.model.known_models import known_arch
from twostroke.cost.model.rates import rates_from
from twostroke.cost.simulation.deployment import Deployment
from twostroke.cost.simulation.fleet import Pools
from twostroke.cost.simulation.served import Served, Targets, summarize
from twostroke.cost.simulation.trace import Arrival, at_rate, from_zero, repeat, shorter
from twostroke.record import replace

SHAPES = ("mixed", "split", "auto")
COUNTS = {"long": (8, 32, 100, 320), "short": (100, 1000, 10_000)}
EACH = {"long": 30, "short": 3}  # requests for each worker
LEFT_OUT = {"long": 0.25, "short": 0.4}  # of them
FASTER = {"long": 1.0, "short": 3.0}  # at which these come
DIVIDED = 600  # requests by which a fleet is divided
FEWEST = 2000  # requests for each number of workers
LINK, LATENCY = 1e9, 0.005  # of shared memory between two busy workers, about


class Case(NamedTuple):
    trace: str
    scale: float  # lengths are divided by it
    rate: float  # requests/s for each worker
    targets: Targets


CASES = {
    "azure": Case("azure-conv", 4.0, 2.2, Targets(2.0, 0.02)),
    "mooncake": Case("mooncake", 16.0, 0.6, Targets(4.0, 0.02)),
}


def worker() -> Deployment:
    measured = json.loads((RESULTS / "cost-model-cpu-smollm2-135m.json").read_text())["grid"]["rates"]
    config = make_config(max_model_len=8192, seed=0, kv_blocks=2000, max_requests=32)
    rates = part_of(rates_from(measured), 2)
    return Deployment(known_arch("smollm2-135m"), find_device("xeon-8480"), config, "int8", rates=rates)


def loads(case: Case, run: str, workers: int) -> list[list[Arrival]]:
    """One load, or several for a small fleet."""
    length = EACH[run] * workers
    turns = -(-FEWEST // length)
    rows = repeat(shorter(shipped_trace(case.trace), case.scale), turns * length)
    rows = at_rate(rows, case.rate * workers)
    return [filled(from_zero(rows[turn * length : (turn + 1) * length]), run) for turn in range(turns)]


def filled(rows: list[Arrival], run: str) -> list[Arrival]:
    """The first ones come faster."""
    left_out = int(LEFT_OUT[run] * len(rows))
    began = rows[left_out].at
    saved = began - began / FASTER[run]
    first = [replace(row, at=row.at / FASTER[run]) for row in rows[:left_out]]
    return first + [replace(row, at=row.at - saved) for row in rows[left_out:]]


def pools_for(shape: str, case: Case, workers: int) -> Pools:
    pools, one = Pools(workers, 0, LINK, LATENCY, "cost"), worker()
    rows = repeat(shorter(shipped_trace(case.trace), case.scale), DIVIDED)
    prefill = 0
    if shape == "split":
        prefill = min(workers - 1, max(1, round(prefill_share(one, rows) * workers)))
    elif shape == "auto":
        prefill = divide(replace(one, pools=pools), at_rate(rows, case.rate * workers), case.targets).best.prefill
    return replace(pools, workers=workers - prefill, prefill=prefill, router="apart" if shape == "split" else "cost")


def cell(name: str, shape: str, run: str, workers: int) -> dict[str, Any]:
    """One fleet."""
    case, served = CASES[name], list[Served]()
    began = time.process_time()
    pools = pools_for(shape, case, workers)
    gc.disable()  # nothing here is a cycle, and a collection looks at millions of blocks
    for load in loads(case, run, workers):
        served += replace(worker(), pools=pools).run(load).served[int(LEFT_OUT[run] * len(load)) :]
    met, summary = sum(map(case.targets.met_by, served)) / len(served), summarize(served)
    row = {
        "trace": name, "shape": shape, "run": run, "workers": workers, "prefill": pools.prefill, "counted": len(served),
        "within_targets": round(met, 4), "goodput_per_worker": round(met * case.rate, 4),
        "ttft_p50": round(summary.ttft.p50, 4), "ttft_p95": round(summary.ttft.p95, 4),
        "tpot_p50": round(summary.tpot.p50, 5), "tpot_p95": round(summary.tpot.p95, 5),
        "gap_p99": round(summary.itl.p99, 5), "hit_rate": round(summary.hit_rate, 4),
        "cpu_seconds": round(time.process_time() - began, 1),
    }  # fmt: skip
    gc.enable()
    print(row, flush=True)
    return row


def plot(cells: list[dict[str, Any]]) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(CASES), figsize=(10, 4))
    for axis, (name, case) in zip(axes, CASES.items(), strict=True):
        for shape, colour in zip(SHAPES, ("tab:blue", "tab:orange", "tab:green"), strict=True):
            for run, style in (("long", "o-"), ("short", "o:")):
                rows = [one for one in cells if (one["trace"], one["shape"], one["run"]) == (name, shape, run)]
                points = [one["workers"] for one in rows], [one["goodput_per_worker"] for one in rows]
                axis.plot(*points, style, color=colour, label=f"{shape}, {run} runs")
        axis.axhline(case.rate, color="grey", linewidth=0.8, label="offered")
        axis.set(xscale="log", xlabel="workers", ylim=(0, 1.08 * case.rate), title=f"{case.trace}, {case.targets}")
        axis.set_ylabel("goodput, requests/s for each worker")
        axis.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(RESULTS / "scale.svg", metadata={"Date": None})


def main() -> None:
    fleets = sorted(((count, run) for run, counts in COUNTS.items() for count in counts), reverse=True)
    wanted = [(name, shape, run, count) for count, run in fleets for name in CASES for shape in SHAPES]
    with ProcessPoolExecutor(2, max_tasks_per_child=1) as both:  # a fleet of 10,000 leaves much memory behind
        found = list(both.map(cell, *zip(*wanted, strict=True)))
    cells = sorted(found, key=lambda one: (one["trace"], one["run"], one["workers"]))
    plot(cells)
    save("scale", "scale", {"cases": {name: case._asdict() for name, case in CASES.items()}, "cells": cells})


if __name__ == "__main__":
    main()
