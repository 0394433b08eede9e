"""Learnt from past steps: how often guesses are right, how long steps take by their number of rows, and whether steps
with guesses were faster."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence

import numpy as np

DECAY = 0.98  # of what was counted, for each new guess
# Kinds of guesses: from matches of 3, 4-7, 8-15 and 16 tokens or more, what a grammar forces, and a draft model's.
PRIORS = (0.4, 0.6, 0.8, 0.9, 0.8, 0.7)  # share of right guesses
FORCED = 4
MODEL = 5
WEIGHT = 4.0  # guesses that a prior counts for
SLOPE = 0.03  # assumed cost of twice the rows, as a share of the step, until it is measured: low, so that it is tried
NEAR = 1024  # tokens of context, all streams together: with fewer, attention takes no time that matters
MEASURED = 9  # newest times of which the median counts
FORGET = 0.9  # of the steps with guesses, for each new one
JUDGED = 8  # steps with guesses, before it is judged whether they were faster
PAUSE, LONGEST_PAUSE = 64, 2048  # steps without guesses where they were not
SHARED_GAIN = 1.05  # least measured gain beside other streams: guesses of one make the steps of all longer


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
    """Seconds of a step without prompts, by its rows: the median of the newest for each number of rows that occurred,
    so that a single slow step decides nothing. The predicted time never falls when rows are added.

    Attention reads the context for every row, so each doubling of the context beyond NEAR tokens has times of its own;
    they begin with those of the nearest one. So has each doubling of streams, where that is asked for."""

    def __init__(self) -> None:
        self.curves: dict[tuple[int, int], Curve] = {}
        self.now: Curve = self.at(0)

    def at(self, context: int, streams: int = 0) -> Curve:
        """From now on the steps have so many tokens of context, all streams together."""
        size = (context // NEAR).bit_length(), streams.bit_length()
        if size not in self.curves:
            known = [other for other in self.curves if self.curves[other].sizes]
            nearest = min(known, key=lambda other: abs(other[0] - size[0]) + abs(other[1] - size[1]), default=None)
            self.curves[size] = Curve() if nearest is None else self.curves[nearest].copy()
        self.now = self.curves[size]
        return self.now

    def add(self, rows: int, seconds: float) -> None:
        self.now.add(rows, seconds)

    def predict(self, rows: int) -> float | None:
        """None: no step was measured yet."""
        return self.now.predict(rows)

    def predict_more(self, rows: int) -> float | None:
        """The same, but for more rows than were measured along the line through what was: a text of any length is read
        in one pass, and where rows cost much it must not look cheap."""
        sizes, known = self.now.sizes, self.now.predict(rows)
        if known is None or len(sizes) < 2 or rows <= sizes[-1]:
            return known
        first, last = (self.now.predict(size) or 0.0 for size in (sizes[0], sizes[-1]))
        return max(known, last + (last - first) * (rows - sizes[-1]) / (sizes[-1] - sizes[0]))

    def predict_all(self, rows: np.ndarray, below: tuple[int, float]) -> np.ndarray | None:
        """The same for several numbers of rows. below: (rows, seconds) of a smaller step of another kind."""
        return self.now.predict_all(rows, below) if self.now.sizes else None

    def is_full(self, rows: int) -> bool:
        """Whether a new time of such steps would replace an old one."""
        return len(self.now.newest.get(rows, ())) == MEASURED

    def is_below(self, rows: int) -> bool:
        """Whether only steps with more rows were measured: such a step may be much shorter than predicted."""
        return not self.now.sizes or rows < self.now.sizes[0]


class Curve:
    """Seconds by rows, for contexts of about one length."""

    def __init__(self) -> None:
        self.newest: dict[int, deque[float]] = {}
        self.medians: dict[int, float] = {}
        self.sizes: list[int] = []  # the numbers of rows that occurred, sorted
        self.seconds: list[float] = []  # of each, never falling; empty: to be made

    def copy(self) -> Curve:
        same = Curve()
        same.newest = {rows: deque([median], maxlen=MEASURED) for rows, median in self.medians.items()}
        same.medians, same.sizes = dict(self.medians), list(self.sizes)
        return same

    def add(self, rows: int, seconds: float) -> None:
        if rows not in self.newest:
            insort(self.sizes, rows)
            self.newest[rows] = deque(maxlen=MEASURED)
        self.newest[rows].append(seconds)
        ordered = sorted(self.newest[rows])
        self.medians[rows] = (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
        self.seconds = []

    def predict(self, rows: int) -> float | None:
        """`predict_all` for one number of rows: every plan asks for some."""
        if not self.sizes:
            return None
        sizes, seconds = self.sizes, self._in_order()
        index = bisect_left(sizes, rows)
        if index == len(sizes):
            return seconds[-1] * (1 + SLOPE * (rows - sizes[-1]) / sizes[-1])
        if index == 0 or sizes[index] == rows:
            return seconds[index]
        share = (rows - sizes[index - 1]) / (sizes[index] - sizes[index - 1])
        return seconds[index - 1] + share * (seconds[index] - seconds[index - 1])

    def _in_order(self) -> list[float]:
        if not self.seconds:
            self.seconds = never_falling([(self.medians[size], len(self.newest[size])) for size in self.sizes])
        return self.seconds

    def predict_all(self, rows: np.ndarray, below: tuple[int, float] | None = None) -> np.ndarray:
        """For several numbers of rows, when something was measured. below: (rows, seconds) of a smaller step of another
        kind, from which the line to the smallest of these begins."""
        sizes, seconds = self.sizes, self._in_order()
        if below is not None and below[0] < sizes[0] and below[1] < seconds[0]:
            sizes, seconds = [below[0], *sizes], [below[1], *seconds]
        beyond = np.maximum(rows - sizes[-1], 0) / sizes[-1]
        return np.interp(rows, sizes, seconds) * (1 + SLOPE * beyond)


def never_falling(values: Sequence[tuple[float, int]]) -> list[float]:
    """The nearest sequence that never falls: neighbours in the wrong order get their mean, weighted by how often each
    was measured. values: each with its weight."""
    runs: list[tuple[float, int, int]] = []  # mean, weight, how many values
    for value, weight in values:
        run = (value, weight, 1)
        while runs and runs[-1][0] > run[0]:
            mean, before, count = runs.pop()
            weight_sum = before + run[1]
            run = ((mean * before + run[0] * run[1]) / weight_sum, weight_sum, count + run[2])
        runs.append(run)
    return [mean for mean, _, count in runs for _ in range(count)]


class RealisedGain:
    """Whether steps with guesses were faster than the same tokens without: measured, whatever was predicted. If they
    were not, nothing is guessed for a pause, which doubles each time. least: by what factor they must be faster."""

    def __init__(self, least: float = 1.0) -> None:
        self.least = least
        self.without = self.taken = 0.0  # seconds
        self.steps = 0
        self.left, self.pause = 0, PAUSE  # steps

    def add(self, without: float, taken: float) -> None:
        """A step with guesses took `taken` seconds; its tokens would have taken `without`."""
        self.without = FORGET * self.without + without
        self.taken = FORGET * self.taken + min(taken, 3 * without)  # a pause of the machine says nothing
        self.steps += 1
        if self.steps < JUDGED:
            return
        if self.without < self.least * self.taken:
            self.left, self.pause = self.pause, min(2 * self.pause, LONGEST_PAUSE)
            self.without = self.taken = 0.0
            self.steps = 0
        elif self.steps > 4 * JUDGED:
            self.pause = PAUSE

    def allows(self) -> bool:
        """Whether the next step may draft. Counts the pause down."""
        self.left -= self.left > 0
        return self.left == 0
