"""What a server that tells nothing shows when it is asked the right questions: its two strokes, from outside.

Prompt lengths one at a time give TTFT = fixed + per token: how fast it reads. Batches of equal streams give TPOT
against their number: flat while the weights' bytes decide, rising when the FLOPs or K and V do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from twostroke.cost.summary import Summary

PROMPTS = (32, 128, 512, 1024)
BATCHES = (1, 2, 4, 8)
FLAT = 0.15  # growth of TPOT per doubling of the batch below which streams are almost free


@dataclass(frozen=True, slots=True)
class Point:
    """One measured mean: a prompt length with its TTFT, or a batch with its TPOT."""

    size: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Shape:
    fixed: float  # seconds of TTFT that no prompt length explains: network, queue, overhead, one decode step
    per_token: float  # seconds each further prompt token adds
    alone: float  # TPOT of one stream
    growth: float  # of TPOT for each doubling of the streams, as a share
    repeat: float  # TTFT of a prompt asked again, over that of the first time

    @property
    def sentences(self) -> list[str]:
        rate = "too fast to tell" if self.per_token <= 0 else f"{1 / self.per_token:,.0f} tokens/s"
        shown = [
            f"reads prompts at {rate}, after {1000 * self.fixed:.0f} ms that do not depend on the prompt",
            f"writes {1 / self.alone:,.0f} tokens/s for one stream; TPOT {self.growth:+.0%} per doubling of streams",
        ]
        if self.growth < FLAT:
            shown.append("more streams are almost free: decode is bound by memory, so larger batches pay")
        else:
            shown.append("every further stream slows the others: the batch is already where compute or K and V decide")
        if self.repeat > 0.8:
            shown.append("a prompt asked again takes as long as the first time: no prefix cache, or it is not reached")
        else:
            shown.append(f"a prompt asked again takes {self.repeat:.0%} of the first time: a prefix cache works")
        return shown


def verdict_from_outside(shape: Shape, summary: Summary, prompt: float) -> str:
    """One sentence on a load of prompts of such a length, at a server of which nothing but its answers is known."""
    starting = 1 - summary.decode_share
    if starting > 0.5:
        reading = shape.per_token * prompt
        waiting = 1 - (shape.fixed + reading) / max(summary.ttft.mean, 1e-9)
        what = "does not depend on the prompt" if shape.fixed > reading else "is reading the prompt"
        what = f"{waiting:.0%} of TTFT is waiting for others" if waiting > 0.5 else f"most of TTFT {what}"
        return f"Slow to start: {starting:.0%} of a request's time is before its first token, and {what}."
    slower = summary.tpot.p50 / max(shape.alone, 1e-9)
    beside = f"{slower:.1f}× that of a stream alone" if slower > 1.2 else "as for a stream alone"
    pace = f"TPOT {1000 * summary.tpot.p50:.1f} ms"
    return f"Slow to stream: {1 - starting:.0%} of a request's time is writing, {pace}, {beside}."


def read_shape(prompts: Sequence[Point], batches: Sequence[Point], first: float, again: float) -> Shape:
    sizes, times = [point.size for point in prompts], [point.seconds for point in prompts]
    if max(sizes) > min(sizes):
        per_token, fixed = (float(value) for value in np.polyfit(sizes, times, 1))
    else:  # it counts nothing
        per_token, fixed = 0.0, float(np.median(times))
    doublings = np.log2([point.size for point in batches])
    growth = (
        float(np.polyfit(doublings, np.log([point.seconds for point in batches]), 1)[0]) if len(batches) > 1 else 0.0
    )
    alone = min(batches, key=lambda point: point.size).seconds
    return Shape(max(0.0, fixed), per_token, alone, float(np.expm1(growth)), again / max(first, 1e-9))
