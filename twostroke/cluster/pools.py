"""Several workers as one `EngineClient`: a router sends each request to one, or to two that share it. Torch-free.

    submit ─▶ router ─▶ a worker that does both: prompt and answer ─▶ events
                    └─▶ prefill worker: prompt and first token ── offer ──▶ decode worker: blocks, the rest ─▶ events

The caller sees one answer for each request, with the tokens that one engine alone would have written (but see mixed.py,
where workers compute in different ways). A failure on the way costs time and no answer: if blocks do not
come, the decode worker computes them; if a worker is lost or silent, another one goes on after what was written. An
answer ends with an error only where no worker is left, or where its workers were lost again and again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from twostroke.cluster.flight import Flight
from twostroke.cluster.group import Group, check_names
from twostroke.cluster.handover import HandoverCounts, Moved
from twostroke.cluster.holder import Offer, Parcel
from twostroke.cluster.journal import Journal
from twostroke.cluster.member import LinkSpeed, Member
from twostroke.cluster.parcels import Parcels
from twostroke.cluster.router import Link, Role, Router
from twostroke.cluster.totals import Totals
from twostroke.cluster.worker import WorkerClient
from twostroke.engine.intake import RequestIds
from twostroke.kv.addresses import QuickNames
from twostroke.ops.interface import BLOCK
from twostroke.remote.client import EngineError, EngineListener
from twostroke.remote.messages import Ready, Report, Stage
from twostroke.types import Event, FinishReason, Request

log = logging.getLogger(__name__)
GONE = "no worker is left to write this answer"
TOO_OFTEN = "the workers that wrote this answer were lost again and again"
NO_RETRY = "the worker that wrote this answer was lost, and the request says retry=false"
MOST_RESUMED = 3  # times that an answer goes on elsewhere: a request that ends its workers shall not end all of them
LOOK_SECONDS = 0.25  # between two looks for workers that do not answer
PREFILL = "prefill"  # why a prompt is computed again: its worker failed
LINK = Link(1e9, 0.005)  # between workers, until transfers were measured


class PlacedWorker(NamedTuple):
    """A worker, and its role in the deployment."""

    role: Role
    worker: WorkerClient


class Pools(Group):
    """An `EngineClient`. Everything here runs on one event loop."""

    def __init__(self, workers: Mapping[str, PlacedWorker], *, apart: bool = False, ttft: float | None = None):
        """workers: by name. All workers have been given the same block key. apart: prefill workers compute every prompt
        that has a full block; else the router decides by the expected time. ttft: seconds within which first tokens
        are due, where a request does not say it."""
        self.members = {name: Member(self, name, *placed) for name, placed in workers.items()}
        self.apart, self.ttft = apart, ttft
        self.router: Router
        self.link = LinkSpeed(LINK)
        self.counts = HandoverCounts()
        self.prefix_link = LinkSpeed(LINK)  # for what is cached: it waits for the step of the worker that has it
        self.journal = Journal()
        self.parcels = Parcels(self.counts, self.link, self.prefix_link, self.journal)
        self.settings: dict[str, Any] = self._shown.worker.settings
        self.ready: Ready | None = None
        self.restarts = 0  # times that all workers were gone
        self.resumed = 0  # requests that another worker went on with
        self.listener: EngineListener
        self.flights: dict[int, Flight] = {}  # by request id
        self._by_number: dict[int, Flight] = {}  # by the id that its worker knows
        self._numbers = RequestIds()
        self._names = QuickNames("router")  # the router's own: they never leave it
        self._stale = dict.fromkeys(self.members.values())  # workers of which the router knows less than is known here
        self._totals = Totals()
        self._moves: dict[int, asyncio.Task[None]] = {}
        self._same_prompt: WeakValueDictionary[tuple[str, bytes, tuple[int, ...]], asyncio.Lock] = WeakValueDictionary()
        self._watching: asyncio.Task[None] | None = None

    # ---- life ------------------------------------------------------------------------------------------------------

    async def start(self, listener: EngineListener) -> Ready:
        self.listener = listener
        starting = [asyncio.ensure_future(member.worker.start(member)) for member in self.members.values()]
        try:
            ready = await asyncio.gather(*starting)
            check_names(dict(zip(self.members, ready, strict=True)))
        except BaseException:
            for task in starting:
                task.cancel()
            await self.stop(2.0)
            raise
        settings = ready[0].settings
        layout = settings.layout
        whole = not layout.state_bytes and all(group.window is None for group in layout.groups)
        self.router = Router(settings.exchanged_bytes, self.link.link, self.prefix_link.link if whole else None)
        self._watching = asyncio.get_running_loop().create_task(self._watch())
        self.ready = self._joined()
        listener.on_ready(self.ready)
        return self.ready

    async def stop(self, seconds: float) -> None:
        tasks = [*self._moves.values(), *([self._watching] if self._watching is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.parcels.stop()
        await asyncio.gather(*(member.worker.stop(seconds) for member in self.members.values()))

    # ---- orders ----------------------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[Request]) -> None:
        """Samples of one prompt take one way."""
        before: Flight | None = None
        orders: dict[Member, list[Request]] = {}
        for request in requests:
            flight = self.flights[request.id] = self._by_number[request.id] = Flight(request, request.id)
            same = before is not None and before.request.tokens is request.tokens and before.member is not None
            order = self._send(flight, before if same else None)
            if order is not None and not self._waits(flight, *order):
                orders.setdefault(order[0], []).append(order[1])
            before = flight
        for member, many in orders.items():
            member.worker.submit(many)

    def _send(
        self, flight: Flight, like: Flight | None = None, but: Member | None = None
    ) -> tuple[Member, Request] | None:
        """Choose its way; what its first worker is asked, or None where it has ended. like: a sample of the same
        prompt. but: a worker that is not to be asked."""
        if self.flights.get(flight.request.id) is not flight:
            return None  # it has ended with all workers
        if flight.aborted:
            self._end(flight, FinishReason.ABORT)
            return None
        if like is not None:
            first, writer, tokens = like.member, like.writer, 1
            flight.had, flight.bringing = like.had, like.bringing
        else:
            first, writer, tokens = self._route(flight, but)
        if first is None or writer is None:
            self._end(flight, FinishReason.ERROR, GONE)
            return None
        flight.lends = first is not writer
        self._place(flight, first, writer, tokens)
        return first, flight.prompt_only() if flight.lends else flight.rest()

    def _route(self, flight: Flight, but: Member | None) -> tuple[Member | None, Member | None, int]:
        """The worker that has it first, the one that writes the answer, and the tokens to compute. An answer that is
        begun is not moved between two workers again."""
        flight.bringing, ask = None, flight.ask(self._names, self.ttft)
        self.router.link = self.link.link
        if self.router.prefix_link is not None:
            self.router.prefix_link = self.prefix_link.link
        while True:
            self._tell_router()
            route = self.router.choose(ask, self.apart, None if but is None else but.name)
            if route is None:
                break
            first, writer = self.members[route.prefill], self.members[route.decode]
            self._stale |= {first: None, writer: None}  # the router has counted the request: `_place` does
            if first.usable and writer.usable:
                flight.had = len(ask.names) - route.sent if writer.caches else len(ask.names)
                if route.fetched:
                    self.parcels.bring(flight, self.members[route.source], first, route)
                return first, writer, max(1, flight.length - (route.cached + route.fetched) * BLOCK)
        # No writer is there: a prefill worker has the same model, and one that is late may yet answer.
        others = [one for one in self.members.values() if one is not but]
        up = [one for one in others if one.usable] or [one for one in others if one.up]
        least = min(up, key=lambda one: one.queued + one.streams, default=None)
        return least, least, flight.length

    def _waits(self, flight: Flight, member: Member, request: Request) -> bool:
        """Whether its worker gets it later, after a part of its prompt."""
        if flight.bringing is None or flight.bringing.done():
            return False
        flight.bringing.add_done_callback(lambda _: self._begin(flight, member, request))
        return True

    def _begin(self, flight: Flight, member: Member, request: Request) -> None:
        if self._by_number.get(request.id) is not flight or flight.member is not member:
            return  # it has ended, or goes on elsewhere
        if flight.aborted:
            self._end(flight, FinishReason.ABORT)
        else:
            member.worker.submit([request])

    def change_role(self, name: str, role: Role) -> None:
        super().change_role(name, role)
        self._stale[self.members[name]] = None

    def _tell_router(self) -> None:
        """How the workers stand that have changed since it was last told."""
        for member in self._stale:
            if member.usable:
                self.router.update(member.name, member.role, member.load())
            else:
                self.router.pause(member.name)
        self._stale.clear()

    def _place(self, flight: Flight, member: Member | None, writer: Member | None, tokens: int = 0) -> None:
        """Which worker has it, which one writes, and what is to be computed first: the loads follow."""
        touched = (flight.member, flight.writer, member, writer)
        self._stale.update((one, None) for one in touched if one is not None)
        if flight.member is not None:
            flight.member.queued -= flight.queued
        if flight.writer is not None:
            flight.writer.streams -= 1
        flight.member, flight.writer, flight.queued = member, writer, tokens if member is not None else 0
        if member is not None:
            member.queued += tokens
        if writer is not None:
            writer.streams += 1

    def _go_on(self, flight: Flight, but: Member | None = None) -> None:
        """A worker computes what is missing and writes the rest."""
        flight.settle()
        flight.offer = flight.sending = None
        self._place(flight, None, None)
        if flight.request.id in self.flights:  # what a worker may yet say of it under the old number is not heard
            del self._by_number[flight.number]
            flight.number = self._numbers.take(1)
            self._by_number[flight.number] = flight
        order = self._send(flight, but=but)
        if order is not None and not self._waits(flight, *order):
            order[0].worker.submit([order[1]])

    def _resume(self, flight: Flight, lost: Member) -> None:
        self.resumed += 1
        flight.resumed += 1
        if flight.resumed > MOST_RESUMED or (flight.written and not flight.request.params.retry):
            self._end(flight, FinishReason.ERROR, TOO_OFTEN if flight.request.params.retry else NO_RETRY)
        else:
            self._go_on(flight, but=lost)

    def _end(self, flight: Flight, reason: FinishReason, error: str | None = None) -> None:
        """It ends here, and no worker has it."""
        self._forget(flight)
        self._emit([flight.ended(reason, time.monotonic(), error)])

    def _forget(self, flight: Flight) -> None:
        self.flights.pop(flight.request.id, None)
        self._by_number.pop(flight.number, None)
        self._place(flight, None, None)

    def abort(self, request_ids: Sequence[int]) -> None:
        for number in request_ids:
            flight = self.flights.get(number)
            if flight is None:
                continue
            flight.aborted = True
            if number in self._moves:
                self._moves[number].cancel()
            elif flight.bringing is not None and not flight.bringing.done():
                flight.bringing.cancel()  # then it ends, and samples beside it begin
            elif flight.member is not None:
                flight.member.worker.abort([flight.number])

    # ---- events ----------------------------------------------------------------------------------------------------

    def on_stage(self, member: Member, stage: Stage) -> None:
        self.listener.on_stage(stage)

    def on_parcel(self, member: Member, request_id: int, parcel: Parcel) -> None:
        flight = self._by_number.get(request_id)
        writer = None if flight is None or flight.member is not member or flight.aborted else flight.writer
        if flight is not None and flight.lends and writer is not None and writer.usable:
            self.parcels.send(flight, member, writer, parcel)
        else:
            member.worker.release([parcel.number])

    def on_offer(self, member: Member, request_id: int, offer: Offer) -> None:
        flight = self._by_number.get(request_id)
        if flight is not None and flight.member is member and flight.lends:
            flight.offer = offer
        else:
            member.worker.release([request_id])

    def on_report(self, member: Member, report: Report) -> None:
        self._stale[member] = None
        events = []
        for event in report.events:
            flight = self._by_number.get(event.request_id)
            if flight is not None and flight.member is member:
                events += self._translate(flight, member, event, report.at)
        self._emit(events, report.at)

    def _translate(self, flight: Flight, member: Member, event: Event, at: float) -> list[Event]:
        """The event as the caller is to see it. What begins the move to another worker is not the end for the
        caller."""
        lends, reason = flight.lends, event.finish_reason
        if event.token_ids and flight.queued:
            member.queued -= flight.queued
            flight.queued = 0
        if flight.moving and flight.runs is None and event.facts is not None:
            flight.count_move(runs=event.facts.scheduled)
        seen = flight.take(event)
        if reason is None:
            return [seen]
        offer, flight.offer = flight.offer, None
        if lends and reason is FinishReason.ERROR:
            log.warning("request %d failed where its prompt was computed: %s", flight.request.id, event.error)
            self.counts.failed[PREFILL] += 1
            self._go_on(flight, but=member)
            return []
        if lends and reason is FinishReason.LENGTH and flight.continues and not flight.aborted:
            facts = None if seen.facts is None else seen.facts._replace(end=None)
            self._begin_move(flight, member, offer, at)
            return [seen._replace(finish_reason=None, facts=facts)]
        if offer is not None:
            member.worker.release([flight.number])
            seen = seen._replace(finish_reason=FinishReason.ABORT) if flight.aborted and flight.continues else seen
        self._ended(flight, member, at)
        return [seen]

    def _ended(self, flight: Flight, member: Member, at: float) -> None:
        self._forget(flight)
        facts = flight.facts(flight.latest)
        if facts is not None and facts.scheduled is not None:
            member.speed.ended(at - facts.scheduled)
        if member.name in self.router.workers:  # a later turn of a conversation finds the answer there too
            self.router.stored(member.name, flight.names(self._names))

    def _emit(self, events: Sequence[Event], at: float | None = None) -> None:
        counts, seconds = self._totals.of(self.members.values())
        self.listener.on_report(Report(time.monotonic() if at is None else at, tuple(events), counts, seconds))

    # ---- from one worker to another --------------------------------------------------------------------------------

    def _begin_move(self, flight: Flight, source: Member, offer: Offer | None, at: float) -> None:
        number, writer = flight.request.id, flight.writer
        assert offer is not None, "a worker offers the blocks before it says that the prompt is done"
        flight.settle()
        flight.moving = at
        if writer is None or not writer.usable:
            _, writer, _ = self._route(flight, None)
            flight.sending = None  # that went to another worker
        to = writer or source
        self._place(flight, to, to)  # its events may come before the transfer's last step has returned
        task = self._moves[number] = asyncio.get_running_loop().create_task(self._move(flight, source, to, offer))
        lent = flight.number
        task.add_done_callback(lambda _: self._moved(flight, source, to, lent, task))

    async def _move(self, flight: Flight, source: Member, writer: Member, offer: Offer) -> None:
        """The samples of one prompt move one after the other: the first brings the blocks for all."""
        request, losses = flight.request, writer.losses
        offer = offer._replace(fetch=flight.fetch_seconds(writer.speed.token))
        lock = self._same_prompt.setdefault((writer.name, request.salt, request.tokens), asyncio.Lock())
        taken, lost = False, None
        try:
            async with lock:
                if flight.sending is not None:  # what comes early need not come again; no lease is renewed meanwhile
                    await asyncio.wait([flight.sending], timeout=min(offer.lease, offer.seconds) / 2)
                moved = await writer.worker.take(flight.rest(), len(request.tokens), offer)
            taken = moved.taken
            self.journal.add("request", request.id, source.name, writer.name, moved)
            self._count(flight, moved)
        except EngineError as error:
            log.warning("request %d lost the worker that was to take it: %s", request.id, error)
            writer.worker.abort([flight.number])  # should it live, and have it after all
            lost = writer
        del self._moves[request.id]
        if self.flights.get(request.id) is not flight:
            return
        if writer.losses != losses:  # it was lost meanwhile, with this request
            self._resume(flight, writer)
        elif not taken:
            self._go_on(flight, but=lost)

    def _count(self, flight: Flight, moved: Moved) -> None:
        self.counts.add(moved)
        if moved.bytes:
            self.link.learn(moved.bytes, moved.on_way)
        flight.count_move(sent_in=moved.on_way)

    def _moved(self, flight: Flight, source: Member, writer: Member, lent: int, task: asyncio.Task[None]) -> None:
        """The transfer has ended, perhaps because it was cancelled. The worker may have the request by now."""
        source.worker.release([lent])  # nothing, if the lease has ended
        if not task.cancelled():
            task.result()  # an error of ours
            return
        self._moves.pop(flight.request.id, None)
        if self.flights.get(flight.request.id) is not flight:
            return
        writer.worker.abort([lent])
        if flight.diverted and not flight.aborted:
            flight.diverted = False
            self._resume(flight, writer)
        else:
            self._end(flight, FinishReason.ABORT)

    # ---- a worker is silent, lost, or back -------------------------------------------------------------------------

    async def _watch(self) -> None:
        """What a worker has that does not answer goes on elsewhere, if another one is there."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            self._stale.update(dict.fromkeys(self.members.values()))  # one may be late, or back
            silent = [member for member in self.members.values() if member.up and not member.worker.healthy]
            if silent and any(member.usable for member in self.members.values()):
                for flight in [one for one in self.flights.values() if one.member in silent]:
                    self._leave(flight)

    def _leave(self, flight: Flight) -> None:
        number, member = flight.request.id, flight.member
        assert member is not None, "only flights of silent workers leave"
        if number in self._moves:
            flight.diverted = True
            self._moves[number].cancel()
            return
        log.warning("request %d leaves %s, which does not answer", number, member.name)
        member.worker.abort([flight.number])
        self._resume(flight, member)

    def on_lost(self, member: Member, why: str) -> None:
        self._totals.retire(member)
        self._tell_settings()
        if self.ready is None:
            return  # `start` says so
        self.router.lost(member.name)
        if not any(one.up for one in self.members.values()):
            self.restarts += 1
            for flight in list(self.flights.values()):
                self._forget(flight)
            self.listener.on_lost(why)
            return
        for number, flight in list(self.flights.items()):
            if flight.member is member and number not in self._moves:
                self._resume(flight, member)

    def on_ready(self, member: Member, ready: Ready) -> None:
        self._stale[member] = None
        if self.ready is None:
            return  # `start` waits for all
        self.ready = self._joined()
        if sum(one.up for one in self.members.values()) == 1:  # it is the first one again
            self.listener.on_ready(self.ready)
        else:
            self._tell_settings()

    @property
    def moving(self) -> list[Flight]:
        """Requests on their way from one worker to another."""
        return [self.flights[number] for number in self._moves if number in self.flights]
