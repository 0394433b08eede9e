"""Two engines as one `EngineClient`: one computes prompts, the other writes the answers. Torch-free.

    submit ─▶ prefill engine: prompt and first token ── blocks, over a transport ──▶ decode engine: the rest ─▶ events

The caller sees one answer for each request, with the tokens that one engine alone would have written. A failure on the
way costs time and no answer: if blocks do not come, the decode engine computes them; if an engine is lost, the other
one goes on after what was written. An answer ends with an error only where no engine is left.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

import msgspec

from twostroke.cluster.flight import Flight, has_full_block
from twostroke.cluster.handover import Handover
from twostroke.cluster.holder import LEASE_SECONDS, Holder, Offer
from twostroke.cluster.side import Side
from twostroke.cluster.transport import Transport
from twostroke.config import Resolved
from twostroke.errors import ConfigError
from twostroke.metrics.counts import Counts
from twostroke.metrics.steplog import Step
from twostroke.remote.client import BlockClient, EngineError, EngineListener
from twostroke.remote.messages import Ready, Report
from twostroke.types import Event, FinishReason, Request

log = logging.getLogger(__name__)
TRANSFER_SECONDS = 10.0
GONE = "no engine is left to write this answer"
NAMED_BY = (
    "kv_dtype",
    "dtype",
    "quantize",
    "exact",
    "device",
    "draft_model",
)  # settings that names of blocks depend on


class Pair:
    """An `EngineClient`. Everything here runs on one event loop."""

    def __init__(
        self,
        prefill: BlockClient,
        decode: BlockClient,
        transport: Transport,
        *,
        lease: float = LEASE_SECONDS,
        transfer_seconds: float = TRANSFER_SECONDS,
        elsewhere: Callable[[Request], bool] = has_full_block,
    ):
        """Both engines must have been given the same block key. lease: seconds for which the prefill engine keeps
        blocks without a sign of the decode side. transfer_seconds: the deadline of each transfer. elsewhere: whether
        the prefill engine computes a prompt; else the decode engine does."""
        self.prefill, self.decode = Side(self, prefill), Side(self, decode)
        self.holder = Holder(prefill, transport, lease)
        self.handover = Handover(decode, transport)
        self.transfer_seconds = transfer_seconds
        self.elsewhere = elsewhere
        self.settings: dict[str, Any] = decode.settings
        self.ready: Ready | None = None
        self.restarts = 0  # times that both engines were gone
        self.resumed = 0  # requests that another engine went on with when theirs was lost
        self.listener: EngineListener
        self.flights: dict[int, Flight] = {}  # by request id
        self._moves: dict[int, asyncio.Task[None]] = {}
        self._same_prompt: WeakValueDictionary[tuple[bytes, tuple[int, ...]], asyncio.Lock] = WeakValueDictionary()

    # ---- life ------------------------------------------------------------------------------------------------------

    async def start(self, listener: EngineListener) -> Ready:
        self.listener = listener
        starting = [asyncio.ensure_future(side.engine.start(side)) for side in (self.prefill, self.decode)]
        try:
            first, second = await asyncio.gather(*starting)
            check_names(first, second)
            await self.holder.start()
        except BaseException:
            for task in starting:
                task.cancel()
            await self.stop(2.0)
            raise
        self.ready = self._joined(second)
        listener.on_ready(self.ready)
        return self.ready

    async def stop(self, seconds: float) -> None:
        moves = list(self._moves.values())
        for task in moves:
            task.cancel()
        await asyncio.gather(*moves, return_exceptions=True)
        await self.holder.stop()
        await asyncio.gather(*(side.engine.stop(seconds) for side in (self.prefill, self.decode)))

    def _joined(self, ready: Ready) -> Ready:
        return msgspec.structs.replace(ready, settings=self._shorter(ready.settings))

    def _shorter(self, settings: Resolved) -> Resolved:
        """Requests must fit both engines."""
        lengths = [
            side.engine.ready.settings.max_model_len for side in (self.prefill, self.decode) if side.engine.ready
        ]
        return replace(settings, max_model_len=min(lengths))

    # ---- orders ----------------------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[Request]) -> None:
        apart: list[Request] = []
        together: list[Flight] = []
        for request in requests:
            flight = self.flights[request.id] = Flight(request)
            if self.prefill.engine.healthy and self.decode.engine.healthy and self.elsewhere(request):
                flight.engine, flight.lends = self.prefill, True
                apart.append(flight.prompt_only())
            else:
                together.append(flight)
        if apart:
            self.prefill.engine.submit(apart)
        for flight in together:
            self._go_on(flight)

    def _go_on(self, flight: Flight, but: Side | None = None) -> None:
        """The decode engine computes what is missing and writes the rest; where it is gone, the other one does. but: an
        engine that is not to be asked."""
        if self.flights.get(flight.request.id) is not flight:
            return  # it has ended with all engines
        sides = [side for side in (self.decode, self.prefill) if side is not but and side.up]
        if flight.aborted or not sides:
            reason, error = (FinishReason.ABORT, None) if flight.aborted else (FinishReason.ERROR, GONE)
            del self.flights[flight.request.id]
            self._emit([flight.ended(reason, time.monotonic(), error)])
            return
        flight.engine = sides[0]
        sides[0].engine.submit([flight.rest()])

    def abort(self, request_ids: Sequence[int]) -> None:
        for number in request_ids:
            flight = self.flights.get(number)
            if flight is None:
                continue
            flight.aborted = True
            if number in self._moves:
                self._moves[number].cancel()
            elif isinstance(flight.engine, Side):
                flight.engine.engine.abort([number])

    # ---- events ----------------------------------------------------------------------------------------------------

    def on_report(self, side: Side, report: Report) -> None:
        events = []
        for event in report.events:
            flight = self.flights.get(event.request_id)
            if flight is not None and flight.engine is side:
                events += self._translate(flight, event)
            elif event.finish_reason is not None and side is self.prefill:
                self.prefill.engine.take_back([event.request_id])
        self._emit(events, report.at)

    def _translate(self, flight: Flight, event: Event) -> list[Event]:
        """As the caller is to see it; what begins the move to another engine is not the end for the caller."""
        lends, reason = flight.lends, event.finish_reason
        seen = flight.take(event)
        if reason is None:
            return [seen]
        if lends and reason is FinishReason.ERROR:
            log.warning("request %d failed where its prompt was computed: %s", event.request_id, event.error)
            self.handover.counts.failed["prefill"] += 1
            flight.leave()
            self._go_on(flight, but=self.prefill)
            return []
        if lends and reason is FinishReason.LENGTH and flight.continues and not flight.aborted:
            flight.leave()
            self._begin_move(flight)
            facts = None if seen.facts is None else seen.facts._replace(end=None)
            return [seen._replace(finish_reason=None, facts=facts)]
        if lends:
            self.prefill.engine.take_back([event.request_id])
            if flight.aborted and flight.continues and reason is FinishReason.LENGTH:
                seen = seen._replace(finish_reason=FinishReason.ABORT)
        del self.flights[event.request_id]
        return [seen]

    def _emit(self, events: Sequence[Event], at: float | None = None) -> None:
        counts = [side.counts for side in (self.prefill, self.decode)]
        total = Counts(*map(sum, zip(*counts, strict=True)))
        seconds = self.prefill.step_seconds + self.decode.step_seconds
        self.listener.on_report(Report(time.monotonic() if at is None else at, tuple(events), total, seconds))

    # ---- from one engine to the other ------------------------------------------------------------------------------

    def _begin_move(self, flight: Flight) -> None:
        number = flight.request.id
        offer = self.holder.offer(number, self.transfer_seconds)
        flight.engine = self.decode  # whose events may come before the transfer's last step has returned
        task = self._moves[number] = asyncio.get_running_loop().create_task(self._move(flight, offer))
        task.add_done_callback(lambda _: self._moved(flight, offer, task))

    async def _move(self, flight: Flight, offer: Offer) -> None:
        """The samples of one prompt move one after the other: the first brings the blocks for all."""
        request, losses = flight.request, self.decode.losses
        lock = self._same_prompt.setdefault((request.salt, request.tokens), asyncio.Lock())
        taken, lost = False, None
        try:
            async with lock:
                taken = await self.handover.run(offer, flight.rest(), len(request.tokens))
        except EngineError as error:
            log.warning("request %d lost the engine that was to take it: %s", request.id, error)
            self.decode.engine.abort([request.id])  # should it live, and have it after all
            lost = self.decode
        del self._moves[request.id]
        if self.decode.losses != losses:  # it was lost meanwhile, with this request
            self.resumed += 1
            flight.leave()
            self._go_on(flight)
        elif not taken:
            flight.engine = None
            self._go_on(flight, but=lost)

    def _moved(self, flight: Flight, offer: Offer, task: asyncio.Task[None]) -> None:
        """The transfer has ended, perhaps because `abort` or `stop` cancelled it. The decode engine may have the
        request by now."""
        number = flight.request.id
        self.holder.end(offer.ticket, False)  # nothing, if it has ended
        if not task.cancelled():
            task.result()  # an error of ours
            return
        self._moves.pop(number, None)
        if self.flights.get(number) is flight:
            self.decode.engine.abort([number])
            del self.flights[number]
            self._emit([flight.ended(FinishReason.ABORT, time.monotonic())])

    # ---- an engine is lost or comes back ---------------------------------------------------------------------------

    def on_lost(self, side: Side, why: str) -> None:
        if side is self.prefill:
            self.holder.engine_lost()
        if not (self.prefill.up or self.decode.up):
            self.restarts += 1
            self.flights.clear()
            self.listener.on_lost(why)
            return
        for number, flight in list(self.flights.items()):
            if flight.engine is side and number not in self._moves:
                flight.leave()
                self.resumed += 1
                self._go_on(flight, but=side)

    def on_ready(self, side: Side, ready: Ready) -> None:
        if self.ready is None:
            return  # `start` waits for both
        if side is self.decode:
            self.ready = self._joined(ready)
        if not (self.prefill.up and self.decode.up):  # it is the first one again
            self.listener.on_ready(self.ready)

    def on_settings(self, side: Side, settings: Resolved) -> None:
        if side is self.decode:
            self.listener.on_settings(self._shorter(settings))

    # ---- questions -------------------------------------------------------------------------------------------------

    @property
    def changed(self) -> dict[str, Any]:
        return self.decode.engine.changed

    async def change(self, wanted: dict[str, Any]) -> None:
        """For both engines, or for none."""
        ready = self.prefill.engine.ready
        before = {name: getattr(ready.settings, name, None) for name in wanted} if ready is not None else {}
        before |= {name: value for name, value in self.prefill.engine.changed.items() if name in wanted}
        await self.prefill.engine.change(wanted)
        try:
            await self.decode.engine.change(wanted)
        except ConfigError:
            await self.prefill.engine.change(before)
            raise

    async def steps(self, since: int, limit: int) -> tuple[Step, ...]:
        """Of the decode engine."""
        return await self.decode.engine.steps(since, limit)

    @property
    def healthy(self) -> bool:
        """One engine is enough to serve."""
        return self.prefill.engine.healthy or self.decode.engine.healthy

    def trouble(self) -> str | None:
        said = {"prefill": self.prefill.engine.trouble(), "decode": self.decode.engine.trouble()}
        return "; ".join(f"{name}: {why}" for name, why in said.items() if why) or None


def check_names(prefill: Ready, decode: Ready) -> None:
    """ConfigError: the engines would not find each other's blocks."""
    if prefill.names == decode.names:
        return
    pairs = [(name, getattr(prefill.settings, name), getattr(decode.settings, name)) for name in NAMED_BY]
    differing = [f"{name} is {one} for prefill and {other} for decode" for name, one, other in pairs if one != other]
    why = "; ".join(differing) or "they have other weights or another block key"
    raise ConfigError(f"the two engines do not give equal names to equal KV blocks: {why}. Start them alike.")
