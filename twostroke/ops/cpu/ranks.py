"""Sums over the processes of one machine that share each layer's work, through memory that all of them map."""

from __future__ import annotations

import mmap
from collections.abc import Callable

import numpy as np

from twostroke.ops.cpu.library import load_library

MOST = 1 << 20  # floats of one sum; larger ones are made in pieces
PATIENCE = 100_000  # microseconds between two looks for ranks that are gone


def memory_bytes(parts: int) -> int:
    return int(load_library().ts_ranks_bytes(parts, MOST))


class SharedSum:
    """What all ranks give, added in the order of the ranks. Every rank makes the same sums, one after the other."""

    def __init__(self, descriptor: int, rank: int, parts: int, lost: Callable[[], bool]):
        """descriptor: of memory_bytes(parts) zeros. lost: whether a rank that this one waits for is gone."""
        self.rank, self.parts, self.lost = rank, parts, lost
        self.turn = 0
        self._memory = mmap.mmap(descriptor, memory_bytes(parts))
        self._address = np.frombuffer(self._memory, np.uint8).ctypes.data
        library = load_library()
        self._give, self._take = library.ts_ranks_give, library.ts_ranks_take

    def __call__(self, value: np.ndarray) -> np.ndarray | None:
        """None: a rank is gone."""
        part = np.ascontiguousarray(value, np.float32)
        total = np.empty_like(part)
        for start in range(0, part.size, MOST):
            count = min(MOST, part.size - start)
            if not self._sum(part.ctypes.data + 4 * start, total.ctypes.data + 4 * start, count):
                return None
        return total

    def _sum(self, part: int, total: int, count: int) -> bool:
        self.turn = (self.turn + 1) % (1 << 32)
        self._give(self._address, self.parts, MOST, self.rank, self.turn, part, count)
        while not self._take(self._address, self.parts, MOST, self.turn, total, count, PATIENCE):
            if self.lost():
                return False
        return True
