"""How long the cost model expects the engine's work to take, and whether the engine is far slower.

The rates are those of the card's datasheet, or, where the machine is not in the table, a guess that is scaled to the
time of the engine's warm-up. Both are within a small factor of the truth, which is enough to see a factor of ten.
"""

from __future__ import annotations

from collections.abc import Sequence

from twostroke.cost.model.devices import known_gpu
from twostroke.cost.model.rates import datasheet_rates
from twostroke.cost.model.roofline import Roofline, model_cost
from twostroke.cost.simulation.recording import UNKNOWN
from twostroke.model.arch import Arch
from twostroke.remote.messages import Ready
from twostroke.remote.progress import Done

SECONDS = 10.0  # of work that progress is measured over
SLOW = 0.1  # of the expected progress
SHORTEST_STEP = 0.005  # seconds; below it the operating system sets the time of a step, not the engine


class Expectation:
    def __init__(self, arch: Arch, weight_bytes: int, ready: Ready):
        settings = ready.settings
        precision = settings.quantize or settings.dtype or "bfloat16"
        model = model_cost(arch, precision, weight_bytes, settings.device)
        card = known_gpu(ready.machine) if settings.device == "cuda" else None
        rates = UNKNOWN if card is None else datasheet_rates(card, precision)
        self.line = Roofline(model, settings.layout, rates)
        self.scale = 1.0
        if card is None:
            tokens, seconds = ready.warm_up
            self.scale = seconds / self.line.step([(0, tokens)], [], 1)

    def seconds(self, done: Done, contexts: Sequence[int]) -> float:
        """Expected seconds of as many steps as were done, each with the mean of their tokens. contexts: tokens known of
        each request that is in the engine now."""
        if not done.steps:
            return 0.0
        context = round(sum(contexts) / len(contexts)) if contexts else 0
        streams = round(done.written / done.steps)
        read = round((done.computed - done.written) / done.steps)
        chunks = [(max(0, context // 2 - read), read)] if read > 0 else []
        each = self.scale * self.line.step(chunks, [context] * streams, max(1, streams))
        return done.steps * max(each, SHORTEST_STEP)


def slow(done: Done, expected: float) -> str | None:
    """What is slow, in words, where the work done should have taken less than a tenth of the time."""
    if expected >= SLOW * done.busy:
        return None
    return (
        f"progress is slow: the cost model expects {expected:.2g} s for the work of the last {done.busy:.0f} s, "
        "which is less than a tenth"
    )
