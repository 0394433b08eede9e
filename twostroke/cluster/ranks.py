"""Workers by what a prompt of some length costs there, so that the least few of any number are found at once.

A rank is a step of a twelfth of an octave, 6 %. Workers of one rank are in the order in which they came to it, and a
worker that gets work moves to another rank. So requests are spread over workers that stand alike. Torch-free.
"""

from __future__ import annotations

from itertools import islice
from math import log2

from twostroke.cluster.standing import RoutedWorker

STEPS = 12  # in an octave
LEAST = 2.0**-20  # seconds: what costs less than this microsecond is all the same
FIRST = STEPS * log2(LEAST) - 1


class CostRanks:
    def __init__(self, tokens: int):
        """tokens: of the prompt, of which no worker has anything."""
        self.tokens = tokens
        self.changed: dict[RoutedWorker, None] = {}  # since they were last ordered; a dict, for it keeps its order
        self._ranks: dict[int, dict[RoutedWorker, None]] = {}
        self._filled = 0  # a bit for each rank that has workers
        self._at: dict[RoutedWorker, int] = {}  # rank of each worker, from 1

    def least(self, count: int) -> list[RoutedWorker]:
        """The first `count`, or all that there are."""
        if self.changed:
            self._order()
        ranks, left = self._ranks, self._filled
        found: list[RoutedWorker] = []
        while left and len(found) < count:
            lowest = left & -left
            found += islice(ranks[lowest.bit_length()], count - len(found))
            left ^= lowest
        return found

    def _order(self) -> None:
        tokens, at = self.tokens, self._at
        for worker in self.changed:
            own = worker.token * tokens
            done, place = worker.wait + own, worker.place
            cost = (done if done > place else place) + own * worker.streams + worker.step
            rank = int(STEPS * log2(cost) - FIRST) if cost > LEAST else 1
            before = at.get(worker, 0)
            if rank != before or not worker.open:
                if before:
                    self._leave(worker, before)
                if worker.open:
                    self._join(worker, rank)
        self.changed.clear()

    def _leave(self, worker: RoutedWorker, rank: int) -> None:
        those = self._ranks[rank]
        del those[worker], self._at[worker]
        if not those:
            self._filled ^= 1 << rank - 1

    def _join(self, worker: RoutedWorker, rank: int) -> None:
        self._at[worker] = rank
        those = self._ranks.get(rank)
        if those:
            those[worker] = None
        else:
            self._ranks[rank] = {worker: None}
            self._filled |= 1 << rank - 1

    def drop(self, worker: RoutedWorker) -> None:
        """It is gone, or has another role."""
        self.changed.pop(worker, None)
        if worker in self._at:
            self._leave(worker, self._at[worker])
