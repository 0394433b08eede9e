"""Fairness between API keys: turns in the queue, and how much of something one key may hold. Torch-free.

Keys are numbers; 0 stands for a server with fewer than two keys, on which nothing is limited.
"""

from __future__ import annotations

from collections import Counter
from math import ceil


def most_of(share: float, total: int, others: int) -> int:
    """How much of `total` one key may hold while other keys hold `others`: a share of what they leave free, rounded
    up. A key that comes later so always finds something, until the rest is less than one."""
    return ceil(share * max(0, total - others))


class Turns:
    """Requests of different keys alternate: each key's requests get turns in a row, beginning with the present one. A
    key that queues a hundred requests has the next hundred turns; another key's first request comes after one of them.
    """

    def __init__(self) -> None:
        self.now = 0  # the latest turn that was taken
        self._last: dict[int, int] = {}  # turn given, by key

    def give(self, key: int) -> int:
        if not key:
            return 0
        turn = self._last[key] = max(self.now, self._last.get(key, -1) + 1)
        return turn

    def take(self, turn: int) -> None:
        self.now = max(self.now, turn)


class Shares:
    """Slots of a batch that each key holds, while one plan is made."""

    def __init__(self, share: float, total: int, held: Counter[int]):
        self.share = share
        self.total = total
        self.held = held
        self.all = held.total()

    def full(self, key: int) -> bool:
        """Whether the key must leave the remaining slots to others."""
        if not key:
            return False
        mine = self.held[key]
        return mine >= most_of(self.share, self.total, self.all - mine)

    def take(self, key: int) -> None:
        self.held[key] += 1
        self.all += 1
