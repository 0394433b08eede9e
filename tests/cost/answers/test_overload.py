"""Overload is named before all else, and a replay that is far from the measurement recommends nothing."""

from __future__ import annotations

import random

import pytest

from tests.cost.cases import cap_of_one, on_box
from tests.cost.fleets import poisson
from twostroke.bench import report
from twostroke.bench.record import RequestRecord, Run
from twostroke.bench.workload import make_load
from twostroke.cost.answers.diagnose import diagnose
from twostroke.cost.answers.levers import LEVERS
from twostroke.cost.answers.overload import find_overload
from twostroke.cost.answers.wording import evidence_lines, sentence
from twostroke.cost.simulation.served import Served
from twostroke.cost.simulation.trace import PromptPart, at_rate
from twostroke.record import replace


def rows(rate):
    return at_rate(poisson(random.Random(1), 60, 1.0, (200, 300), (40, 80)), rate)


def test_a_growing_wait_is_an_overload():
    served = on_box().run(rows(20.0)).served
    found = find_overload(served)
    assert found is not None and found.offered == pytest.approx(20.0)
    assert found.served == pytest.approx(len(served) / (max(one.end for one in served) - served[0].arrival))
    assert "the wait for the first token grows" in found.why
    assert str(found).startswith("Overloaded: 20 requests/s arrive, ") and "admit less" in str(found)


@pytest.mark.parametrize("rate", [0.2, 1.0, 1e6])
def test_what_is_served_as_it_arrives_or_came_at_once_is_no_overload(rate):
    assert find_overload(on_box().run(rows(rate)).served) is None


def test_a_long_queue_is_an_overload_although_the_wait_falls():
    """As with a cold prefix cache: the first prompts are read slowly, all others wait behind them and are then fast."""
    slow = [Served(n / 8, 300, 0, 0.6 * n, 0.6 * n + 0.6, 11.0, 20) for n in range(8)]
    fast = [Served(n / 8, 300, 280, 5.0 + n / 10, 5.2 + n / 10, 12.0, 20) for n in range(8, 40)]
    found = find_overload(slow + fast)
    assert found is not None and found.offered == pytest.approx(8.0) and found.served == pytest.approx(40 / 12)
    assert "32 of 40 still waited when the last one arrived" in str(found)
    steady = [Served(n / 8, 300, 0, n / 8 + 2.0, n / 8 + 2.6, n / 8 + 4, 20) for n in range(40)]
    assert find_overload(steady) is None, "all wait alike, and are served as they arrive"


@pytest.mark.parametrize(("rate", "overloaded"), [(0.5, False), (5.0, True), (20.0, True)])
def test_answers_that_pile_up_are_an_overload_although_prompts_are_read_at_once(rate, overloaded):
    """Short prompts and long answers: there is a place for nearly all of them, and each makes the others slower."""
    load = make_load("chat", count=40, per_second=rate, lengths=(20, 400)).arrivals
    served = on_box().run(load).served
    found = find_overload(served)
    assert sorted(one.ttft for one in served)[20] < 0.5 and (found is not None) is overloaded
    if overloaded:
        assert found.why == "40 of 40 were unfinished when the last one arrived" and found.served < 0.4 * found.offered
        assert diagnose(on_box(), load, served).sentence.startswith("Overloaded: ")


def test_a_closed_loop_is_no_overload():
    """Sixteen at a time: a request arrives when another ends."""
    load = [replace(row, at=0.0) for row in make_load("chat", count=16, lengths=(20, 200)).arrivals]
    first = on_box().run(load).served
    then = [
        replace(one, arrival=one.end, scheduled=one.end, first=one.end + one.ttft, end=2 * one.end) for one in first
    ]
    assert find_overload([*first, *then]) is None


