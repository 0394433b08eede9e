"""Diagnosis on labelled cases: the label is in how a case was made, the measurement comes from another machine."""

from __future__ import annotations

import random
from functools import cache

import numpy as np
import pytest

from tests.cost.cases import CASES, chat, code, on_box, on_gpu, rag
from tests.cost.fleets import poisson
from twostroke.config import make_config
from twostroke.cost.answers.diagnose import diagnose
from twostroke.cost.answers.evidence import tpot_slopes
from twostroke.cost.answers.levers import LEVERS, Scenario
from twostroke.cost.answers.wording import sentence
from twostroke.cost.simulation.served import Served, Targets
from twostroke.cost.simulation.trace import Arrival, PromptPart
from twostroke.errors import InputError
from twostroke.record import replace


@cache
def diagnosed(make):
    case = make()
    measured = case.measure()
    return case, measured, diagnose(case.deployment, case.arrivals, measured.served)


PREDICTED = ("rag", "cap_of_one", "static", "chat")  # the others take half a minute together


@pytest.mark.parametrize(
    "make",
    [pytest.param(make, marks=[] if make.__name__ in PREDICTED else pytest.mark.slow) for make in CASES],
    ids=lambda make: make.__name__,
)
def test_the_stroke_and_the_lever_are_named(make):
    case, _, found = diagnosed(make)
    assert found.phase == case.phase
    assert found.best is not None and found.best.lever.name in case.levers
    assert found.best.lever.because in found.sentence
    tried = {effect.lever.name for effect in found.effects} | {one.lever.name for one in found.rejected}
    assert tried == {lever.name for lever in LEVERS}, "every lever is accounted for"
    assert all(one.reason for one in found.rejected)


@pytest.mark.parametrize("make", [make for make in CASES if make.__name__ in PREDICTED])
def test_what_was_predicted_comes_true(make):
    """Pull the best lever on the machine as it really is: the metric lands where the prediction put it."""
    case, before, found = diagnosed(make)
    best = found.best
    after = case.measure(best.after.deployment, best.after.arrivals, seed=1).summary
    if found.metric == "ttft":
        predicted, real = best.ttft * middle(before.summary.ttft), middle(after.ttft)
    elif found.metric == "throughput":
        predicted, real = best.throughput * before.summary.output_rate, after.output_rate
    else:
        predicted, real = best.tpot * middle(before.summary.tpot), middle(after.tpot)
    assert predicted == pytest.approx(real, rel=0.2)


def middle(spread):
    return (spread.p50 * spread.p95) ** 0.5


def test_without_an_answer_there_is_nothing_to_diagnose():
    short = replace(on_gpu(), config=replace(on_gpu().config, max_model_len=1024))
    long = [Arrival(0.1 * n, (PromptPart(n, 5000),), 8) for n in range(5)]
    with pytest.raises(InputError, match="the shortest has 5,008 tokens, max_model_len is 1,024: raise"):
        diagnose(short, long)
    with pytest.raises(InputError, match="no request was answered"):
        diagnose(on_gpu(), long, [Served(one.at, one.prompt, refused=True) for one in long])
    with pytest.raises(InputError, match="no request was answered"):
        diagnose(on_gpu(), [])


def test_textbook_levers_that_do_not_help_say_why():
    _, _, found = diagnosed(code)
    reasons = {one.lever.name: one.reason for one in found.rejected}
    assert "prefill hardly changes" in reasons["weights-int4"]
    assert "already" in reasons["continuous-batching"]
    assert "begin with what they share" in reasons["stable-prefix"]


def test_a_target_decides_what_the_complaint_is():
    case, measured, _ = diagnosed(chat)
    hurried = diagnose(case.deployment, case.arrivals, measured.served, Targets(ttft=0.05, tpot=1.0))
    assert (hurried.phase, hurried.metric) == ("prefill", "ttft")


