"""A worker: an engine that gives its KV blocks to other workers and takes theirs. Torch-free.

    requests ─▶ engine ─▶ events        a prompt for another worker is computed: its blocks are offered (holder.py)
    an offer ─▶ handover ─▶ engine      a request comes from another worker, and its blocks with it (handover.py)

`WorkerClient` is the protocol. `Worker` is one in this process; agent.py runs it on its machine, and there
`RemoteWorker` (remote_worker.py) stands for it in the router's process.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from twostroke.cluster.handover import Handover, Moved
from twostroke.cluster.holder import LEASE_SECONDS, Copy, Holder, InPool, Offer, Parcel
from twostroke.cluster.transport import Transport
from twostroke.config import Resolved
from twostroke.kv.addresses import Name
from twostroke.kv.lending import copied_out
from twostroke.metrics.steplog import Step
from twostroke.remote.client import BlockClient, EngineClient, EngineListener
from twostroke.remote.messages import BlockData, Located, Part, Ready, Report, Stage
from twostroke.remote.segment import Segment
from twostroke.types import FinishReason, Request

log = logging.getLogger(__name__)
TRANSFER_SECONDS = 10.0


class Held(NamedTuple):
    """What a worker keeps for others."""

    leases: int = 0  # transfers that have not ended
    taking: int = 0  # requests that are on their way to it


class WorkerListener(EngineListener, Protocol):
    def on_parcel(self, request_id: int, parcel: Parcel) -> None:
        """Blocks of a request with `lend` that is still computed. `collect` them elsewhere, or `release` them."""

    def on_offer(self, request_id: int, offer: Offer) -> None:
        """The blocks of a request with `lend`. It comes before the event that ends the request."""


class WorkerClient(EngineClient, Protocol):
    """A worker, here or elsewhere."""

    @property
    def held(self) -> Held: ...

    async def start(self, listener: WorkerListener) -> Ready:  # type: ignore[override]
        """Start the worker and wait until it is ready."""

    def release(self, lent: Sequence[int]) -> None:
        """The blocks of these requests or parcels are not needed any more."""

    async def look_up(self, tokens: Sequence[int], salt: bytes, first: int) -> Parcel | None:
        """What is cached here of the beginning of a prompt, from token `first` on. `release` it in the end.
        EngineError: the worker is gone or does not answer."""

    async def collect(self, tokens: Sequence[int], salt: bytes, parcel: Parcel) -> Moved:
        """Blocks of the beginning of a prompt, which ends with these tokens, go to the cache here. EngineError: the
        worker is gone or does not answer."""

    async def take(self, request: Request, tokens: int, offer: Offer) -> Moved:
        """A request goes on here, whose first `tokens` tokens another worker has computed and offers. EngineError: the
        worker is gone or does not answer. After that, and where this call is cancelled, `abort` the request: the worker
        may have it."""


class Worker:
    """A `WorkerClient` in this process."""

    def __init__(
        self,
        engine: BlockClient,
        transport: Transport,
        *,
        lease: float = LEASE_SECONDS,
        transfer_seconds: float = TRANSFER_SECONDS,
    ):
        """lease: seconds for which blocks are kept without a sign of the other side. transfer_seconds: the deadline of
        each transfer."""
        self.engine = engine
        self.holder = Holder(engine, transport, lease)
        self.handover = Handover(engine, transport)
        self.transfer_seconds = transfer_seconds
        self.settings: dict[str, Any] = engine.settings
        self.listener: WorkerListener
        engine.on_part = self._on_part
        self._lending: set[int] = set()  # requests whose blocks are to be offered
        self._copied: set[int] = set()  # those of which the engine copies out what it computes, to the end
        self._taking: dict[int, asyncio.Task[Moved]] = {}  # by request id

    # ---- life ------------------------------------------------------------------------------------------------------

    async def start(self, listener: WorkerListener) -> Ready:
        self.listener = listener
        await self.holder.start()
        return await self.engine.start(self)

    async def stop(self, seconds: float) -> None:
        taking = list(self._taking.values())
        for task in taking:
            task.cancel()
        await asyncio.gather(*taking, return_exceptions=True)
        await self.holder.stop()
        await self.engine.stop(seconds)

    # ---- orders ----------------------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[Request]) -> None:
        self._lending.update(request.id for request in requests if request.lend >= 0)
        self._copied.update(request.id for request in requests if copied_out(request))
        self.engine.submit(requests)

    def abort(self, request_ids: Sequence[int]) -> None:
        here = []
        for number in request_ids:
            taking = self._taking.get(number)
            if taking is None:
                here.append(number)
            else:  # it first learns whether the engine has the request
                taking.add_done_callback(lambda _, number=number: self.engine.abort([number]))  # type: ignore[misc]
                taking.cancel()
        if here:
            self.engine.abort(here)

    def release(self, lent: Sequence[int]) -> None:
        for number in lent:
            self.holder.withdraw(number)

    async def look_up(self, tokens: Sequence[int], salt: bytes, first: int) -> Parcel | None:
        found = await self.engine.look_up(tokens, salt, first)
        copy = None if found.payload is None else self._open(found.names, found.payload)
        return None if copy is None else self.holder.parcel(found.tokens, copy, self.transfer_seconds)

    async def collect(self, tokens: Sequence[int], salt: bytes, parcel: Parcel) -> Moved:
        return await self.handover.collect(tokens, salt, parcel)

    async def take(self, request: Request, tokens: int, offer: Offer) -> Moved:
        task = self._taking[request.id] = asyncio.ensure_future(self.handover.run(offer, request, tokens))
        task.add_done_callback(lambda _: self._taking.pop(request.id, None))
        return await task

    # ---- what the engine says --------------------------------------------------------------------------------------

    def on_stage(self, stage: Stage) -> None:
        self.listener.on_stage(stage)

    def on_ready(self, ready: Ready) -> None:
        self.listener.on_ready(ready)

    def on_settings(self, settings: Resolved) -> None:
        self.listener.on_settings(settings)

    def on_report(self, report: Report) -> None:
        for event in report.events if self._lending else ():
            if event.finish_reason is not None and event.request_id in self._lending:
                self._lending.discard(event.request_id)
                if event.finish_reason is FinishReason.LENGTH:
                    offer = self.holder.offer(event.request_id, self.transfer_seconds, event.request_id in self._copied)
                    self.listener.on_offer(event.request_id, offer)
                else:
                    self.engine.take_back([event.request_id])
                self._copied.discard(event.request_id)
        self.listener.on_report(report)

    def _open(self, names: tuple[Name, ...], payload: BlockData) -> Copy | InPool | None:
        """Blocks that the engine has copied out, or keeps for others to read."""
        if isinstance(payload, Located):
            return InPool(names, payload)
        try:
            return Copy(names, Segment.open(payload.path, payload.size), payload.checksum)
        except OSError as error:
            log.warning("blocks cannot be offered: %s", error)
            return None
        finally:
            self.engine.opened(payload.path)

    def _on_part(self, part: Part) -> None:
        copy = None if part.payload is None else self._open(part.names, part.payload)
        if part.last or part.lent not in self._lending:
            self.holder.keep(part.lent, copy)
        elif copy is not None:
            self.listener.on_parcel(part.lent, self.holder.parcel(part.tokens, copy, self.transfer_seconds))

    def on_lost(self, why: str) -> None:
        self._lending.clear()
        self._copied.clear()
        self.holder.engine_lost()
        self.listener.on_lost(why)

    # ---- questions -------------------------------------------------------------------------------------------------

    @property
    def held(self) -> Held:
        return Held(len(self.holder.leases), len(self._taking))

    @property
    def ready(self) -> Ready | None:
        return self.engine.ready

    @property
    def restarts(self) -> int:
        return self.engine.restarts

    @property
    def changed(self) -> dict[str, Any]:
        return self.engine.changed

    async def change(self, wanted: dict[str, Any]) -> None:
        await self.engine.change(wanted)

    async def steps(self, since: int, limit: int) -> tuple[Step, ...]:
        return await self.engine.steps(since, limit)

    @property
    def healthy(self) -> bool:
        return self.engine.healthy

    def trouble(self) -> str | None:
        return self.engine.trouble()
