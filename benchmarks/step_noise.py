"""Noise for simulated steps, taken from a step log.

The cost model predicts the typical step. Real steps scatter: some requests meet a slow step, long answers meet the mean
of many, and the pace makes chunks smaller where times scatter. A simulation without noise shows none of this.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import cycle, islice

from twostroke.cost.model.fit import coldness, predicted
from twostroke.cost.model.roofline import Roofline
from twostroke.cost.simulation.worker import Jitter
from twostroke.metrics.steplog import Step


def noise_of(steps: Sequence[Step], roofline: Roofline, seed: int) -> Jitter:
    """Multiplies each step's time by the ratio measured / predicted of a step of the log, which must be consecutive.
    Steps with prompts use the ratios of such steps. The log is followed from a random place on, so that slow periods
    are as long as they were."""
    prefill: list[float] = []
    decode: list[float] = []
    for step, cold in zip(steps, coldness(steps), strict=True):
        expected = predicted(step, roofline) + cold * roofline.rates.cold_seconds
        (prefill if step.chunks else decode).append(step.seconds / expected)
    rng = random.Random(seed)
    turns = {}
    for reads, found in ((True, prefill or decode), (False, decode or prefill)):
        turns[reads] = islice(cycle(found or [1.0]), rng.randrange(max(1, len(found))), None)
    return lambda seconds, reads: seconds * next(turns[reads])