def test_a_machine_that_does_what_it_can_is_not_called_slow():
    rows = poisson(random.Random(0), 20, 0.05, (20, 200), (10, 60))
    found = diagnose(on_box(), rows)
    assert found.sentence.startswith("Nothing is slow: TTFT ") and "Slow" not in found.sentence
    hurried = diagnose(on_box(), rows, targets=Targets(ttft=1e-6))
    assert hurried.sentence.startswith("Slow to start")


@pytest.mark.parametrize(("times", "metric"), [(1.0, "tpot"), (10.0, "stall")])
def test_streams_stall_only_where_somebody_would_notice(times, metric):
    """Gaps of a tenth of a second are slow writing on a CPU; gaps of a second are something else."""
    gaps = times * np.array([0.01] * 20 + [0.1] * 3, dtype=np.float32)
    rows = [Arrival(60.0 * number, (PromptPart(number, 40),), 24) for number in range(8)]
    served = []
    for row in rows:
        one = Served(row.at, 40, 0, row.at, row.at + 0.05, row.at + 0.05 + float(gaps.sum()), output=24, gaps=gaps)
        served.append(one)
    assert diagnose(on_box(), rows, served).metric == metric


def test_without_measurements_the_replay_stands_in():
    case = rag()
    found = diagnose(case.deployment, case.arrivals)
    assert found.best.lever.name == "prefix-cache"
    assert found.measured == found.simulated
    assert found.evidence.shareable > 0.8 and found.evidence.hit_rate < 0.5
    assert 0 < found.evidence.kv_peak <= 1


@pytest.mark.parametrize("deployment", [on_box(), on_gpu()], ids=["cpu", "gpu"])
def test_every_lever_changes_what_it_says_or_tells_why_not(deployment):
    case = Scenario(deployment, rag().arrivals)
    for lever in LEVERS:
        after = lever.pull(case)
        assert isinstance(after, str) or after != case, lever.name
        assert isinstance(after, str) or after.deployment.settings, "the engine takes what the lever sets"
        if not isinstance(after, str) and lever.setting is not None:
            for name, value in lever.setting(after.deployment).items():
                assert getattr(after.deployment.config, name) == value


def test_a_lever_replaces_settings_that_conflict_with_it():
    """An engine that was started with the other one of two settings is started again with the lever's."""
    deployment = on_gpu(kv_blocks=2000)
    given = {"kv_memory": 2000 * deployment.settings.layout.block_bytes, "dtype": "bfloat16"}
    pulled = {lever.name: lever.pull(Scenario(deployment, rag().arrivals)) for lever in LEVERS}
    for lever in LEVERS:
        after = pulled[lever.name]
        if not isinstance(after, str) and lever.setting is not None:
            config = make_config(**given | lever.setting(after.deployment))
            assert config.quantize == after.deployment.config.quantize
            if lever.name.startswith("kv-"):
                assert config.kv_blocks == after.deployment.config.kv_blocks > 2000 and config.kv_memory is None
    tried = {"weights-int8", "weights-int4", "kv-int8", "kv-memory"}
    assert not {name for name in tried if isinstance(pulled[name], str)}


def test_tpot_against_streams_and_context_is_one_plane():
    served = []
    for number in range(40):
        count, prompt = 1 + number % 4, 100 + 150 * (number % 7)
        one = Served(float(number), prompt, 0, float(number), float(number))
        one.output = 21
        one.end = one.first + 20 * (0.010 + 0.002 * count + 3e-6 * (prompt + one.output / 2))
        served.append((count, one))
    per_stream, per_token = tpot_slopes(np.array([float(count) for count, _ in served]), [one for _, one in served])
    assert per_stream == pytest.approx(0.002) and per_token == pytest.approx(3e-6)
    assert tpot_slopes(np.ones(40), [one for _, one in served])[0] == 0.0, "as many streams all the time tell nothing"


def test_a_sentence_never_gives_one_stroke_the_cause_of_the_other():
    _, measured, found = diagnosed(chat)
    for lever in LEVERS:
        text = sentence("decode", "tpot", found.evidence, measured.summary, lever)
        assert (lever.because in text) == (lever.phase != "prefill")
        assert lever.because in text or lever.title in text
