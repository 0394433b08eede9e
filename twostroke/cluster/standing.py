"""How the workers stand, as arrays with a place for each: the router looks at all of them with a few operations.

    a prompt of t tokens    wait + slope · t    until it is computed, and what the streams there lose meanwhile
    in place                max(wait + token · t, place) + busy · t + step
    to a writer             max(ready, place) + step

Torch-free.
"""

from __future__ import annotations

from math import inf

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
EMPTY = (0.0, 0.0, 0.0, 0.0, 0.0, inf, inf, inf)  # a place without a worker
FIRST = 8


class Standing:
    """Rows: seconds of the queue; for a token; for a token with what the streams lose; what the streams lose for one;
    until a place is free; of a step, infinite for one that does not write; 0 for one that computes prompts for others,
    else infinite; the same, for those alone that do nothing else."""

    def __init__(self) -> None:
        self.rows: Vector = np.empty((len(EMPTY), 0))
        self.full: set[int] = set()  # workers without a free place
        self.helpers: set[int] = set()  # that compute prompts for others
        self.helpers_only: set[int] = set()  # and do nothing else
        self._resize(FIRST)

    def _resize(self, count: int) -> None:
        rows = np.empty((len(EMPTY), count))
        rows[:] = np.array(EMPTY)[:, None]
        rows[:, : self.rows.shape[1]] = self.rows
        self.rows = rows
        self.wait, self.token, self.slope, self.busy, self.place, self.step, self.helps, self.helps_only = rows
        self.scratch = np.empty((3, count))  # for one search after the other

    def put(self, worker: int, values: tuple[float, ...]) -> None:
        """values: of the rows."""
        if worker >= self.rows.shape[1]:
            self._resize(2 * self.rows.shape[1])
        self.rows[:, worker] = values
        *_, place, _, helps, helps_only = values
        for those, belongs in ((self.full, place > 0), (self.helpers, not helps), (self.helpers_only, not helps_only)):
            (those.add if belongs else those.discard)(worker)

    def clear(self, worker: int) -> None:
        """It is not asked."""
        self.put(worker, EMPTY)
