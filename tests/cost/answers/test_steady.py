"""A plan equals a simulation of the whole load: the same workers, the same 95th percentiles."""

from __future__ import annotations

import random
from functools import cache

import pytest

from tests.cost.cases import on_box
from tests.cost.fleets import poisson
from twostroke.bench.workload import make_load
from twostroke.config import make_config
from twostroke.cost.answers.steady import SHARE, try_fleet
from twostroke.cost.answers.workers import Demand, Need, highest_rate, workers_needed
from twostroke.cost.model.devices import find_device
from twostroke.cost.model.known_models import known_arch
from twostroke.cost.simulation.deployment import Deployment
from twostroke.cost.simulation.fleet import Pools
from twostroke.cost.simulation.served import Targets
from twostroke.cost.simulation.trace import at_rate, rate
from twostroke.record import replace

TARGETS = Targets(1.0, 0.05)
WHOLE = 5000  # requests of a full simulation
RATES = {"chat": (5.0, 30.0, 60.0, 150.0, 230.0), "rag": (5.0, 30.0, 80.0, 150.0, 240.0),
         "code": (2.0, 5.0, 10.0, 20.0, 40.0)}  # fmt: skip


@cache
def requests(workload):
    return make_load(workload, count=WHOLE).arrivals


def h200(rows):
    longest = max(row.prompt + row.output for row in rows)
    config = make_config(max_model_len=longest + 1, seed=0)
    return Deployment(known_arch("llama-3.1-8b"), find_device("h200"), config)


def whole(deployment, rows, per_second, workers):
    """The last nine tenths of a full simulation, and whether its queue was served."""
    outcome = replace(deployment, pools=Pools(workers)).run(at_rate(rows, per_second))
    late = outcome.served[-WHOLE // 10 :]
    waited = sum(one.ttft for one in late) / len(late)
    return outcome, TARGETS.met_by_share(outcome.served[WHOLE // 10 :], SHARE) and waited < TARGETS.ttft


@pytest.mark.slow
@pytest.mark.parametrize(("workload", "per_second"), [(name, one) for name, rates in RATES.items() for one in rates])
def test_a_plan_equals_the_full_simulation(workload, per_second):
    rows = requests(workload)
    need = workers_needed(h200(rows), Demand(rows, per_second, TARGETS))
    assert isinstance(need, Need)
    full, met = whole(h200(rows), rows, per_second, need.workers)
    assert met
    for name in ("ttft", "tpot"):
        ours, theirs = getattr(need.outcome.summary, name).p95, getattr(full.summary, name).p95
        assert ours == pytest.approx(theirs, rel=0.1), name
    if need.workers > 1:
        assert not whole(h200(rows), rows, per_second, need.workers - 1)[1], "one worker fewer does not do"


def test_a_fleet_that_is_overrun_is_not_accepted_because_the_load_is_short():
    """20 requests/s of the code workload are more tokens than one H200 reads. Fifty requests would not show it."""
    rows = make_load("code", count=1200).arrivals
    one, two = (replace(h200(rows), pools=Pools(count)) for count in (1, 2))
    load = at_rate(rows, 20.0)
    tried = try_fleet(one, load, TARGETS)
    assert not tried.met and tried.requests < 800, "and this is known early"
    assert not try_fleet(one, load, Targets(1000.0, 1000.0)).met, "its queue grows, whatever the targets are"
    assert try_fleet(two, load, TARGETS).met


def test_the_highest_rate_is_met_and_a_higher_one_is_not():
    rows = poisson(random.Random(0), 60, 1.0, (200, 300), (20, 40))
    targets = Targets(1.0, 0.1)
    found = highest_rate(on_box(), rows, targets, 1.0)
    assert found is not None and found[1].met
    assert rate(rows) < 10 and 0.5 < found[0] < 20
    from twostroke.cost.simulation.trace import repeat

    assert not try_fleet(on_box(), at_rate(repeat(rows, 1200), 1.2 * found[0]), targets).met