def mixed(count, rate, start=0.0):
    """Four workloads at once, as other users send them."""
    rows = []
    for number, kind in enumerate(("chat", "code", "rag", "agent")):
        for row in make_load(kind, count=count // 4, per_second=rate / 4, seed=number, scale=4.0).arrivals:
            parts = tuple(PromptPart(part.content + number * 10**7, part.length) for part in row.parts)
            rows.append(replace(row, at=row.at + start, parts=parts))
    return sorted(rows, key=lambda row: row.at)


@pytest.mark.parametrize("slower", [1.0, 5.0])
def test_a_recording_of_a_quiet_and_an_overloaded_time_names_the_overload_first(slower):
    """slower: than the replay believes, so that it disagrees with the measurement."""
    arrivals = [*mixed(24, 0.5), *mixed(40, 30.0, start=120.0)]
    served = [
        replace(one, first=one.arrival + slower * one.ttft, end=one.arrival + slower * (one.end - one.arrival))
        for one in on_box().run(arrivals).served
    ]
    found = diagnose(on_box(), arrivals, served, levers=LEVERS[:1])
    assert found.overload is not None and found.overload.offered == pytest.approx(30.5, rel=0.05)
    assert found.overload.served < 5 and found.sentence.startswith("Overloaded: 30.5 requests/s arrive, ")
    assert (found.mismatch is not None) is (slower > 1)


def test_a_diagnosis_of_an_overload_begins_with_it_and_counts_what_serves_more():
    found = diagnose(on_box(), rows(20.0))
    assert found.sentence.startswith("Overloaded: ") and found.metric == "throughput"
    assert "longer-gap" not in {effect.lever.name for effect in found.effects}
    assert all(effect.throughput > 1.05 for effect in found.effects)


def test_a_lever_that_removes_little_of_an_overload_is_not_its_cause():
    found = diagnose(on_box(max_requests=4), rows(20.0))
    assert found.overload is not None and found.best is not None
    lever, much = found.best.lever, found.overload.offered / found.overload.served
    for gain, cause in ((1.08, False), (much**0.4, False), (much**0.6, True), (much, True)):
        said = sentence("prefill", "throughput", found.evidence, found.measured, lever, True, found.overload, gain)
        assert said.startswith("Overloaded: 20 requests/s arrive, ") and lever.title in said and "admit less" in said
        assert (f"because {lever.because}" in said) is cause and (f"({gain - 1:+.0%})" in said) is not cause


def test_a_replay_far_from_the_measurement_recommends_nothing():
    case = cap_of_one()
    served = [
        replace(one, first=one.arrival + 3.7 * one.ttft, end=one.arrival + 3.7 * (one.end - one.arrival),
                gaps=3.7 * one.gaps)
        for one in on_box(max_requests=4).run(case.arrivals[:12]).served
    ]  # fmt: skip
    hurried = on_box(max_requests=4)
    fixed = replace(hurried, rates=replace(hurried.rates, step_seconds=0.0, bandwidth=1e12, kv_bandwidth=1e12))
    found = diagnose(fixed, case.arrivals[:12], served)
    assert found.mismatch is not None and not found.effects
    assert "no lever can be recommended" in found.sentence


def test_the_evidence_agrees_with_itself():
    found = diagnose(on_box(), rows(0.2)[:6])
    whole = " ".join(evidence_lines(found.evidence))
    assert "MFU 0%" not in whole and "MBU 0%" not in whole and " 0.9×" not in whole
    odd = replace(found.evidence, hit_rate=0.62, shareable=0.59, prefill_mfu=0.0)
    assert "62% of prompt tokens, all that there are" in evidence_lines(odd)[-1]
    assert "MFU" not in evidence_lines(odd)[-2] and "MBU" in evidence_lines(odd)[-2]


def test_bench_names_the_overload_first():
    records = [
        RequestRecord(float(n), float(n), [2.0 * n + 1, 2.0 * n + 2], 2.0 * n + 2, prompt=9, output=2)
        for n in range(12)
    ]
    run = Run("chat", "in process", 1.0, None, records)
    assert report.overload(run).startswith("Overloaded: 1 request/s arrives, 0.5 are served")
    assert report.overload(replace(run, closed=4)) is None


def test_a_rate_that_was_asked_for_is_no_batch_job():
    """Thirty requests within a second, served at one a second: the last came within 5 % of the whole time."""
    records = [
        RequestRecord(n / 30, n / 30, [n + 1.0, n + 1.5], n + 1.5, prompt=9, output=2) for n in range(30)
    ]  # fmt: skip
    run = Run("chat", "in process", 30.0, None, records)
    assert report.overload(run).startswith("Overloaded: 30 requests/s arrive, ")
    assert report.overload(replace(run, rate=None)) is not None, "nor is a trace of them"
    together = [replace(one, arrival=one.arrival / 10, sent=one.sent / 10) for one in records]
    assert report.overload(replace(run, rate=None, records=together)) is None, "sent together: a batch job may wait"
