"""What decides behind `Router`, with numbers for workers, and its form in Python: the specification. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from twostroke.cluster.holdings import Holdings
from twostroke.cluster.search import FEW, Ask, Shortlist, Times, best, first_token
from twostroke.cluster.standing import BlockName, Role, RoutedWorker, Standing, WorkerLoad

# Numbers of the workers that compute, write, and have what is fetched (-1: nothing is); ttft, second, cost, cached,
# sent and fetched as in `Route`.
NumberedRoute = tuple[int, int, int, float, float, float, int, int, int]


class RouterCore(Protocol):
    """See `Router`. A number that has not joined does so with its first `update`; numbers count up from 0."""

    def update(self, number: int, role: Role, load: WorkerLoad) -> None: ...

    def pause(self, number: int) -> None: ...

    def lost(self, number: int) -> None: ...

    def stored(self, number: int, names: Sequence[BlockName]) -> None: ...

    def cached(self, number: int, names: Sequence[BlockName]) -> int: ...

    def standing(self, number: int) -> Standing: ...

    def choose(self, ask: Ask, apart: bool, but: int, times: Times, prefix_times: Times | None) -> NumberedRoute | None:
        """but: -1 if all are asked. times: of a transfer to the writer; prefix_times: of what is fetched before."""


class PythonCore:
    def __init__(self) -> None:
        self._workers: dict[int, RoutedWorker] = {}
        self._holdings = Holdings()
        self._shortlist = Shortlist()

    def update(self, number: int, role: Role, load: WorkerLoad) -> None:
        worker = self._workers.get(number)
        if worker is None:
            worker = self._workers[number] = RoutedWorker(number, role, load)
        else:
            if role is not worker.role:
                self._shortlist.drop(worker)
            worker.report(role, load)
        self._shortlist.changed(worker)

    def pause(self, number: int) -> None:
        self._workers[number].open = False
        self._shortlist.changed(self._workers[number])

    def lost(self, number: int) -> None:
        worker = self._workers.pop(number)
        self._holdings.drop(worker)
        self._shortlist.drop(worker)

    def stored(self, number: int, names: Sequence[BlockName]) -> None:
        worker = self._workers[number]
        self._holdings.keep(worker, names, worker.cached(names))

    def cached(self, number: int, names: Sequence[BlockName]) -> int:
        return self._workers[number].cached(names)

    def standing(self, number: int) -> Standing:
        return self._workers[number].standing()

    def choose(self, ask: Ask, apart: bool, but: int, times: Times, prefix_times: Times | None) -> NumberedRoute | None:
        length, names, due = ask
        workers: Iterable[RoutedWorker] = self._workers.values()
        if len(self._workers) > FEW:
            workers = self._shortlist.of(length, names, self._holdings)
        given = max(1, length), names, times, prefix_times, apart, self._workers.get(but)
        chosen = best(workers, *given)
        if chosen is None:
            return None
        if first_token(chosen) > due:
            soonest = best(workers, *given, others=False)
            if soonest is not None and first_token(soonest) <= due:
                chosen = soonest
        least, prefill, decode, richest = chosen
        alone, _, done, cached, tokens, fetched, first = prefill
        writer, has, ttft, sent = decode[-1], decode[3], first_token(chosen), 0
        second = least - alone + done
        cost = second + first.streams * tokens * first.token
        self._take(first, tokens, int(first is writer), names, cached)
        if first is not writer:
            sent = len(names) - has
            self._take(writer, 0, 1, names, has)
        source = richest.number if fetched and richest is not None else -1
        return first.number, writer.number, source, ttft, second, cost, cached, sent, fetched

    def _take(self, worker: RoutedWorker, tokens: int, streams: int, names: Sequence[BlockName], cached: int) -> None:
        worker.take(tokens, streams)
        self._holdings.keep(worker, names, cached)
        self._shortlist.changed(worker)
