"""Which worker computes a prompt and which writes the answer: the route whose stream is expected to begin first.

A route is one worker that does both, or one that computes the prompt and another that writes the answer. A stream has
begun when its second token is out: the first comes from the worker that computed the prompt, the second needs the
blocks on the worker that writes.

    one worker     wait for its queue and a free place, compute what is not cached there, one step
    two workers    wait for the queue of the first, compute what is not cached there: the first token.
                   Send the blocks that the second one lacks (latency + bytes / bandwidth), wait for a place, one step

A short prompt is computed in place where that is sooner; no threshold has to be set. What streams lose to a prompt
beside them is in the worker's own figure: `token_seconds` is measured beside the streams that it writes, and its
scheduler gives prompts only what `max_gap` leaves.

The router knows by their names (kv/addresses.py) which blocks a worker holds, as far as it was told. A worker that has
evicted them since costs time and no token. Between two reports the router adds what it has sent itself. Nothing here
waits, sends or reads a clock. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import NamedTuple

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
    second: float  # seconds until the second token, expected: what routes are compared by
    cached: int = 0  # blocks of the prompt that the prefill worker has
    sent: int = 0  # blocks that the decode worker lacks


class Worker:
    """What the router knows of one worker."""

    __slots__ = ("load", "names", "role", "sent_streams", "sent_tokens")

    def __init__(self, role: Role, load: Load):
        self.role = role
        self.load = load
        self.names: set[bytes] = set()  # of blocks that it has
        self.sent_tokens = 0  # since its last report, as are the streams
        self.sent_streams = 0

    def cached(self, names: Sequence[bytes]) -> int:
        """Leading blocks that it has. Names are chained and the end of a prompt is evicted first, so the border is
        found by bisection."""
        if not names or names[0] not in self.names:
            return 0
        low, high = 1, len(names)  # the first `low` are there
        while low < high:
            middle = (low + high + 1) // 2
            if names[middle - 1] in self.names:
                low = middle
            else:
                high = middle - 1
        return low

    def prompt_done(self, tokens: int, cached: int) -> float:
        """Seconds until it has computed a prompt: after those before it. The last token is always computed."""
        before = self.load.queued_tokens + self.sent_tokens
        return (before + max(1, tokens - cached * BLOCK)) * self.load.token_seconds

    def place(self) -> float:
        """Seconds until it can write one more answer: its streams end evenly over time."""
        load = self.load
        over = load.streams + self.sent_streams + 1 - load.max_streams
        return over * load.stream_seconds / load.max_streams if over > 0 else 0.0


class Router:
    """`choose` a route for each request, and tell the router what is new: `update`, `stored`, `evicted`, `lost`."""

    def __init__(self, block_bytes: int, link: Link, links: Mapping[tuple[str, str], Link] | None = None):
        """block_bytes: of BLOCK tokens in all layers. link: between two workers that `links` does not name."""
        self.block_bytes = block_bytes
        self.link = link
        self.links = dict(links or {})
        self.workers: dict[str, Worker] = {}

    # ---- what is known ---------------------------------------------------------------------------------------------

    def update(self, name: str, role: Role, load: Load) -> None:
        """A worker joins, or reports anew. Its report covers what was sent to it before."""
        worker = self.workers.get(name)
        if worker is None:
            self.workers[name] = Worker(role, load)
            return
        worker.role, worker.load = role, load
        worker.sent_tokens = worker.sent_streams = 0

    def lost(self, name: str) -> None:
        """A worker is gone, and its blocks with it."""
        self.workers.pop(name, None)

    def stored(self, name: str, names: Iterable[bytes]) -> None:
        """A worker has these blocks."""
        self.workers[name].names.update(names)

    def evicted(self, name: str, names: Iterable[bytes]) -> None:
        self.workers[name].names.difference_update(names)

    # ---- routes ----------------------------------------------------------------------------------------------------

    def choose(self, ask: Ask) -> Route | None:
        """The best route, which then counts as taken. None: no worker can write the answer."""
        best: Route | None = None
        cached = {name: worker.cached(ask.names) for name, worker in self.workers.items()}
        done = {name: worker.prompt_done(ask.tokens, cached[name]) for name, worker in self.workers.items()}
        writers = [(name, worker) for name, worker in self.workers.items() if worker.role is not Role.PREFILL]
        for name, worker in writers:
            ttft = max(done[name], worker.place())
            best = sooner(best, Route(name, name, ttft, ttft + worker.load.step_seconds, cached[name]))
        helpers = [name for name, worker in self.workers.items() if worker.role is not Role.DECODE]
        helpers.sort(key=done.__getitem__)
        for decode, worker in writers if ask.names else ():
            for prefill in helpers:
                if best is not None and done[prefill] + worker.load.step_seconds >= best.second:
                    break  # the helpers after it are later still
                if prefill != decode:
                    sent = len(ask.names) - cached[decode]
                    best = sooner(best, self._apart(prefill, decode, done[prefill], cached[prefill], sent))
        if best is not None:
            self._take(best, ask)
        return best

    def _apart(self, prefill: str, decode: str, ttft: float, cached: int, sent: int) -> Route:
        link, writer = self.links.get((prefill, decode), self.link), self.workers[decode]
        ready = max(ttft + link.seconds(sent * self.block_bytes), writer.place())
        return Route(prefill, decode, ttft, ready + writer.load.step_seconds, cached, sent)

    def _take(self, route: Route, ask: Ask) -> None:
        prefill, decode = self.workers[route.prefill], self.workers[route.decode]
        prefill.sent_tokens += max(1, ask.tokens - route.cached * BLOCK)
        decode.sent_streams += 1
        prefill.names.update(ask.names)
        decode.names.update(ask.names)


def sooner(one: Route | None, other: Route) -> Route:
    return other if one is None or other.second < one.second else one
