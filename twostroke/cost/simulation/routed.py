"""A simulated fleet behind the router of a real deployment (cluster/router.py).

    arrival ─▶ router ─▶ a worker that does both
                    ├──▶ a worker that computes the prompt ─▶ last chunk's blocks ─▶ the worker that writes
                    └──▶ before that, perhaps: a beginning that another worker has is fetched

The router gets the reports that `Pools` gives it: prompts that are sent and not computed, answers that are written,
blocks by name. Speeds are those of the roofline, as moving means would find them. Blocks travel while their prompt is
computed, so only those of its last chunk are waited for. Transfers do not share the link.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import cache
from math import inf
from typing import Any

from twostroke.cluster.router import Ask, Link, Role, Route, Router, WorkerLoad
from twostroke.cluster.search import CHUNK
from twostroke.cost.simulation.fleet import Fleet, add_timeline, deliver, make_request
from twostroke.cost.simulation.served import Served
from twostroke.cost.simulation.trace import Arrival
from twostroke.cost.simulation.worker import SimulatedWorker
from twostroke.kv.addresses import QuickNames
from twostroke.ops.interface import BLOCK
from twostroke.types import Event, Request, RequestState

CONTEXT = 1024  # of a stream, for the time of a step
SMOOTHING = 0.2  # of the moving means, as in a deployment


@dataclass(slots=True)
class SimulatedFlight:
    """A request on its way. Workers by number."""

    arrival: Arrival
    served: Served
    names: list[bytes]  # of the prompt's full blocks
    salt: bytes
    first: int  # computes the prompt
    writer: int
    queued: int  # tokens that `first` has to compute
    lacking: int  # blocks that `writer` lacks


@dataclass(slots=True)
class Transit:
    """Blocks on their way to a worker, and the request that follows them."""

    request: Request
    names: list[bytes]
    columns: int  # that are there when they have landed
    index: int
    flight: SimulatedFlight


class RoutedFleet(Fleet):
    """`pools.router` is "cost" or "apart", as the option --route of a cluster."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        pools, layout, count = self.pools, self.settings.layout, len(self.workers)
        link = Link(pools.link, pools.latency)
        whole = not layout.state_bytes and all(group.window is None for group in layout.groups)
        self.router = Router(layout.block_bytes, link, link if whole else None)
        writes = Role.DECODE if pools.prefill else Role.BOTH
        self.roles = [writes] * pools.workers + [Role.PREFILL] * pools.prefill
        self.due_in = inf if pools.ttft is None else pools.ttft  # seconds, of every first token
        self.queued, self.streams = [0] * count, [0] * count
        self.flights: dict[int, SimulatedFlight] = {}
        self.hasher = QuickNames("simulated", key=b"")
        self.moved = 0  # bytes from worker to worker
        self._token = 0.0  # seconds for a token of a prompt
        self._stream = 1.0  # seconds that an answer is written for
        self._stale = set(range(count))
        self._step_seconds = cache(lambda streams: self.roofline.decode_seconds(max(1, streams), CONTEXT))

    def _make_worker(self) -> SimulatedWorker:
        worker = super()._make_worker()
        worker.scheduler.tables.pool.keep_cached = True  # transferred blocks must be found
        return worker

    # ---- what the router knows -------------------------------------------------------------------------------------

    def _load(self, index: int) -> WorkerLoad:
        settings, streams = self.settings, self.streams[index]
        blocks = settings.kv_blocks if settings.prefix_cache else 0
        step = self._step_seconds(streams)
        return WorkerLoad(self.queued[index], streams, settings.max_requests, self._token, step, self._stream, blocks)

    def _choose(self, arrival: Arrival, names: list[bytes]) -> Route:
        length = min(arrival.prompt, self.settings.max_batch_tokens)
        seconds = self.roofline.prefill_seconds(length) / length
        self._token += (SMOOTHING if self._token else 1.0) * (seconds - self._token)
        for index in self._stale:
            self.router.update(str(index), self.roles[index], self._load(index))
        self._stale.clear()
        route = self.router.choose(Ask(arrival.prompt, names, self.due_in), self.pools.router == "apart")
        assert route is not None, "every worker is up"
        return route

    def _place(self, flight: SimulatedFlight, tokens: int, streams: int) -> None:
        """The loads follow what is sent and what has ended."""
        self.queued[flight.first] += tokens
        self.streams[flight.writer] += streams
        self._stale |= {flight.first, flight.writer}

    # ---- requests --------------------------------------------------------------------------------------------------

    def _send(self, number: int, arrival: Arrival, served: Served, salt: bytes) -> None:
        names, tokens = list[bytes](), arrival.tokens()
        self.hasher.extend(names, tokens, salt, len(tokens) // BLOCK)
        route = self._choose(arrival, names)
        known = route.cached + route.fetched
        flight = SimulatedFlight(
            arrival, served, names, salt, int(route.prefill), int(route.decode),
            max(1, arrival.prompt - known * BLOCK), route.sent,
        )  # fmt: skip
        self.flights[number] = flight
        self._place(flight, flight.queued, 1)
        limit = arrival.prompt + 1 if flight.first != flight.writer else self._limit(arrival)
        request = make_request(2 * number, tokens, arrival, arrival.at, limit, salt)
        if not route.fetched:
            self._submit(request, arrival, served, flight.first, arrival.at)
            return
        wait, token = self.router.standing(route.source).wait, self.router.workers[route.source].load.token_seconds
        busy = min(wait, CHUNK * token)  # it gives blocks away between two steps
        self._travel(Transit(request, names, known, flight.first, flight), route.fetched, arrival.at + busy)

    def _travel(self, move: Transit, blocks: int, begin: float) -> None:
        size = blocks * self.settings.layout.block_bytes
        heapq.heappush(self.transfers, (begin + self.router.link.seconds(size), move.request.id, move))

    def _land(self, move: Transit) -> None:  # type: ignore[override]
        worker = self._worker(move.index)
        state = RequestState(move.request)
        state.hashes = move.names
        taken = deliver(worker.scheduler.tables, state, min(move.columns, (len(state.tokens) - 1) // BLOCK))
        self.moved += len(taken) * self.settings.layout.block_bytes
        self._submit(move.request, move.flight.arrival, move.flight.served, move.index, self.now)

    def _event(self, event: Event, index: int) -> None:
        flight = self.flights[event.request_id // 2]
        if event.token_ids and flight.queued:
            self._place(flight, -flight.queued, 0)
            flight.queued = 0
        super()._event(event, index)

    def _finish(self, event: Event, index: int) -> None:
        arrival, served, _ = self.live.pop(event.request_id)
        request = self._worker(index).requests.pop(event.request_id)
        number, second = divmod(event.request_id, 2)
        flight = self.flights[number]
        self.loads[index] -= 1
        add_timeline(served, request.timeline, bool(second))
        if flight.first != flight.writer and not second and arrival.output > 1:
            after = make_request(
                request.id + 1, request.tokens, arrival, self.now, self._limit(arrival), flight.salt
            )  # fmt: skip
            last = min(flight.lacking, -(-self.settings.max_batch_tokens // BLOCK))
            self._travel(Transit(after, flight.names, len(flight.names), flight.writer, flight), last, self.now)
            return
        del self.flights[number]
        self._place(flight, 0, -1)
        self._stream += SMOOTHING * (self.now - served.scheduled - self._stream)
        self.router.stored(str(index), request.hashes)
