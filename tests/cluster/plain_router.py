"""The router by its definition: it looks at one worker after the other. The one that serves is held to it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from typing import NamedTuple

from twostroke.cluster.router import Ask, Link, Role, Route, WorkerLoad
from twostroke.cluster.search import CHUNK
from twostroke.cluster.standing import EXACT, STRIDE
from twostroke.ops.interface import BLOCK


class Prompt(NamedTuple):
    """A prompt at one worker."""

    cached: int  # leading blocks that it has
    done: float  # seconds until it is computed
    cost: float  # the same, and what the streams of the worker wait meanwhile, all together
    fetched: int = 0  # blocks that it gets before from the worker that has the most of the prompt
    source: str = ""


class RoutedWorker:
    """What the router knows of one worker."""

    __slots__ = ("load", "names", "role", "sent_streams", "sent_tokens")

    def __init__(self, role: Role, load: WorkerLoad):
        self.role = role
        self.load = load
        self.names: dict[bytes, int] = {}  # that are kept, the oldest first, and how many blocks each stands for
        self.sent_tokens = 0  # since its last report, as are the streams
        self.sent_streams = 0

    def keep(self, names: Sequence[bytes]) -> None:
        """It has these blocks now. Of too many the oldest are forgotten, an eighth at once."""
        places = kept_places(len(names))
        if names and (len(names) - 1) not in places:
            self.names.setdefault(names[-1], len(names) - 1 - places[-1])
        for place in reversed(places):
            self.names.setdefault(names[place], 1 if place < EXACT else STRIDE)
        over = sum(self.names.values()) - self.load.blocks
        if over > self.load.blocks // 8:
            while over > 0:
                over -= self.names.pop(next(iter(self.names)))

    def cached(self, names: Sequence[bytes]) -> int:
        """Leading blocks that it has. Names are chained and the end of a prompt is forgotten first, so the border is
        found by bisection among the kept names. The end of another prompt may lie behind it."""
        if not names or names[0] not in self.names:
            return 0
        if names[-1] in self.names:
            return len(names)
        places = kept_places(len(names))
        low, high = 0, len(places) - 1
        while low < high:
            middle = (low + high + 1) // 2
            if names[places[middle]] in self.names:
                low = middle
            else:
                high = middle - 1
        behind = range(places[low] + 1, (*places, len(names))[low + 1])
        return 1 + max((place for place in behind if names[place] in self.names), default=places[low])

    def wait(self) -> float:
        """Seconds until it has computed the prompts that it has."""
        return (self.load.queued_tokens + self.sent_tokens) * self.load.token_seconds

    def prompt(self, tokens: int, names: Sequence[bytes]) -> Prompt:
        """What it would cost to compute a prompt here, after those before it. The last token is always computed."""
        cached = self.cached(names) if names and names[0] in self.names else 0
        own = max(1, tokens - cached * BLOCK) * self.load.token_seconds
        done = self.wait() + own
        return Prompt(cached, done, done + (self.load.streams + self.sent_streams) * own)

    def after(self, cached: int, most: int, source: str, seconds: float, tokens: int) -> Prompt:
        """The same, if the first `most` blocks are here in so many seconds."""
        own = max(1, tokens - most * BLOCK) * self.load.token_seconds
        done = max(self.wait(), seconds) + own
        return Prompt(cached, done, done + (self.load.streams + self.sent_streams) * own, most - cached, source)

    def place(self) -> float:
        """Seconds until it can write one more answer: its streams end evenly over time."""
        load = self.load
        over = load.streams + self.sent_streams + 1 - load.max_streams
        return over * load.stream_seconds / load.max_streams if over > 0 else 0.0


def kept_places(blocks: int) -> list[int]:
    """Places of the blocks whose names are kept, beside that of the last one."""
    return [place for place in range(blocks) if place < EXACT or (place - EXACT) % STRIDE == 0]


class PlainRouter:
    def __init__(self, block_bytes: int, link: Link, prefix_link: Link | None = None):
        self.block_bytes = block_bytes
        self.link = link
        self.prefix_link = prefix_link
        self.workers: dict[str, RoutedWorker] = {}

    # ---- what is known ---------------------------------------------------------------------------------------------

    def update(self, name: str, role: Role, load: WorkerLoad) -> None:
        """A worker joins, or reports anew. Its report covers what was sent to it before."""
        worker = self.workers.get(name)
        if worker is None:
            self.workers[name] = RoutedWorker(role, load)
            return
        worker.role, worker.load = role, load
        worker.sent_tokens = worker.sent_streams = 0

    def lost(self, name: str) -> None:
        """A worker is gone, and its blocks with it."""
        self.workers.pop(name, None)

    def stored(self, name: str, names: Sequence[bytes]) -> None:
        """A worker has these blocks."""
        self.workers[name].keep(names)

    # ---- routes ----------------------------------------------------------------------------------------------------

    def choose(self, ask: Ask, apart: bool = False, among: Iterable[str] | None = None) -> Route | None:
        workers = self.workers if among is None else {name: self.workers[name] for name in among}
        names, prompts = ask.names, self.prompts(ask, workers)
        helpers = [name for name, worker in workers.items() if worker.role is not Role.DECODE] if names else []
        if apart:
            helpers = [name for name in helpers if workers[name].role is Role.PREFILL] or helpers
        in_place = not (apart and helpers)
        helpers.sort(key=lambda name: prompts[name].cost)
        best, least = None, inf
        for name, worker in workers.items():
            if worker.role is Role.PREFILL:
                continue
            step = worker.load.step_seconds
            for helper in (name, *helpers) if in_place and prompts[name].cost + step < least else helpers:
                if prompts[helper].cost + step >= least:
                    break  # the helpers after it cost more still
                if helper != name or in_place:
                    route = self.route(helper, name, prompts[helper], len(names) - prompts[name].cached)
                    best, least = (route, route.cost) if route.cost < least else (best, least)
        return best

    def prompts(self, ask: Ask, workers: dict[str, RoutedWorker]) -> dict[str, Prompt]:
        """At each worker, with what it fetches from the one that has the most of it."""
        plain = {name: worker.prompt(ask.tokens, ask.names) for name, worker in workers.items()}
        most, source = max(((one.cached, name) for name, one in plain.items()), default=(0, ""), key=lambda one: one[0])
        if self.prefix_link is None or not most:
            return plain
        richest = workers[source]
        busy = min(richest.wait(), CHUNK * richest.load.token_seconds)
        found = {}
        for name, prompt in plain.items():
            seconds = busy + self.prefix_link.seconds((most - prompt.cached) * self.block_bytes)
            other = workers[name].after(prompt.cached, most, source, seconds, ask.tokens)
            found[name] = other if prompt.cached < most and other.done < prompt.done else prompt
        return found

    def route(self, prefill: str, decode: str, prompt: Prompt, lacking: int) -> Route:
        writer, sent, ready = self.workers[decode], 0, prompt.done
        if prefill != decode:
            sent = lacking
            ready += self.link.seconds(sent * self.block_bytes)
        place = writer.place()
        second = max(ready, place) + writer.load.step_seconds
        ttft = max(prompt.done, place) if prefill == decode else prompt.done
        cost = second + prompt.cost - prompt.done
        return Route(prefill, decode, ttft, second, cost, prompt.cached, sent, prompt.fetched, prompt.source)

    def take(self, route: Route, ask: Ask) -> None:
        prefill, decode = self.workers[route.prefill], self.workers[route.decode]
        prefill.sent_tokens += max(1, ask.tokens - (route.cached + route.fetched) * BLOCK)
        decode.sent_streams += 1
        prefill.keep(ask.names)
        if decode is not prefill:
            decode.keep(ask.names)
