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

All of this is written twice: in Python (core.py), to be read, and in C++, which runs where it was built and decides the
same (native_core.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from twostroke.cluster.core import PythonCore, RouterCore
from twostroke.cluster.native_core import CompiledCore
from twostroke.cluster.search import Ask
from twostroke.cluster.standing import BlockName, Role, Standing, WorkerLoad
from twostroke.ops.cpu.library import available

__all__ = ["Ask", "KnownWorker", "Link", "Role", "Route", "Router", "Standing", "WorkerLoad"]


@dataclass(frozen=True, slots=True)
class Link:
    """The way from one worker to another."""

    bandwidth: float = inf  # bytes/s
    latency: float = 0.0  # seconds before the first byte

    def seconds(self, size: int) -> float:
        return self.latency + size / self.bandwidth if size else 0.0


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


@dataclass(slots=True)
class KnownWorker:
    """A worker and its latest report."""

    number: int  # in the order in which workers joined
    role: Role
    load: WorkerLoad


class Router:
    """`choose` a route for each request, and tell the router what is new: `update`, `pause`, `stored`, `lost`."""

    def __init__(self, block_bytes: int, link: Link, prefix_link: Link | None = None, core: RouterCore | None = None):
        """block_bytes: of BLOCK tokens in all layers. link: between two workers, for a prompt that was just computed.
        prefix_link: the same for blocks that are cached; None: they are not fetched. core: the native one if None is
        given and it was built."""
        self.block_bytes = block_bytes
        self.link = link
        self.prefix_link = prefix_link
        self.workers: dict[str, KnownWorker] = {}
        self._names: dict[int, str] = {}  # of workers by number
        self._numbers = 0  # of workers that have joined
        self._core: RouterCore = core or (CompiledCore() if available() else PythonCore())

    # ---- what is known ---------------------------------------------------------------------------------------------

    def update(self, name: str, role: Role, load: WorkerLoad) -> None:
        """A worker joins, or reports anew. Its report covers what was sent to it before."""
        worker = self.workers.get(name)
        if worker is None:
            worker = self.workers[name] = KnownWorker(self._numbers, role, load)
            self._names[worker.number] = name
            self._numbers += 1
        worker.role, worker.load = role, load
        self._core.update(worker.number, role, load)

    def pause(self, name: str) -> None:
        """A worker is not asked until its next report. What it has is remembered."""
        if name in self.workers:
            self._core.pause(self.workers[name].number)

    def lost(self, name: str) -> None:
        """A worker is gone, and its blocks with it."""
        worker = self.workers.pop(name, None)
        if worker is not None:
            del self._names[worker.number]
            self._core.lost(worker.number)

    def stored(self, name: str, names: Sequence[BlockName]) -> None:
        """A worker has these blocks, the first of a prompt."""
        self._core.stored(self.workers[name].number, names)

    def cached(self, name: str, names: Sequence[BlockName]) -> int:
        """Leading blocks that a worker has."""
        return self._core.cached(self.workers[name].number, names)

    def standing(self, name: str) -> Standing:
        return self._core.standing(self.workers[name].number)

    # ---- routes ----------------------------------------------------------------------------------------------------

    def choose(self, ask: Ask, apart: bool = False, but: str | None = None) -> Route | None:
        """The best route, which then counts as taken. None: no worker can write the answer. apart: prompts with a full
        block are computed by prefill workers alone, where there are any. but: a worker that is not asked."""
        aside = self.workers.get(but) if but is not None else None
        number = -1 if aside is None else aside.number
        size, link, before = self.block_bytes, self.link, self.prefix_link
        times = link.latency, size / link.bandwidth
        prefix_times = None if before is None else (before.latency, size / before.bandwidth)
        chosen = self._core.choose(ask, apart, number, times, prefix_times)
        if chosen is None:
            return None
        prefill, decode, source, ttft, second, cost, cached, sent, fetched = chosen
        names = self._names
        origin = names[source] if source >= 0 else ""
        return Route(names[prefill], names[decode], ttft, second, cost, cached, sent, fetched, origin)
