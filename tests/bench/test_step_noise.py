"""Noise from a step log: a simulation scatters as the log did, reading and writing each in its own way."""

from __future__ import annotations

from itertools import pairwise

import pytest

from benchmarks.step_noise import noise_of
from tests.cost.fleets import parts
from twostroke.cost.model.fit import coldness, predicted
from twostroke.cost.model.roofline import Roofline
from twostroke.metrics.steplog import LoggedWork, Step
from twostroke.record import replace

READ, WRITTEN = 1.5, (0.9, 1.0, 1.3)  # times what is predicted


def log(line):
    """A prompt, then three steps of its answer, again and again."""
    steps = []
    for number in range(40):
        first = number % 4 == 0
        step = Step(number, 0.0, 0.0, (LoggedWork(1, 0, 64, "read"),) if first else (LoggedWork(1, 64 + number, 1),), 1)
        times = READ if first else WRITTEN[number % 4 - 1]
        steps.append(step._replace(seconds=times * predicted(step, line)))
    return steps


def test_a_simulation_scatters_as_the_log_did():
    line, _ = parts()
    noise = noise_of(log(line), line, seed=3)
    assert [noise(2.0, True) for _ in range(5)] == pytest.approx([2 * READ] * 5)
    written = [noise(1.0, False) for _ in range(9)]
    assert sorted(written[:3]) == pytest.approx(WRITTEN) and written[:3] * 3 == pytest.approx(written)
    order = [(WRITTEN.index(pytest.approx(one)), WRITTEN.index(pytest.approx(two))) for one, two in pairwise(written)]
    assert set(order) == {(0, 1), (1, 2), (2, 0)}, "in the order of the log: slow times last"


def test_seeds_begin_at_other_moments():
    line, _ = parts()
    firsts = {round(noise_of(log(line), line, seed)(1.0, False), 6) for seed in range(20)}
    assert firsts == set(WRITTEN)


def test_what_the_cold_explains_is_no_noise():
    line, _ = parts()
    cold = Roofline(line.model, line.layout, replace(line.rates, cold_seconds=0.01))
    steps = log(line)
    slower = [
        step._replace(seconds=predicted(step, line) + part * 0.01)
        for step, part in zip(steps, coldness(steps), strict=True)
    ]
    noise = noise_of(slower, cold, seed=0)
    assert [noise(1.0, reads) for reads in (True, False) * 10] == pytest.approx([1.0] * 20)


def test_a_log_of_one_kind_speaks_for_both():
    line, _ = parts()
    writing = [step for step in log(line) if not step.chunks]
    assert noise_of(writing, line, seed=0)(1.0, True) == pytest.approx(noise_of(writing, line, seed=0)(1.0, False))
    assert noise_of([], line, seed=0)(1.0, True) == 1.0
