"""Which worker computes a prompt and which writes the answer: the route that is expected to cost the least time.

A route is one worker that does both, or one that computes the prompt and another that writes the answer. A stream has
begun when its second token is out: the first comes from the worker that computed the prompt, the second needs the
blocks on the worker that writes.

    one worker     wait for its queue and a free place, compute what is not cached there, one step
    two workers    wait for the queue of the first, compute what is not cached there: the first token.
                   Send the blocks that the second one lacks (latency + bytes / bandwidth), wait for a place, one step

The cost of a route is the time until its stream begins, and the time that others lose: each answer that a worker writes
waits while it computes the prompt. So a short prompt is computed in place where that is sooner, and a long one goes to
a worker that writes nothing; no threshold has to be set.

A request may say when its first token is due. If the route of the least cost would be late, and the one whose stream
begins soonest would not, that one is taken: others wait longer for it.

Where another worker has more of the prompt than the one that is to compute it, that part is fetched from there, if this
is sooner than to compute it: it comes while the prompt waits for its turn.

The router knows by their names (kv/addresses.py) which blocks a worker holds, as far as it was told (holdings.py): of
the first 64 of a prompt each, of the others to a multiple of 16. A wrong guess costs time and no token. Between two
reports the router adds what it has sent itself. Which workers are compared is in search.py. Nothing here waits, sends
or reads a clock. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from twostroke.cluster.holdings import Holdings
from twostroke.cluster.search import FEW, Shortlist, Times, best, first_token
from twostroke.cluster.standing import Role, RoutedWorker, WorkerLoad

__all__ = ["Ask", "Link", "Role", "Route", "RoutedWorker", "Router", "WorkerLoad"]


@dataclass(frozen=True, slots=True)
class Link:
    """The way from one worker to another."""

    bandwidth: float = inf  # bytes/s
    latency: float = 0.0  # seconds before the first byte

    def seconds(self, size: int) -> float:
        return self.latency + size / self.bandwidth if size else 0.0


class Ask(NamedTuple):
    """A request as the router sees it."""

    tokens: int  # of its prompt
    names: Sequence[bytes] = ()  # of the prompt's full blocks, in order
    due: float = inf  # seconds within which its first token should be out


class Route(NamedTuple):
    prefill: str
    decode: str  # the same worker, where nothing is sent
    ttft: float  # seconds until the first token, expected
    second: float  # seconds until the second token, expected
    cost: float  # the same and what other answers wait, all together
    cached: int = 0  # blocks of the prompt that the prefill worker has
    sent: int = 0  # blocks that the decode worker lacks
    fetched: int = 0  # blocks after the cached ones that the prefill worker is to fetch first
    source: str = ""  # from this worker


class Router:
    """`choose` a route for each request, and tell the router what is new: `update`, `pause`, `stored`, `lost`."""

    def __init__(self, block_bytes: int, link: Link, prefix_link: Link | None = None):
        """block_bytes: of BLOCK tokens in all layers. link: between two workers, for a prompt that was just computed.
        prefix_link: the same for blocks that are cached; None: they are not fetched."""
        self.block_bytes = block_bytes
        self.link = link
        self.prefix_link = prefix_link
        self.workers: dict[str, RoutedWorker] = {}
        self._numbers = 0  # of workers that have joined
        self._holdings = Holdings()
        self._shortlist = Shortlist()

    # ---- what is known ---------------------------------------------------------------------------------------------

    def update(self, name: str, role: Role, load: WorkerLoad) -> None:
        """A worker joins, or reports anew. Its report covers what was sent to it before."""
        worker = self.workers.get(name)
        if worker is None:
            worker = self.workers[name] = RoutedWorker(self._numbers, name, role, load)
            self._numbers += 1
        else:
            if role is not worker.role:
                self._shortlist.drop(worker)
            worker.report(role, load)
        self._shortlist.changed(worker)

    def pause(self, name: str) -> None:
        """A worker is not asked until its next report. What it has is remembered."""
        if name in self.workers:
            self.workers[name].open = False
            self._shortlist.changed(self.workers[name])

    def lost(self, name: str) -> None:
        """A worker is gone, and its blocks with it."""
        worker = self.workers.pop(name, None)
        if worker is not None:
            self._holdings.drop(worker)
            self._shortlist.drop(worker)

    def stored(self, name: str, names: Sequence[bytes]) -> None:
        """A worker has these blocks, the first of a prompt."""
        worker = self.workers[name]
        self._holdings.keep(worker, names, worker.cached(names))

    def cached(self, name: str, names: Sequence[bytes]) -> int:
        """Leading blocks that a worker has."""
        return self.workers[name].cached(names)

    # ---- routes ----------------------------------------------------------------------------------------------------

    def choose(self, ask: Ask, apart: bool = False, but: str | None = None) -> Route | None:
        """The best route, which then counts as taken. None: no worker can write the answer. apart: prompts with a full
        block are computed by prefill workers alone, where there are any. but: a worker that is not asked."""
        length, names, due = ask
        workers: Iterable[RoutedWorker] = self.workers.values()
        if len(self.workers) > FEW:
            workers = self._shortlist.of(length, names, self._holdings)
        aside = self.workers.get(but) if but is not None else None
        prefix_times = None if self.prefix_link is None else self._times(self.prefix_link)
        given = max(1, length), names, self._times(self.link), prefix_times, apart, aside
        chosen = best(workers, *given)
        if chosen is None:
            return None
        if first_token(chosen) > due:
            soonest = best(workers, *given, others=False)
            if soonest is not None and first_token(soonest) <= due:
                chosen = soonest
        least, prefill, decode, richest = chosen
        alone, _, done, cached, tokens, fetched, first = prefill
        has, writer = decode[3], decode[-1]
        second = least - alone + done
        cost = second + first.streams * tokens * first.token
        if first is writer:
            route = Route(first.name, first.name, max(done, first.place), second, cost, cached)
            self._take(first, tokens, 1, names, cached)
        else:
            route = Route(first.name, writer.name, done, second, cost, cached, len(names) - has)
            self._take(first, tokens, 0, names, cached)
            self._take(writer, 0, 1, names, has)
        return route._replace(fetched=fetched, source=richest.name) if fetched and richest is not None else route

    def _times(self, link: Link) -> Times:
        return link.latency, self.block_bytes / link.bandwidth

    def _take(self, worker: RoutedWorker, tokens: int, streams: int, names: Sequence[bytes], cached: int) -> None:
        worker.take(tokens, streams)
        self._holdings.keep(worker, names, cached)
        self._shortlist.changed(worker)
