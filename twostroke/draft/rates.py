"""Learnt from past steps: how often guesses are right, and how long a step takes by its number of rows."""

from __future__ import annotations

from bisect import bisect_right, insort
from itertools import accumulate

DECAY = 0.98  # of what was counted, for each new guess
# Kinds of guesses: from matches of 3, 4-7, 8-15 and 16 tokens or more, and what a grammar forces.
PRIORS = (0.4, 0.6, 0.8, 0.9, 0.8)  # share of right guesses
FORCED = 4
WEIGHT = 4.0  # guesses that a prior counts for
SLOPE = 0.03  # assumed cost of one more row, as a share of the step, until it is measured: low, so that it is tried
SMOOTHING = 0.2  # share of a new measurement


def kind_of(match: int) -> int:
    """The kind of a guess from a match of this length."""
    return min(3, max(0, match.bit_length() - 2))


class Acceptance:
    """Right guesses and all guesses, by their kind; a guess after a wrong one is not counted."""

    def __init__(self, prior: Acceptance | None = None):
        self.prior = prior  # of all requests
        self.right = [0.0] * len(PRIORS)
        self.tried = [0.0] * len(PRIORS)

    def add(self, kind: int, drafted: int, accepted: int) -> None:
        tried = min(drafted, accepted + 1)
        keep = DECAY**tried
        self.right[kind] = keep * self.right[kind] + accepted
        self.tried[kind] = keep * self.tried[kind] + tried

    def rate(self, kind: int) -> float:
        prior = PRIORS[kind] if self.prior is None else self.prior.rate(kind)
        return (self.right[kind] + WEIGHT * prior) / (self.tried[kind] + WEIGHT)


class StepTimes:
    """Seconds of a step without prompts, by its rows: a moving mean for each number of rows that occurred. The
    predicted time never falls when rows are added."""

    def __init__(self) -> None:
        self.means: dict[int, float] = {}
        self.sizes: list[int] = []  # the numbers of rows that occurred, sorted
        self.seconds: list[float] = []  # of each, never below those before it; empty: to be made

    def add(self, rows: int, seconds: float) -> None:
        mean = self.means.get(rows)
        if mean is None:
            insort(self.sizes, rows)
            mean = seconds
        self.means[rows] = mean + SMOOTHING * (min(seconds, 3 * mean) - mean)
        self.seconds = []

    def predict(self, rows: int) -> float | None:
        """None: no step was measured yet."""
        if not self.sizes:
            return None
        if not self.seconds:
            self.seconds = list(accumulate((self.means[size] for size in self.sizes), max))
        after = bisect_right(self.sizes, rows)
        if after == 0:
            return self.seconds[0]
        seconds = self.seconds[after - 1] * (1 + SLOPE * (rows - self.sizes[after - 1]))
        return seconds if after == len(self.sizes) else min(seconds, self.seconds[after])
