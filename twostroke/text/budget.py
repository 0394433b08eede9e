"""What a chat template may cost: a deadline, and a bound on the work done between two looks at the clock.

A template is a program from a file somebody else wrote. Python cannot interrupt one long operation from outside, so
no operation is allowed to be long: each is charged for *before* it runs, by the size of what it reads and makes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, ItemsView, Iterable, KeysView, Mapping, ValuesView
from itertools import islice

STEP_BYTES = 32 << 20  # one operation reads or makes at most this much (well under half a second of work)
TOTAL_BYTES = 256 << 20  # and all of them together this much, which bounds memory too
NODE_BYTES = 64  # what an element of a list or a mapping counts for
MAX_INT_BITS = 4096


class BudgetError(Exception):
    """The template wants more time, text or memory than any honest one."""


class Budget:
    """A rendering's allowance."""

    def __init__(self, seconds: float, total: int = TOTAL_BYTES, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seconds = seconds
        self._total = total
        self.start()

    def start(self) -> None:
        """A new rendering: everything is there again."""
        self._deadline = self._clock() + self._seconds
        self._left = self._total

    def charge(self, cost: int) -> None:
        """Pay for an operation about to run."""
        self._left -= cost
        if cost > STEP_BYTES or self._left < 0:
            raise BudgetError("it builds more text or data than any honest template")
        if self._clock() > self._deadline:
            raise BudgetError(f"it did not finish within {self._seconds:g} seconds")

    def read(self, value: object) -> None:
        """Pay for looking through a value (comparing, searching), which is cheaper than copying it."""
        self.charge(weigh(value) >> 3)

    def collect(self, items: Iterable[object]) -> list[object]:
        """A list of what an iterator still holds, paid for as it grows: a lazy chain could otherwise hide its cost."""
        limit = STEP_BYTES // NODE_BYTES
        found = list(islice(items, limit + 1))
        self.charge(NODE_BYTES * len(found))
        if len(found) > limit:
            raise BudgetError("it builds a list longer than any honest template")
        return found


def weigh(value: object) -> int:
    """The size of a value written out, shared parts counted every time they would be written.

    Counting with repetition is the point: [x, x] forty times over is tiny in memory and endless as text.
    """
    total, stack = 0, [value]
    while stack:
        item = stack.pop()
        if isinstance(item, (str, int)):
            total += sys.getsizeof(item)
        elif isinstance(item, Mapping):
            total += NODE_BYTES * (1 + 2 * len(item))
            _check(total)
            stack.extend(item.keys())
            stack.extend(item.values())
        elif isinstance(item, (list, tuple, KeysView, ItemsView, ValuesView)):
            total += NODE_BYTES * (1 + len(item))
            _check(total)
            stack.extend(item)
        else:
            total += NODE_BYTES
        _check(total)
    return total


def _check(total: int) -> None:
    if total > STEP_BYTES:
        raise BudgetError("it handles a value larger than any honest template")
