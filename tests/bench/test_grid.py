"""The grid asks an engine for the steps that it names: on virtual time, where what a step takes is known."""

from __future__ import annotations

from math import inf
from types import SimpleNamespace

import pytest

from benchmarks.cost_model import spread
from tests.cost.fleets import parts
from twostroke.bench import grid
from twostroke.bench.grid import CALIBRATION, Cell, Sizes, cells, run_grid, settled, shape, typical
from twostroke.cost.model.fit import errors, fit
from twostroke.cost.model.roofline import Roofline
from twostroke.cost.simulation.worker import SimulatedRunner, VirtualClock
from twostroke.engine.core import Core
from twostroke.metrics.steplog import LoggedWork, Step, StepLog
from twostroke.schedule.make import make_scheduler

SMALL = Sizes((1, 4), (16, 64), (8, 40), (0, 32), ((2, 16),), ((32, 8),), 256, 1000)


def make_core(depth: int = 1, **settings):
    roofline, resolved = parts(**settings)
    clock = VirtualClock()
    runner = SimulatedRunner(roofline, clock, depth)
    runner.kv = SimpleNamespace(data={})
    return Core(make_scheduler(roofline.model.arch, resolved, "simulated"), runner, clock, StepLog()), roofline


def cell(step: Step) -> Cell:
    context = max((work.start for work in step.streams), default=0) // 16 * 16
    return Cell(len(step.streams), context, *next(((p.start, p.count) for p in step.chunks), (0, 0)))


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("settings", [{}, {"prefix_cache": False, "batching": "static"}])
def test_every_cell_is_measured_as_often_as_there_are_rounds(depth, settings, monkeypatch):
    monkeypatch.setattr(grid, "DISTURBED", inf)
    core, roofline = make_core(depth, **settings)
    before = core.scheduler.limits, core.scheduler.pace, core.steplog
    wanted = cells(SMALL, core)
    steps = run_grid(core, 1000, wanted, 0.0, rounds=3)
    assert {cell(step) for step in steps} == {*wanted, Cell(2, 16)}, "streams run alone before a chunk joins them"
    for one in wanted:
        alike = [step for step in steps if cell(step) == one]
        assert len(alike) == (2 if one.count else 6), "two rounds; three steps of streams in each"
        if depth == 1:
            chunks = [(one.start, one.count)] if one.count else []
            contexts = [work.start + 1 for work in alike[0].streams]
            assert alike[0].seconds == pytest.approx(roofline.step(chunks, contexts, alike[0].sampled))
    assert (core.scheduler.limits, core.scheduler.pace, core.steplog) == before and not len(core.steplog)
    assert core.idle and not core.scheduler.tables.pool.cached, "nothing is left behind"
    core.scheduler.check()


def test_a_grid_is_no_larger_than_the_engine():
    core, _ = make_core(max_requests=2, max_batch_tokens=32, max_model_len=200)
    found = cells(CALIBRATION["cpu"], core)
    assert found and all(one.streams <= 2 and one.streams + one.count <= 32 for one in found)
    assert all(max(one.context, one.start + one.count) < 200 for one in found)


def test_a_fit_to_the_grid_predicts_the_steps_between_its_own():
    core, truth = make_core()
    usual = typical(run_grid(core, 1000, cells(CALIBRATION["cpu"], core), 0.0, rounds=2))
    rates = fit(usual, truth.model, truth.layout, truth.rates)
    reached = errors(usual, Roofline(truth.model, truth.layout, rates))
    assert reached["median"] < 0.03 and reached["p95"] < 0.08


def test_a_step_takes_the_median_of_its_repeats():
    def step(seconds, start=33):
        return Step(1, 0.0, seconds, (LoggedWork(1, start, 1), LoggedWork(2, 0, 8, "read")), 1)

    steps = [step(1.0), step(5.0, 34), step(1.2, 35), step(7.0, 48)]
    assert shape(steps[0]) == shape(steps[1]) != shape(steps[3]), "streams are alike within a block"
    assert sorted(one.seconds for one in typical(steps)) == [1.2, 7.0]
    assert max(spread(steps)) == pytest.approx(5.0 / 1.2 - 1)


def test_the_launch_of_a_chunk_is_its_own():
    def step(number, seconds, *more):
        return Step(number, 0.0, seconds, (LoggedWork(1, 32 + number, 1), *more), 1)

    found = settled(
        [step(0, 0.3), step(1, 0.005), step(2, 0.005), step(3, 0.024), step(4, 0.001, LoggedWork(2, 0, 64, "read"))]
    )
    assert [round(one.seconds, 6) for one in found] == [0.3, 0.005, 0.005, 0.005, 0.02]
