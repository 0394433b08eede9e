"""From which similarity on an answer is shared, so that the share of wrong ones stays below a bound.

Evidence is a pair of questions that passed the guard, the kind of their difference, their similarity, and whether the
same answer served both. It comes for free from every request that was computed although a similar question was known,
from hits that are computed as well (shadow checks), and from people who say that an answer was wrong.

- Each kind has its own evidence and its own threshold: pairs with the same words do not vouch for pairs with synonyms.
  The threshold is the lowest similarity for which the share of wrong pairs at or above it is below the bound with 95 %
  confidence (an exact binomial interval, corrected for the number of kinds and of thresholds that are tried).
- An entry has a threshold of its own, just above the highest similarity at which sharing it was wrong.

Without evidence nothing is shared: with a bound of 1 % it takes several hundred pairs of a kind.
"""

from __future__ import annotations

from collections import deque
from math import exp, lgamma, log
from typing import NamedTuple

from twostroke.answers.guard import KINDS

CONFIDENCE = 0.95
GRID = (0.80, 0.90, 0.95, 0.98, 0.99)  # thresholds that are tried
FIRST = 0.5  # share of the allowed doubt for the lowest one, which has all pairs; the others share the rest
NEAREST = 0.70  # pairs below are no evidence
MARGIN = 0.005  # above a similarity that was wrong
KEPT = 20_000  # pairs of a kind: the oldest go first
LEAST = 25  # pairs over which a threshold is lowered
MANY = 200  # wrong ones among the nearest pairs: there is no need for an interval
MAX_ENTRIES = 100_000  # that have a threshold of their own


class ErrorEstimate(NamedTuple):
    threshold: float | None  # None: nothing is shared. Of several kinds: the lowest
    pairs: int  # at or above it, or at or above the highest that is tried
    wrong: int
    rate: float
    upper: float  # of the 95 % interval


class JudgedPair(NamedTuple):
    entry: str
    kind: str
    similarity: float
    right: bool


class ErrorBound:
    def __init__(self, most: float):
        """most: the share of wrong answers that is allowed."""
        self.most = most
        self.kinds = {kind: Kind(most, (1 - CONFIDENCE) / len(KINDS)) for kind in KINDS}
        self._own: dict[str, float] = {}  # by entry

    def learn(self, one: JudgedPair) -> None:
        """Evidence of a kind that is not known is left out."""
        kind = self.kinds.get(one.kind)
        if kind is None:
            return
        if not one.right:
            self._raise(one)
        if one.similarity >= NEAREST:
            kind.add(one.similarity, one.right)

    def _raise(self, one: JudgedPair) -> None:
        before = self._own.pop(one.entry, 0.0)
        if len(self._own) >= MAX_ENTRIES:
            self._own.pop(next(iter(self._own)))
        self._own[one.entry] = max(before, one.similarity + MARGIN)

    def allows(self, entry: str, kind: str, similarity: float) -> bool:
        threshold = self.kinds[kind].estimate().threshold
        return threshold is not None and similarity >= max(threshold, self._own.get(entry, 0.0))

    def estimate(self) -> ErrorEstimate:
        """The estimate of the kinds that are shared; while none is shared, that of all kinds."""
        found = [kind.estimate() for kind in self.kinds.values()]
        shared = [one for one in found if one.threshold is not None]
        counted = shared or found
        pairs, wrong = sum(one.pairs for one in counted), sum(one.wrong for one in counted)
        lowest = min((one.threshold for one in shared if one.threshold is not None), default=None)
        return made(lowest, pairs, wrong)


class Kind:
    """The evidence of one kind of pairs."""

    def __init__(self, most: float, doubt: float):
        """doubt: the probability with which a threshold may be chosen wrongly."""
        self.most = most
        self._levels = (FIRST * doubt, *[(1 - FIRST) * doubt / (len(GRID) - 1)] * (len(GRID) - 1))
        self._evidence: deque[tuple[float, bool]] = deque()
        self._pairs = [0] * len(GRID)  # at or above each threshold
        self._wrong = [0] * len(GRID)
        self._made: ErrorEstimate | None = None

    def add(self, similarity: float, right: bool) -> None:
        self._evidence.append((similarity, right))
        self._count(similarity, right, 1)
        if len(self._evidence) > KEPT:
            self._count(*self._evidence.popleft(), -1)
        self._made = None

    def _count(self, similarity: float, right: bool, by: int) -> None:
        for place, threshold in enumerate(GRID):
            if similarity < threshold:
                return
            self._pairs[place] += by
            self._wrong[place] += 0 if right else by

    def estimate(self) -> ErrorEstimate:
        if self._made is None:
            self._made = self._estimate()
        return self._made

    def _estimate(self) -> ErrorEstimate:
        """The lowest threshold that keeps the bound, sought from above. A threshold is lowered over similarities that
        have evidence of their own, and not after a failure."""
        found: ErrorEstimate | None = None
        for place in reversed(range(len(GRID))):
            pairs, wrong = self._pairs[place], self._wrong[place]
            new_pairs, new_wrong = (pairs, wrong) if found is None else (pairs - found.pairs, wrong - found.wrong)
            if new_pairs < LEAST:
                continue
            holds = wrong <= self.most * pairs and at_most(wrong, pairs, self.most) <= self._levels[place]
            if holds and new_wrong <= self.most * new_pairs:
                found = made(GRID[place], pairs, wrong)
            elif found is not None:
                break
        return found or made(None, self._pairs[-1], self._wrong[-1])


def made(threshold: float | None, pairs: int, wrong: int) -> ErrorEstimate:
    upper = upper_limit(wrong, pairs, 1 - CONFIDENCE) if wrong <= MANY else 1.0
    return ErrorEstimate(threshold, pairs, wrong, wrong / pairs if pairs else 0.0, upper)


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
