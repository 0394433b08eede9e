"""Which blocks the workers have, by name, as far as the router was told. Torch-free.

Each worker has its names in the order in which they came. Beside that, every sixteenth name of a prompt says which
workers have it: one bit for each. So the router sees with a few looks, whatever the number of workers, which of them
may have a part of a prompt, and how much at most. How much it is exactly is looked up for the few that matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

STRIDE = 16  # blocks between two names that say which workers have them


class Holdings:
    def __init__(self) -> None:
        self.names: dict[int, dict[bytes, None]] = {}  # by worker, the oldest first
        self._holders: dict[bytes, int] = {}  # bits of the workers that have a name, for every sixteenth one

    def keep(self, worker: int, names: Sequence[bytes], room: int) -> None:
        """It has these leading blocks of a prompt now. Of too many the oldest are forgotten, an eighth at once."""
        held, holders, bit = self.names.setdefault(worker, {}), self._holders, 1 << worker
        held.update(dict.fromkeys(reversed(names)))
        for name in names[::STRIDE]:
            holders[name] = holders.get(name, 0) | bit
        over = len(held) - room
        if over > room // 8:
            self.forget(worker, list(islice(held, over)))

    def forget(self, worker: int, names: Iterable[bytes]) -> None:
        held, bit = self.names.get(worker, {}), 1 << worker
        for name in names:
            held.pop(name, None)
            bits = self._holders.get(name)
            if bits is not None and bits & bit:
                if bits == bit:
                    del self._holders[name]
                else:
                    self._holders[name] = bits ^ bit

    def drop(self, worker: int) -> None:
        """All of a worker's."""
        self.forget(worker, list(self.names.get(worker, ())))
        self.names.pop(worker, None)

    def most(self, names: Sequence[bytes]) -> list[tuple[int, int]]:
        """(bits of workers, the most leading blocks that these may have), the most blocks last. A worker counts with
        the last pair that has its bit; one with no bit has none of them."""
        found: list[tuple[int, int]] = []
        for place in range(0, len(names), STRIDE):
            bits = self._holders.get(names[place], 0)
            if place == 0 and not bits:
                break
            if bits:
                if found and found[-1][0] == bits:
                    found.pop()
                found.append((bits, min(place + STRIDE, len(names))))
        return found

    def cached(self, worker: int, names: Sequence[bytes]) -> int:
        """Leading blocks that it has. Names are chained and the end of a prompt is evicted first, so the border is
        found by bisection."""
        held = self.names.get(worker)
        if not held or not names or names[0] not in held:
            return 0
        if names[-1] in held:
            return len(names)
        low, high = 1, len(names)  # the first `low` are there
        while low < high:
            middle = (low + high + 1) // 2
            if names[middle - 1] in held:
                low = middle
            else:
                high = middle - 1
        return low
