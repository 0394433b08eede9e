"""Asks a server the questions of `cost.probe`: prompt lengths one at a time, batches of streams, a prompt again."""

from __future__ import annotations

from statistics import median

from twostroke.bench.client import Target, measure
from twostroke.bench.record import Run
from twostroke.bench.workload import Load
from twostroke.cost.probe import BATCHES, PROMPTS, Point, Shape, read_shape
from twostroke.cost.trace import Arrival, Contents, Part
from twostroke.errors import InputError

TIMES = 3
WRITTEN = 24


def probe(target: Target) -> Shape:
    contents = Contents(1 << 37)
    measure(target, Load("warm up", [Arrival(0.0, (contents.own(16),), 2)], 1))
    prompts = []
    for length in PROMPTS:
        rows = [Arrival(0.0, (contents.own(length),), 2) for _ in range(TIMES)]
        prompts.append(Point(*asked(measure(target, Load("lengths", rows, 1)), length)))
    batches = []
    for count in BATCHES:
        rows = [Arrival(0.0, (contents.own(32),), WRITTEN) for _ in range(count)]
        run = measure(target, Load("batch", rows, count))
        tpots = [tpot for one in run.served() if not one.refused and (tpot := one.tpot) is not None]
        if tpots:
            batches.append(Point(count, median(tpots)))
    if not batches:
        raise InputError(f"{target.base}: answers of several tokens did not come back; is it the right address?")
    same = Part(contents.own(1).content, PROMPTS[-1])
    run = measure(target, Load("again", [Arrival(0.0, (same,), 2) for _ in range(1 + TIMES)], 1))
    ttfts = [record.ttft for record in run.records if record.ttft is not None]
    return read_shape(prompts, batches, ttfts[0], median(ttfts[1:]))


def asked(run: Run, length: int) -> tuple[float, float]:
    """(prompt tokens as the server counts them, median TTFT)."""
    done = [record for record in run.records if record.ttft is not None]
    if not done:
        reason = run.records[0].error or "no text came"
        raise InputError(f"{run.target}: a prompt of {length} words was not answered ({reason}).")
    return median(record.prompt for record in done), median(record.ttft or 0.0 for record in done)
