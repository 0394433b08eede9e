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

The router knows by their names (kv/addresses.py) which blocks a worker holds, as far as it was told (holdings.py). A
worker that has evicted them since costs time and no token. Between two reports the router adds what it has sent itself.
All workers are compared at once (search.py). Nothing here waits, sends or reads a clock. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import NamedTuple

from twostroke.cluster.holdings import Holdings
from twostroke.cluster.search import Search
from twostroke.cluster.standing import Standing
from twostroke.ops.interface import BLOCK


class Role(StrEnum):
    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"  # it also computes prompts where that is sooner


@dataclass(frozen=True, slots=True)
class Load:
    """What a worker reports of itself."""

    queued_tokens: int = 0  # of prompts that it has and has not computed
    streams: int = 0  # answers that it writes, or has taken to write
    max_streams: int = 1  # that it can write at once
    token_seconds: float = 0.0  # to compute a token of a prompt, beside the streams that it writes now
    step_seconds: float = 0.0  # of a step of its streams
    stream_seconds: float = 1.0  # that a stream takes on average: when a full worker has a place again
    blocks: int = 1 << 62  # that it can keep; of the names that the router knows, the oldest beyond that are forgotten


@dataclass(frozen=True, slots=True)
class Link:
    """From one worker to another."""

    bandwidth: float = inf  # bytes/s
    latency: float = 0.0  # seconds before the first byte

    def seconds(self, size: int) -> float:
        return self.latency + size / self.bandwidth if size else 0.0


class Ask(NamedTuple):
    """A request as the router sees it."""

    tokens: int  # of its prompt
    names: Sequence[bytes] = ()  # of the prompt's full blocks, in order


class Route(NamedTuple):
    prefill: str
    decode: str  # the same worker, where nothing is sent
    ttft: float  # seconds until the first token, expected
    second: float  # seconds until the second token, expected
    cost: float  # the same and what other answers wait: what routes are compared by
    cached: int = 0  # blocks of the prompt that the prefill worker has
    sent: int = 0  # blocks that the decode worker lacks


class Worker:
    """What the router knows of one worker."""

    __slots__ = ("load", "name", "number", "role", "sent_streams", "sent_tokens")

    def __init__(self, number: int, name: str, role: Role, load: Load):
        self.number = number
        self.name = name
        self.role = role
        self.load = load
        self.sent_tokens = 0  # since its last report, as are the streams
        self.sent_streams = 0

    @property
    def streams(self) -> int:
        return self.load.streams + self.sent_streams

    @property
    def wait(self) -> float:
        """Seconds for the prompts that it has."""
        return (self.load.queued_tokens + self.sent_tokens) * self.load.token_seconds

    def place(self) -> float:
        """Seconds until it can write one more answer: its streams end evenly over time."""
        load = self.load
        over = self.streams + 1 - load.max_streams
        return over * load.stream_seconds / load.max_streams if over > 0 else 0.0

    def values(self) -> tuple[float, ...]:
        """As in `Standing`."""
        load, role = self.load, self.role
        token = load.token_seconds
        busy = token * self.streams
        step = inf if role is Role.PREFILL else load.step_seconds
        helps, helps_only = inf if role is Role.DECODE else 0.0, 0.0 if role is Role.PREFILL else inf
        return self.wait, token, token + busy, busy, self.place(), step, helps, helps_only


class Router:
    """`choose` a route for each request, and tell the router what is new: `update`, `pause`, `stored`, `evicted`,
    `lost`."""

    def __init__(self, block_bytes: int, link: Link):
        """block_bytes: of BLOCK tokens in all layers. link: between two workers."""
        self.block_bytes = block_bytes
        self.link = link
        self.workers: dict[str, Worker] = {}
        self._by_number: dict[int, Worker] = {}
        self._free: list[int] = []  # numbers of workers that are gone
        self._standing = Standing()
        self._holdings = Holdings()

    # ---- what is known ---------------------------------------------------------------------------------------------

    def update(self, name: str, role: Role, load: Load) -> None:
        """A worker joins, or reports anew. Its report covers what was sent to it before."""
        worker = self.workers.get(name)
        if worker is None:
            number = self._free.pop() if self._free else len(self.workers)
            worker = self.workers[name] = self._by_number[number] = Worker(number, name, role, load)
        else:
            worker.role, worker.load = role, load
            worker.sent_tokens = worker.sent_streams = 0
        self._standing.put(worker.number, worker.values())

    def pause(self, name: str) -> None:
        """A worker is not asked until its next report. What it has is remembered."""
        if name in self.workers:
            self._standing.clear(self.workers[name].number)

    def lost(self, name: str) -> None:
        """A worker is gone, and its blocks with it."""
        worker = self.workers.pop(name, None)
        if worker is not None:
            self._standing.clear(worker.number)
            self._holdings.drop(worker.number)
            self._free.append(worker.number)
            del self._by_number[worker.number]

    def stored(self, name: str, names: Sequence[bytes]) -> None:
        """A worker has these blocks, the first of a prompt."""
        self._keep(self.workers[name], names)

    def _keep(self, worker: Worker, names: Sequence[bytes]) -> None:
        self._holdings.keep(worker.number, names, worker.load.blocks)

    def evicted(self, name: str, names: Iterable[bytes]) -> None:
        self._holdings.forget(self.workers[name].number, names)

    def cached(self, name: str, names: Sequence[bytes]) -> int:
        """Leading blocks that a worker has."""
        return self._holdings.cached(self.workers[name].number, names)

    # ---- routes ----------------------------------------------------------------------------------------------------

    def choose(self, ask: Ask, apart: bool = False, but: str | None = None) -> Route | None:
        """The best route, which then counts as taken. None: no worker can write the answer. apart: prompts with a full
        block are computed by prefill workers alone, where there are any. but: a worker that is not asked."""
        aside = self.workers.get(but) if but is not None else None
        before = self._standing.rows[:, aside.number].copy() if aside is not None else None
        if aside is not None:
            self._standing.clear(aside.number)
        found = Search(self._standing, self._holdings, ask.tokens, ask.names, self._sending).best(apart)
        if aside is not None and before is not None:
            self._standing.put(aside.number, tuple(before))
        if found.decode < 0:
            return None
        route = self._route(self._by_number[found.prefill], self._by_number[found.decode], ask)
        self._take(route, ask)
        return route

    def _sending(self, blocks: int) -> float:
        return self.link.seconds(blocks * self.block_bytes)

    def _route(self, prefill: Worker, decode: Worker, ask: Ask) -> Route:
        cached = self._holdings.cached(prefill.number, ask.names)
        own = max(1, ask.tokens - cached * BLOCK) * prefill.load.token_seconds
        done, place, sent = prefill.wait + own, decode.place(), 0
        ready = ttft = done
        if prefill is decode:
            ttft = max(done, place)
        else:
            sent = len(ask.names) - self._holdings.cached(decode.number, ask.names)
            ready += self._sending(sent)
        second = max(ready, place) + decode.load.step_seconds
        return Route(prefill.name, decode.name, ttft, second, second + prefill.streams * own, cached, sent)

    def _take(self, route: Route, ask: Ask) -> None:
        prefill, decode = self.workers[route.prefill], self.workers[route.decode]
        prefill.sent_tokens += max(1, ask.tokens - route.cached * BLOCK)
        decode.sent_streams += 1
        for worker in (prefill, decode) if prefill is not decode else (prefill,):
            self._keep(worker, ask.names)
            self._standing.put(worker.number, worker.values())
