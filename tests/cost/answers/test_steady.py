"""A plan equals a simulation of the whole load: the same workers, the same 95th percentiles."""

from __future__ import annotations

import random

import pytest

from benchmarks.planning import TARGETS, cell, on_h200
from tests.cost.cases import on_box
from tests.cost.fleets import poisson
from twostroke.bench.workload import make_load
from twostroke.cost.answers.steady import try_fleet
from twostroke.cost.answers.workers import highest_rate
from twostroke.cost.simulation.fleet import Pools
from twostroke.cost.simulation.served import Targets
from twostroke.cost.simulation.trace import at_rate, rate
from twostroke.record import replace


@pytest.mark.slow
@pytest.mark.parametrize(("workload", "per_second"), [("chat", 60.0), ("rag", 80.0), ("code", 20.0)])
def test_a_plan_equals_the_full_simulation(workload, per_second):
    """`benchmarks.planning` has five rates of each workload."""
    found = cell(workload, per_second)
    assert found["right"], found


def test_a_fleet_that_is_overrun_is_not_accepted_because_the_load_is_short():
    """20 requests/s of the code workload are more tokens than one H200 reads. Fifty requests would not show it."""
    rows = make_load("code", count=1200).arrivals
    one, two = (replace(on_h200(rows), pools=Pools(count)) for count in (1, 2))
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
