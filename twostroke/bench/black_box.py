"""A server that reports nothing of itself, probed from outside: how its two strokes behave.

Prompts of several lengths, one at a time, give TTFT = fixed + per token: the prefill speed. Batches of equal streams
give TPOT by their number: flat while the batch is memory-bound, rising once FLOPs or K and V set the time. A repeated
prompt shows whether there is a prefix cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from twostroke.bench.client import Target, measure
from twostroke.bench.record import Run
from twostroke.bench.workload import Load
from twostroke.cost.simulation.served import Summary
from twostroke.cost.simulation.trace import Arrival, Contents, PromptPart
from twostroke.errors import InputError

PROMPTS = (32, 128, 512, 1024)  # words
BATCHES = (1, 2, 4, 8)  # streams
REPEATS = 3
ANSWER = 24  # tokens of each stream of a batch
FLAT = 0.15  # growth of TPOT per doubling of the batch below which streams are almost free
Measured = tuple[float, float]  # prompt tokens and TTFT, or streams and TPOT


@dataclass(frozen=True, slots=True)
class Probe:
    fixed: float  # seconds of TTFT that do not depend on the prompt: network, queue, overhead, one decode step
    per_token: float  # seconds that each further prompt token adds
    alone: float  # TPOT of one stream
    growth: float  # of TPOT for each doubling of the streams, as a share
    repeat: float  # TTFT of a repeated prompt, over that of the first time

    @property
    def sentences(self) -> list[str]:
        rate = "too fast to measure" if self.per_token <= 0 else f"{1 / self.per_token:,.0f} tokens/s"
        shown = [
            f"reads prompts at {rate}, after {1000 * self.fixed:.0f} ms that do not depend on the prompt",
            f"writes {1 / self.alone:,.0f} tokens/s for one stream; TPOT {self.growth:+.0%} per doubling of streams",
        ]
        if self.growth < FLAT:
            shown.append("more streams are almost free: decode is bound by memory, so larger batches pay")
        else:
            shown.append("every further stream slows the others: decode is bound by compute, or by K and V")
        if self.repeat > 0.8:
            shown.append("a repeated prompt takes as long as the first time: no prefix cache, or no hit")
        else:
            shown.append(f"a repeated prompt takes {self.repeat:.0%} of the first time: a prefix cache works")
        return shown


def probe(target: Target) -> Probe:
    contents = Contents(1 << 37)
    measure(target, Load("warm up", [Arrival(0.0, (contents.own(16),), 2)], 1))
    prompts = []
    for length in PROMPTS:
        rows = [Arrival(0.0, (contents.own(length),), 2) for _ in range(REPEATS)]
        prompts.append(ttft_by_prompt(measure(target, Load("lengths", rows, 1)), length))
    batches = []
    for count in BATCHES:
        rows = [Arrival(0.0, (contents.own(32),), ANSWER) for _ in range(count)]
        run = measure(target, Load("batch", rows, count))
        tpots = [tpot for one in run.served() if not one.refused and (tpot := one.tpot) is not None]
        if tpots:
            batches.append((count, median(tpots)))
    if not batches:
        raise InputError(f"{target.base}: answers of several tokens did not come back; is it the right address?")
    same = PromptPart(contents.own(1).content, PROMPTS[-1])
    run = measure(target, Load("again", [Arrival(0.0, (same,), 2) for _ in range(1 + REPEATS)], 1))
    ttfts = [record.ttft for record in run.records if record.ttft is not None]
    return fit_probe(prompts, batches, ttfts[0], median(ttfts[1:]))


def ttft_by_prompt(run: Run, length: int) -> Measured:
    """Prompt tokens as the server counts them, and the median TTFT."""
    done = [record for record in run.records if record.ttft is not None]
    if not done:
        reason = run.records[0].error or "no text came"
        raise InputError(f"{run.target}: a prompt of {length} words was not answered ({reason}).")
    return median(record.prompt for record in done), median(record.ttft or 0.0 for record in done)


def fit_probe(prompts: Sequence[Measured], batches: Sequence[Measured], first: float, again: float) -> Probe:
    sizes, times = [size for size, _ in prompts], [seconds for _, seconds in prompts]
    if max(sizes) > min(sizes):
        per_token, fixed = (float(value) for value in np.polyfit(sizes, times, 1))
    else:  # the server does not count prompt tokens
        per_token, fixed = 0.0, float(np.median(times))
    growth = 0.0
    if len(batches) > 1:
        doublings, tpots = np.log2([count for count, _ in batches]), np.log([seconds for _, seconds in batches])
        growth = float(np.polyfit(doublings, tpots, 1)[0])
    return Probe(max(0.0, fixed), per_token, min(batches)[1], float(np.expm1(growth)), again / max(first, 1e-9))


def verdict(found: Probe, summary: Summary, prompt: float) -> str:
    """One sentence on a load with prompts of this mean length."""
    starting = 1 - summary.decode_share
    if starting > 0.5:
        reading = found.per_token * prompt
        waiting = 1 - (found.fixed + reading) / max(summary.ttft.mean, 1e-9)
        what = "does not depend on the prompt" if found.fixed > reading else "is reading the prompt"
        what = f"{waiting:.0%} of TTFT is waiting for others" if waiting > 0.5 else f"most of TTFT {what}"
        return f"Slow to start: {starting:.0%} of a request's time is before its first token, and {what}."
    slower = summary.tpot.p50 / max(found.alone, 1e-9)
    compared = f"{slower:.1f}× that of a stream alone" if slower > 1.2 else "as for a stream alone"
    pace = f"TPOT {1000 * summary.tpot.p50:.1f} ms"
    return f"Slow to stream: {1 - starting:.0%} of a request's time is writing, {pace}, {compared}."
