"""How unevenly a machine takes its steps, learnt from a step log, so that a simulation is as uneven as the machine.

A prediction is of the usual step. Who waits for one step meets a slow one now and then, who waits for many meets their
mean, and the pace gives chunks of prompts less where steps scatter: none of it shows in steps that all take the usual
time.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import cycle, islice

from twostroke.cost.fit import coldness, predicted
from twostroke.cost.roofline import Roofline
from twostroke.cost.simulate import Jitter
from twostroke.metrics.steplog import Step


def noise_of(steps: Sequence[Step], roofline: Roofline, seed: int) -> Jitter:
    """Steps take as much more or less than predicted as those of the log did, which lie in a row; those that read
    prompts as those there that did. The log is followed from some place on, so that slow times last as long as they
    lasted there."""
    reading: list[float] = []
    writing: list[float] = []
    for step, cold in zip(steps, coldness(steps), strict=True):
        expected = predicted(step, roofline) + cold * roofline.rates.cold_seconds
        (reading if step.chunks else writing).append(step.seconds / expected)
    rng = random.Random(seed)
    turns = {}
    for reads, found in ((True, reading or writing), (False, writing or reading)):
        turns[reads] = islice(cycle(found or [1.0]), rng.randrange(max(1, len(found))), None)
    return lambda seconds, reads: seconds * next(turns[reads])
