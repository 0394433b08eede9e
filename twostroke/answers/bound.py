"""From which similarity on an answer is shared, so that the share of wrong ones stays below a bound.

Evidence is a pair of questions that passed the guard, their similarity, and whether the same answer served both. It
comes for free from every request that was computed although a similar question was known, from hits that are computed
as well (shadow checks), and from people who say that an answer was wrong.

- All pairs together give a threshold: the lowest similarity for which the share of wrong pairs at or above it is below
  the bound with 95 % confidence (an exact binomial interval, corrected for the number of thresholds that are tried).
- An entry has a threshold of its own, just above the highest similarity at which sharing it was wrong.

Without evidence nothing is shared: with a bound of 1 % it takes several hundred pairs.
"""

from __future__ import annotations

from collections import deque
from math import exp, lgamma, log
from typing import NamedTuple

CONFIDENCE = 0.95
GRID = tuple(round(0.80 + 0.01 * step, 2) for step in range(20))  # thresholds that are tried
NEAREST = 0.70  # pairs below are no evidence
MARGIN = 0.005  # above a similarity that was wrong
KEPT = 20_000  # pairs: the oldest go first
LEAST = 50  # pairs over which a threshold is lowered
MANY = 200  # wrong ones among the nearest pairs: there is no need for an interval
MAX_ENTRIES = 100_000  # that have a threshold of their own


class Estimate(NamedTuple):
    threshold: float | None  # None: nothing is shared
    pairs: int  # at or above it, or at or above the highest that is tried
    wrong: int
    rate: float
    upper: float  # of the 95 % interval


class Evidence(NamedTuple):
    similarity: float
    right: bool


class ErrorBound:
    def __init__(self, most: float, grid: tuple[float, ...] = GRID):
        """most: the share of wrong answers that is allowed."""
        self.most = most
        self.grid = grid
        self._evidence: deque[Evidence] = deque()
        self._pairs = [0] * len(grid)  # at or above each threshold
        self._wrong = [0] * len(grid)
        self._own: dict[str, float] = {}  # by entry
        self._made: Estimate | None = None

    def learn(self, entry: str, similarity: float, right: bool) -> None:
        if not right:
            self._own.pop(entry, None)
            if len(self._own) >= MAX_ENTRIES:
                self._own.pop(next(iter(self._own)))
            self._own[entry] = max(self._own.get(entry, 0.0), similarity + MARGIN)
        if similarity >= NEAREST:
            self._add(Evidence(similarity, right))

    def _add(self, one: Evidence) -> None:
        self._evidence.append(one)
        self._count(one, 1)
        if len(self._evidence) > KEPT:
            self._count(self._evidence.popleft(), -1)
        self._made = None

    def _count(self, one: Evidence, by: int) -> None:
        for place, threshold in enumerate(self.grid):
            if one.similarity < threshold:
                return
            self._pairs[place] += by
            self._wrong[place] += 0 if one.right else by

    def allows(self, entry: str, similarity: float) -> bool:
        threshold = self.estimate().threshold
        return threshold is not None and similarity >= max(threshold, self._own.get(entry, 0.0))

    def estimate(self) -> Estimate:
        if self._made is None:
            self._made = self._estimate()
        return self._made

    def _estimate(self) -> Estimate:
        """The lowest threshold that keeps the bound, sought from above. A threshold is lowered over similarities that
        have evidence of their own, and not after a failure."""
        level = (1 - CONFIDENCE) / len(self.grid)
        found: Estimate | None = None
        for place in reversed(range(len(self.grid))):
            pairs, wrong = self._pairs[place], self._wrong[place]
            new_pairs, new_wrong = (pairs, wrong) if found is None else (pairs - found.pairs, wrong - found.wrong)
            if new_pairs < LEAST:
                continue
            holds = wrong <= self.most * pairs and at_most(wrong, pairs, self.most) <= level
            if holds and new_wrong <= self.most * new_pairs:
                shown = upper_limit(wrong, pairs, 1 - CONFIDENCE)
                found = Estimate(self.grid[place], pairs, wrong, wrong / pairs, shown)
            elif found is not None:
                break
        if found is not None:
            return found
        pairs, wrong = self._pairs[-1], self._wrong[-1]
        upper = upper_limit(wrong, pairs, 1 - CONFIDENCE) if wrong <= MANY else 1.0
        return Estimate(None, pairs, wrong, wrong / pairs if pairs else 0.0, upper)

    def dump(self) -> list[tuple[float, bool]]:
        return [(one.similarity, one.right) for one in self._evidence]

    def load(self, evidence: list[tuple[float, bool]]) -> None:
        for similarity, right in evidence:
            self._add(Evidence(float(similarity), bool(right)))


def upper_limit(wrong: int, count: int, level: float) -> float:
    """The largest share of wrong ones for which so few of `count` are still as likely as `level` (Clopper, Pearson)."""
    if count == 0 or wrong >= count:
        return 1.0
    low, high = wrong / count, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        if at_most(wrong, count, middle) > level:
            low = middle
        else:
            high = middle
    return high


def at_most(wrong: int, count: int, share: float) -> float:
    """The probability of at most so many wrong ones among `count`, each wrong with probability `share`."""
    if share <= 0:
        return 1.0
    if share >= 1:
        return 0.0
    total = 0.0
    for k in range(wrong + 1):
        ways = lgamma(count + 1) - lgamma(k + 1) - lgamma(count - k + 1)
        total += exp(ways + k * log(share) + (count - k) * log(1 - share))
    return min(1.0, total)
