"""The benchmark of the simulator: excerpts of a trace at one utilisation, each predicted from its neighbours."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.served_trace import Excerpt, at_utilisation, beside, cut_out, following, replay, with_time_between
from tests.cost.fleets import CPU, requests
from twostroke.bench.record import RequestRecord, Run
from twostroke.bench.workload import trace_load
from twostroke.cost.model.calibration import Calibration
from twostroke.cost.model.known_models import known_arch
from twostroke.cost.model.roofline import Roofline
from twostroke.cost.simulation.deployment import Deployment
from twostroke.cost.simulation.fleet import Fleet
from twostroke.cost.simulation.served import summarize
from twostroke.cost.simulation.trace import Contents, rate
from twostroke.metrics.steplog import StepLog
from twostroke.record import replace


@pytest.fixture
def deployment():
    device = Calibration("this", "m", CPU, 4 * 10**9, 2).device()
    return Deployment(known_arch("smollm2-135m"), device, precision="int8", rates=CPU)


def served_by(machine, deployment, number):
    """An excerpt as an engine on this machine serves it."""
    own = Contents((1 << 34) + 100 * (number + 1))
    rows = requests(seed=number, count=12, rate=1.0, prompt=(20, 600), output=(5, 60), contents=own)
    settings = deployment.settings
    fleet = Fleet(Roofline(deployment.model, settings.layout, machine), settings, fast=False)
    fleet.workers[0] = fleet._make_worker()
    log = fleet.workers[0].core.steplog = StepLog()
    records = []
    for row, one in zip(rows, fleet.run(rows), strict=True):
        times = np.cumsum([one.first, *one.gaps.tolist()]).tolist()
        parts = [list(part) for part in row.parts]
        records.append(RequestRecord(row.at, row.at, times, one.end, row.prompt, output=one.output, parts=parts))
    return Excerpt(rows, Run("trace", "simulated", None, None, records), with_time_between(list(log)), 0.0)


def test_an_excerpt_is_predicted_from_those_around_it(deployment):
    machine = replace(CPU, bandwidth=0.6 * CPU.bandwidth, compute=0.7 * CPU.compute, cold_seconds=0.004)
    served = [served_by(machine, deployment, number) for number in range(3)]
    real, found = summarize(served[1].run.served()), summarize(replay(served, 1, deployment))
    known = summarize(deployment.run(served[1].arrivals).served)
    for metric in ("ttft", "tpot"):
        truth, expected, without = (getattr(one, metric).p50 for one in (real, found, known))
        assert expected == pytest.approx(truth, rel=0.05) and without < 0.9 * truth
    alone = [served[0], replace(served[1], steps=[]), served[2]]
    assert summarize(replay(alone, 1, deployment)).tpot == found.tpot, "its own steps are not used"


def test_excerpts_are_spread_evenly_and_have_the_wanted_utilisation(deployment):
    whole = trace_load("azure-conv", None, None, 4.0, 4000)
    loads, per_second = at_utilisation(cut_out(whole, 8, 12), deployment, 0.3)
    assert [len(load.arrivals) for load in loads] == [12] * 8
    assert [load.arrivals[0].parts for load in loads] == [whole.arrivals[125 * n].parts for n in range(8)]
    assert all(load.arrivals[0].at == 0.0 for load in loads)
    assert [rate(load.arrivals) for load in loads] == pytest.approx([per_second] * 8)
    outcomes = [deployment.run(load.arrivals) for load in loads]
    seconds = sum(outcome.summary.seconds for outcome in outcomes)
    busy = sum(outcome.utilisation * outcome.summary.seconds for outcome in outcomes)
    assert busy / seconds == pytest.approx(0.3, rel=0.1)


def test_one_excerpt_follows_another():
    before, rows = (requests(seed=seed, count=3, rate=1.0, prompt=(5, 9), output=(1, 2)) for seed in (0, 1))
    both = following(before, rows)
    assert both[:3] == before and both[3].at > before[-1].at + 10
    assert np.diff([row.at for row in both[3:]]) == pytest.approx(np.diff([row.at for row in rows]))


def test_turns_are_shown_beside_the_error(deployment):
    turns = [summarize(deployment.run(requests(seed=seed, count=30, rate=1.0, prompt=(20, 600), output=(5, 60))).served)
             for seed in (0, 1)]  # fmt: skip
    rows = beside(turns[0], turns, turns[1])
    for name, row in rows.items():
        metric, percentile = name.split()
        each = [getattr(getattr(turn, metric), percentile) for turn in turns]
        assert row["each turn"] == each and row["turns apart"] == pytest.approx(max(each) / min(each) - 1)
        assert row["error"] == pytest.approx(each[1] / each[0] - 1)
    assert set(rows) == {"ttft p50", "ttft p95", "tpot p50", "tpot p95"}
