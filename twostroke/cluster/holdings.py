"""Which workers have a prompt's blocks, by name, as far as the router was told. Torch-free.

Each worker has names in the order in which they came: those of the first 64 blocks of a prompt, every sixteenth of
those after them, and that of the last one. Beside that, every sixteenth name of a prompt has a list of the workers that
have it. So a few looks find those that have the most of a prompt, whatever the number of workers, and a long prompt
takes hardly more time and memory than a short one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter

from twostroke.cluster.standing import EXACT, STRIDE, BlockName, RoutedWorker, stands_for

SAMPLE = 8  # of many workers that have a name
WAIT = attrgetter("wait")


class Holdings:
    def __init__(self) -> None:
        self._holders: dict[BlockName, list[RoutedWorker]] = {}  # of every sixteenth name
        self._turn = 0

    def keep(self, worker: RoutedWorker, names: Sequence[BlockName], cached: int = 0) -> None:
        """It has these leading blocks of a prompt now, and had the first `cached` before. Of too many the oldest are
        forgotten, an eighth at once."""
        held, holders, room, count = worker.held, self._holders, worker.load.blocks, len(names)
        if cached == count:
            return
        for name in names[-(-cached // STRIDE) * STRIDE :: STRIDE]:
            if name not in held:
                holders.setdefault(name, []).append(worker)
        # The end first, as it is forgotten first. A name that is there keeps its place.
        if count > EXACT:
            self._add(worker, names[-1:], stands_for(count - 1))
            self._add(worker, names[max(EXACT, -(-cached // STRIDE) * STRIDE) :: STRIDE], STRIDE)
        if cached < EXACT:
            self._add(worker, names[cached:EXACT], 1)
        over = worker.blocks - room
        if over > room // 8:
            self.forget(worker, oldest(worker, over))

    def _add(self, worker: RoutedWorker, names: Sequence[BlockName], blocks: int) -> None:
        """blocks: that each name stands for."""
        before = len(worker.held)
        worker.held.update(dict.fromkeys(reversed(names), blocks))
        worker.blocks += (len(worker.held) - before) * blocks

    def forget(self, worker: RoutedWorker, names: Iterable[BlockName]) -> None:
        held = worker.held
        for name in names:
            those = self._holders.get(name)
            if those is not None and name in held:
                those.remove(worker)
                if not those:
                    del self._holders[name]
            worker.blocks -= held.pop(name, 0)

    def drop(self, worker: RoutedWorker) -> None:
        """All of a worker's."""
        self.forget(worker, list(worker.held))

    def most(self, names: Sequence[BlockName], count: int) -> list[RoutedWorker]:
        """Up to `count` workers that have the beginning of a prompt, or some more, those with the most of it first.
        Where many have it, those that wait the least of some of them, and of others each time."""
        found: list[RoutedWorker] = []
        level = self._deepest(names)
        while level >= 0 and len(found) < count:
            those = self._holders.get(names[level * STRIDE], [])  # a beginning may be forgotten before an end
            if len(those) > count:
                self._turn += SAMPLE
                first = self._turn % len(those)
                those = sorted(those[first : first + SAMPLE], key=WAIT)[:count]
            found += those
            level = level // 2 if level else -1
        return found

    def _deepest(self, names: Sequence[BlockName]) -> int:
        """The last sixteenth name that a worker has, counted from 0; -1: none. By bisection, as names are chained."""
        holders = self._holders
        low, high = -1, (len(names) - 1) // STRIDE
        while low < high:
            middle = (low + high + 1) // 2
            if names[middle * STRIDE] in holders:
                low = middle
            else:
                high = middle - 1
        return low


def oldest(worker: RoutedWorker, blocks: int) -> list[BlockName]:
    """Names that stand for so many blocks, or some more."""
    found = []
    for name, many in worker.held.items():
        if blocks <= 0:
            break
        found.append(name)
        blocks -= many
    return found
