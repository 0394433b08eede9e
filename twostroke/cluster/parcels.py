"""Blocks that travel before their request does. Torch-free.

    a worker has the beginning of a prompt ── parcel ──▶ the worker that is to compute the prompt: its cache
    prefill worker: a step has filled some blocks ── parcel ──▶ the worker that is to write the answer: its cache

What comes late or not at all is fetched or computed with the request itself.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from typing import TYPE_CHECKING

from twostroke.cluster.handover import HandoverCounts
from twostroke.cluster.holder import Parcel
from twostroke.ops.interface import BLOCK
from twostroke.remote.client import EngineError
from twostroke.types import Request

if TYPE_CHECKING:
    from twostroke.cluster.flight import Flight
    from twostroke.cluster.journal import Journal
    from twostroke.cluster.member import LinkSpeed, Member
    from twostroke.cluster.router import Route

log = logging.getLogger(__name__)


class Parcels:
    def __init__(self, counts: HandoverCounts, link: LinkSpeed, prefix_link: LinkSpeed, journal: Journal):
        self.counts = counts
        self.journal = journal
        self.link = link
        self.prefix_link = prefix_link
        self._tasks: set[asyncio.Task[None]] = set()

    def bring(self, flight: Flight, source: Member, to: Member, route: Route) -> None:
        """Blocks of its prompt that `source` has go to the worker that is to compute it."""
        first, last = route.cached * BLOCK, (route.cached + route.fetched) * BLOCK
        seconds = patience(flight.request, (last - first) * to.speed.token, (flight.length - first) * to.speed.token)
        flight.bringing = self._keep(self._bring(flight.request, source, to, first, last, seconds))

    async def _bring(self, request: Request, source: Member, to: Member, first: int, last: int, seconds: float) -> None:
        parcel = None
        try:
            async with asyncio.timeout(seconds):
                parcel = await source.worker.look_up(request.tokens[:last], request.salt, first)
                began = time.monotonic()  # the step that the source was in is not the transfer's time
                if parcel is not None:
                    moved = await to.worker.collect(request.tokens[: parcel.tokens], request.salt, parcel)
                    self.counts.shared += moved.blocks
                    if moved.bytes:
                        self.journal.add("shared", request.id, source.name, to.name, moved)
                        self.prefix_link.learn(moved.bytes, time.monotonic() - began)
        except (EngineError, TimeoutError) as error:
            log.info("the beginning of request %d was not fetched: %s", request.id, error or "it took too long")
        finally:
            if parcel is not None:
                source.worker.release([parcel.number])

    def send(self, flight: Flight, source: Member, writer: Member, parcel: Parcel) -> None:
        """One after the other: each follows what is there."""
        work = self._send(flight, source, writer, parcel, flight.sending)
        task = flight.sending = self._keep(work)
        task.add_done_callback(lambda _: source.worker.release([parcel.number]))  # nothing, if the lease has ended

    async def _send(
        self, flight: Flight, source: Member, writer: Member, parcel: Parcel, before: asyncio.Task[None] | None
    ) -> None:
        if before is not None:
            await asyncio.wait([before])
        request = flight.request
        try:
            moved = await writer.worker.collect(request.tokens[: parcel.tokens], request.salt, parcel)
        except EngineError as error:
            log.info("blocks of request %d did not come while it was computed: %s", request.id, error)
            return
        self.counts.add_early(moved)
        if moved.bytes:
            self.journal.add("early", request.id, source.name, writer.name, moved)
            self.link.learn(moved.bytes, moved.seconds)

    def _keep(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def stop(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def patience(request: Request, fetched: float, alone: float) -> float:
    """Seconds that a fetch may take: as long as to compute these blocks. Less where the deadline of the request's first
    token then leaves just the time to compute them after all. fetched: seconds to compute these blocks, alone: all that
    the worker lacks."""
    due = request.params.deadline
    if due is None:
        return fetched
    left = request.arrival + due - time.monotonic() - alone
    return min(fetched, left) if left > 0 else fetched  # it can only be kept, if at all, with these blocks
