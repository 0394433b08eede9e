"""Excerpts of a real trace, served and simulated: TTFT and TPOT of both.

The excerpts are spread evenly over the shipped part of the Azure conversation trace and are served one after the other,
all of them in each turn. An excerpt is simulated with the rates of the grid, fitted again to the steps of the excerpts
served right before and after it, never to its own; the noise of its steps is theirs too (step_noise.py). So a drift of
the machine over minutes affects measurement and simulation alike. The simulated scheduler starts in the state after the
excerpt before, as the real one does.

The settings were chosen with replays, before anything was served with them. At a utilisation of 0.25 to 0.35 a machine
that is 5 % slower than assumed changes p50 by 5 to 7 % and p95 by 8 to 13 %; at 0.5 it changes a median by 14 %. The
rate is set by utilisation, with the grid's rates: a fixed rate would be idleness on a fast day and a queue on a slow
one. p95 should be more than a few requests, because one that just meets or misses another's prompt changes it by a
tenth. It should not lie where lengths jump from 650 tokens to 1,020, as they do between 94 and 96 % of most hundreds of
consecutive requests: in 16 excerpts of 12 they jump between 92 and 93 %, as in the whole trace.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from benchmarks.step_noise import noise_of
from twostroke.bench.inprocess import measure, settings_document
from twostroke.bench.processor import OtherPrograms
from twostroke.bench.record import Run
from twostroke.bench.workload import Load, renewed, trace_load
from twostroke.cost.model.calibration import Calibration
from twostroke.cost.model.fit import coldness, fit
from twostroke.cost.model.rates import Rates
from twostroke.cost.simulation.deployment import Deployment, deployment_of
from twostroke.cost.simulation.served import Served, Summary, summarize
from twostroke.cost.simulation.trace import Arrival, at_rate, from_zero
from twostroke.metrics.steplog import Step
from twostroke.record import replace

if TYPE_CHECKING:
    from twostroke import LLM

TARGET = 0.15
QUIET = 0.05  # largest share of a core that other programs may use; an excerpt with more is served again
SPARE = 4  # excerpts that may be served again
REPLAYS = 5  # of an excerpt, each with the noise from another place of the log
PAUSE = 30.0  # seconds between an excerpt and the one before it in a replay
ROUNDS = 3  # of finding the rate for a utilisation


@dataclass(frozen=True, slots=True)
class Excerpt:
    """One excerpt of the trace, served once."""

    arrivals: list[Arrival]  # with the trace's texts; each serving has others
    run: Run
    steps: list[Step]  # with the time until the next
    disturbed: float  # share of a core that other programs used


def served_trace(llm: LLM, rates: Rates, weight_bytes: int, args: argparse.Namespace) -> dict[str, Any]:
    calibration = Calibration("this", args.model, rates, 10**12, 1, llm.settings.device)
    deployment = deployment_of(llm.arch, settings_document(llm), calibration, weight_bytes)
    whole = trace_load("azure-conv", None, None, args.scale, llm.settings.max_model_len - 2)
    loads, per_second = at_utilisation(cut_out(whole, args.pieces, args.requests), deployment, args.utilisation)
    served = serve(llm, loads, args)
    simulated = [replay(served, place, deployment) for place in range(len(served))]
    turns = [served[first : first + len(loads)] for first in range(0, len(served), len(loads))]
    each = [summarize([one for excerpt in turn for one in excerpt.run.served()]) for turn in turns]
    real = summarize([one for excerpt in served for one in excerpt.run.served()])
    rows = beside(real, each, summarize([one for some in simulated for one in some]))
    return {
        "pieces": args.pieces, "requests of each": args.requests, "turns": args.turns,
        "requests_per_second": per_second, "utilisation": used(served),
        "used by others": [round(excerpt.disturbed, 4) for excerpt in served], **rows, "target": TARGET,
        "met": all(abs(row["error"]) <= TARGET for row in rows.values()),
    }  # fmt: skip


def cut_out(load: Load, excerpts: int, requests: int) -> list[Load]:
    """Excerpts of so many consecutive requests, spread evenly."""
    starts = [len(load.arrivals) * number // excerpts for number in range(excerpts)]
    return [replace(load, arrivals=from_zero(load.arrivals[start : start + requests])) for start in starts]


def at_utilisation(loads: Sequence[Load], deployment: Deployment, wanted: float) -> tuple[list[Load], float]:
    """The excerpts, all at the rate at which a worker is busy for this share of the time, and that rate."""
    per_second = 1.0
    for _ in range(ROUNDS):
        loads = [replace(load, arrivals=at_rate(load.arrivals, per_second)) for load in loads]
        outcomes = [deployment.run(load.arrivals) for load in loads]
        busy = sum(outcome.utilisation * outcome.summary.seconds for outcome in outcomes)
        per_second *= wanted * sum(outcome.summary.seconds for outcome in outcomes) / busy
    return [replace(load, arrivals=at_rate(load.arrivals, per_second)) for load in loads], per_second


def serve(llm: LLM, loads: Sequence[Load], args: argparse.Namespace) -> list[Excerpt]:
    """Every excerpt in every turn; disturbed ones are served again, up to SPARE times in all."""
    log, served, spare, times = llm.engine.core.steplog, [], SPARE, 0
    assert log is not None
    for turn in range(args.turns):
        for load in loads:
            while True:
                log.clear()
                others, times = OtherPrograms(), times + 1
                run = measure(llm, renewed(load, times), args.model)  # with other text, which no cache has
                steps = with_time_between([step for step in log if step.seconds > 0])
                excerpt = Excerpt(load.arrivals, run, steps, others.share)
                if excerpt.disturbed <= QUIET or not spare:
                    break
                spare -= 1
            served.append(excerpt)
        print(f"trace: turn {turn + 1} of {args.turns}, {SPARE - spare} excerpts were served again", flush=True)
    return served


def with_time_between(steps: Sequence[Step]) -> list[Step]:
    """Consecutive steps, each with the time until the next one added to its own, as waiting requests see it. Nothing is
    added after a step after which no request waited."""
    waited = []
    for one, following in pairwise(steps):
        gap = following.launched - (one.launched + one.seconds)
        known = {work.request for work in one.works}
        stayed = one.waiting or not known.isdisjoint(work.request for work in following.works)
        waited.append(max(0.0, gap) if stayed and following.number == one.number + 1 else 0.0)
    return [step._replace(seconds=step.seconds + gap) for step, gap in zip(steps, [*waited, 0.0], strict=True)]


def used(served: Sequence[Excerpt]) -> float:
    """Share of the time in which the engine was in a step or between two."""
    busy = sum(step.seconds for excerpt in served for step in excerpt.steps)
    return busy / sum(excerpt.run.summary().seconds for excerpt in served)


def replay(served: Sequence[Excerpt], place: int, deployment: Deployment) -> list[Served]:
    """One excerpt simulated, with rates and noise from the excerpts around it."""
    around = [excerpt.steps for excerpt in (*served[max(0, place - 1) : place], *served[place + 1 : place + 2])]
    steps = [step for some in around for step in some]
    line = deployment.roofline()
    learnt = replace(deployment, rates=fit(steps, line.model, line.layout, line.rates, coldness(steps)))
    arrivals = served[place].arrivals
    rows = following(served[place - 1].arrivals, arrivals) if place else arrivals
    found: list[Served] = []
    for seed in range(REPLAYS):
        found += learnt.run(rows, noise_of(steps, learnt.roofline(), seed)).served[-len(arrivals) :]
    return found


def following(before: Sequence[Arrival], rows: Sequence[Arrival]) -> list[Arrival]:
    """Both excerpts, with a pause between them in which the first ends."""
    start = before[-1].at + PAUSE
    return [*before, *(replace(row, at=start + row.at) for row in rows)]


def beside(real: Summary, turns: Sequence[Summary], simulated: Summary) -> dict[str, Any]:
    rows = {}
    for metric in ("ttft", "tpot"):
        for percentile in ("p50", "p95"):
            measured, *each, expected = (
                getattr(getattr(one, metric), percentile) for one in (real, *turns, simulated)
            )  # fmt: skip
            rows[f"{metric} {percentile}"] = {
                "measured": measured, "each turn": each, "turns apart": max(each) / min(each) - 1,
                "simulated": expected, "error": expected / measured - 1,
            }  # fmt: skip
    return rows
