"""Simulated workers behind a router, in one pool or with separate pools for prefill and decode.

    arrival ─▶ router ─▶ worker                                                  one pool
    arrival ─▶ router ─▶ prefill worker ─▶ transfer of K and V ─▶ decode worker   two pools

A discrete-event loop: the earliest of arrivals, transfers and step boundaries is next. With two pools the prefill
worker writes the first token. After the time that the transfer takes, the full blocks of the prompt are in the decode
worker's cache under their names, and the request finds them there like any cached prefix.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Literal

import numpy as np

from twostroke.config import Resolved
from twostroke.cost.model.roofline import Roofline, kv_bytes_per_token
from twostroke.cost.simulation.served import Served
from twostroke.cost.simulation.trace import Arrival
from twostroke.cost.simulation.worker import Jitter, SimulatedWorker
from twostroke.kv.addresses import Name
from twostroke.kv.tables import KVTables
from twostroke.metrics.timeline import Timeline
from twostroke.ops.interface import BLOCK
from twostroke.sampling import SamplingParams
from twostroke.types import Event, Request, RequestState

# Bytes/s from engine to engine of one machine, and seconds before the first byte, by the kind of their devices: a line
# through both sizes of benchmarks/results/exchange-*.json over shared memory, copies and checksums included; of the
# machines of a kind the slower one.
MEASURED_LINKS = {"cpu": (0.48e9, 0.025), "cuda": (0.51e9, 0.026)}
AFFINITY_SLACK = 4  # requests that a worker with the prefix may have more than the least loaded one
PARAMS = {0: SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)}


@dataclass(frozen=True, slots=True)
class Pools:
    """How many workers of which kind. With `prefill` > 0 there are two pools, and `workers` counts decode workers."""

    workers: int = 1
    prefill: int = 0
    link: float = 25e9  # bytes/s from a prefill worker to a decode worker: of a network card of 200 Gbit/s
    latency: float = 0.002  # seconds before the first byte
    # "cost" and "apart" are those of a real deployment (routed.py); the others are simple ones.
    router: Literal["least-loaded", "round-robin", "prefix", "cost", "apart"] = "least-loaded"
    ttft: float | None = None  # seconds within which first tokens are due, for routes by cost and apart


@dataclass(slots=True)
class SimulatedTransfer:
    """A request on its way from a prefill worker to a decode worker."""

    arrival: Arrival
    served: Served
    request: RequestState


class Fleet:
    """`depth`, `jitter` and `fast` are passed to every worker."""

    def __init__(
        self,
        roofline: Roofline,
        settings: Resolved,
        pools: Pools = Pools(),
        depth: int = 1,
        jitter: Jitter | None = None,
        fast: bool = True,
    ):
        self.roofline = roofline
        self.settings = settings
        self.pools = pools
        self._options = (depth, jitter, fast)
        count = pools.workers + pools.prefill
        self.workers: list[SimulatedWorker | None] = [None] * count  # made when first used
        self.loads = [0] * count
        self.heap: list[tuple[float, int]] = []  # (boundary, worker); entries may be outdated, never too late
        self.due = [inf] * count  # the valid entry of each worker
        self.live: dict[int, tuple[Arrival, Served, int]] = {}  # request id -> arrival, result, worker
        self.transfers: list[
            tuple[float, int, Any]
        ] = []  # when it lands, request id, `SimulatedTransfer` or `routed.Move`
        self.homes: dict[int, int] = {}  # content of a prompt's first part -> worker that has it cached
        self.turn = 0
        self.served: list[Served] = []
        self.now = 0.0

    def run(self, arrivals: Sequence[Arrival]) -> list[Served]:
        """Serve all arrivals; the result is in the order of arrival."""
        self.feed(arrivals)
        return self.drain()

    def feed(self, arrivals: Sequence[Arrival]) -> None:
        """Serve up to the last of these arrivals, which come after all that were fed before."""
        for arrival in arrivals:
            self._run_until(arrival.at)
            self._arrive(len(self.served), arrival)

    def drain(self) -> list[Served]:
        """Serve what is left; nothing more arrives."""
        self._run_until(inf)
        return self.served

    @property
    def outstanding(self) -> int:
        """Requests that have arrived and are not answered yet."""
        return len(self.live) + len(self.transfers)

    def _make_worker(self) -> SimulatedWorker:
        worker = SimulatedWorker(self.roofline, self.settings, *self._options)
        if self.pools.prefill:
            worker.scheduler.tables.pool.keep_cached = True  # transferred blocks must be found
        return worker

    # ---- events in order of time -----------------------------------------------------------------------------------

    def _run_until(self, moment: float) -> None:
        """Process every event before `moment`."""
        while True:
            boundary = self.heap[0][0] if self.heap else inf
            landing = self.transfers[0][0] if self.transfers else inf
            if min(boundary, landing) >= moment:
                return
            if landing <= boundary:
                self.now, _, transfer = heapq.heappop(self.transfers)
                self._land(transfer)
            else:
                self.now, index = heapq.heappop(self.heap)
                self._advance(index)

    def _advance(self, index: int) -> None:
        worker = self.workers[index]
        assert worker is not None
        if self.now != self.due[index]:  # outdated: an earlier boundary was entered later
            return
        self.due[index] = inf
        if worker.next_time > self.now:  # a request was submitted since this entry was made
            self._schedule(index)
            return
        for event in worker.advance():
            self._event(event, index)
        self._schedule(index)

    def _event(self, event: Event, index: int) -> None:
        if event.finish_reason is not None:
            self._finish(event, index)

    def _schedule(self, index: int) -> None:
        worker = self.workers[index]
        assert worker is not None
        if worker.next_time < self.due[index]:
            self.due[index] = worker.next_time
            heapq.heappush(self.heap, (worker.next_time, index))

    # ---- requests --------------------------------------------------------------------------------------------------

    def _arrive(self, number: int, arrival: Arrival) -> None:
        served = Served(arrival.at, arrival.prompt)
        self.served.append(served)
        if arrival.prompt + 1 > self.settings.max_model_len:
            served.refused = True
            return
        salt = b"" if self.settings.prefix_cache else b"request %d" % number  # as the engine does: no shared blocks
        self._send(number, arrival, served, salt)

    def _send(self, number: int, arrival: Arrival, served: Served, salt: bytes) -> None:
        split = self.pools.prefill > 0
        limit = arrival.prompt + 1 if split else self._limit(arrival)
        request = make_request(2 * number, arrival.tokens(), arrival, arrival.at, limit, salt)
        pool = range(self.pools.workers, len(self.workers)) if split else range(self.pools.workers)
        self._submit(request, arrival, served, self._route(arrival, pool), arrival.at)

    def _limit(self, arrival: Arrival) -> int:
        return min(arrival.prompt + arrival.output, self.settings.max_model_len)

    def _worker(self, index: int) -> SimulatedWorker:
        worker = self.workers[index]
        if worker is None:
            worker = self.workers[index] = self._make_worker()
        return worker

    def _submit(self, request: Request, arrival: Arrival, served: Served, index: int, at: float) -> None:
        worker = self._worker(index)
        self.loads[index] += 1
        self.live[request.id] = (arrival, served, index)
        worker.submit(request, at)
        self._schedule(index)

    def _route(self, arrival: Arrival, pool: range) -> int:
        if self.pools.router == "round-robin":
            self.turn += 1
            return pool[self.turn % len(pool)]
        loads = self.loads[pool.start : pool.stop]
        least = min(loads)
        if self.pools.router == "prefix":
            home = self.homes.get(arrival.parts[0].content)
            if home is not None and home in pool and self.loads[home] <= least + AFFINITY_SLACK:
                return home
        index = pool.start + loads.index(least)
        if self.pools.router == "prefix":
            self.homes[arrival.parts[0].content] = index
        return index

    def _finish(self, event: Event, index: int) -> None:
        arrival, served, _ = self.live.pop(event.request_id)
        worker = self.workers[index]
        assert worker is not None
        request = worker.requests.pop(event.request_id)
        self.loads[index] -= 1
        add_timeline(served, request.timeline, request.id % 2 == 1)
        if self.pools.prefill and index >= self.pools.workers and arrival.output > 1:
            transfer = SimulatedTransfer(arrival, served, request)
            size = arrival.prompt * kv_bytes_per_token(self.settings.layout)
            landing = self.now + self.pools.latency + size / self.pools.link
            heapq.heappush(self.transfers, (landing, request.id, transfer))

    def _land(self, transfer: SimulatedTransfer) -> None:
        """The prompt's blocks reach a decode worker's cache; then the request is submitted there."""
        pool = range(self.pools.workers)
        index = self._route(transfer.arrival, pool)
        worker = self._worker(index)
        tokens, salt, limit = transfer.request.tokens, transfer.request.salt, self._limit(transfer.arrival)
        request = make_request(transfer.request.id + 1, tokens, transfer.arrival, self.now, limit, salt)
        state = RequestState(request)
        state.hashes = transfer.request.hashes
        deliver(worker.scheduler.tables, state, (len(tokens) - 1) // BLOCK)
        self._submit(request, transfer.arrival, transfer.served, index, self.now)


def make_request(number: int, tokens: list[int], arrival: Arrival, at: float, limit: int, salt: bytes) -> Request:
    """tokens: the prompt of the arrival, and what another worker wrote already."""
    params = PARAMS.get(arrival.priority)
    if params is None:
        params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True, priority=arrival.priority)
        PARAMS[arrival.priority] = params
    return Request(number, tuple(tokens), params, 0, at, limit, salt=salt, written=len(tokens) - arrival.prompt)


def deliver(tables: KVTables, request: RequestState, columns: int) -> list[int]:
    """Put the first `columns` full blocks of a request into a worker's cache, as far as it has room. Returns the blocks
    that were taken for it, whose content is not set."""
    pool = tables.pool
    tables.hasher.extend(request.hashes, request.tokens, request.salt, columns)
    taken: list[int] = []
    for column in range(columns):
        ends = tables.ends(column)
        names = [Name(group, request.hashes[column]) for group, _ in ends]
        if all(name in pool.by_name for name in names):
            continue
        if pool.available < len(names):
            break
        for (group, end), name in zip(ends, names, strict=True):
            taken.append(pool.take())
            pool.publish(taken[-1], name, tables.tokens(request, group, end))
    for block in reversed(taken):
        pool.release(block)
    return taken


def add_timeline(served: Served, timeline: Timeline, second: bool) -> None:
    """Add a finished timeline; with two pools the decode worker's continues the prefill worker's."""
    times = timeline.token_times
    served.preemptions += timeline.preemptions
    served.recomputed += timeline.recomputed_tokens
    if second:
        times = [served.end, *times]
    else:
        served.scheduled = timeline.scheduled if timeline.scheduled is not None else timeline.arrival
        served.cached = timeline.cached_tokens
        served.first = times[0]
    served.end = times[-1]
    served.output += len(timeline.token_times)
    served.gaps = np.diff(times).astype(np.float32)
