"""One request moves from the engine that computed its prompt to the engine that writes its answer. Torch-free.

    offer ─▶ connect ─▶ the receiving engine makes room and names what it lacks ─▶ fetch ─▶ it goes on

Whatever goes wrong on the way (the holder dies, bytes are damaged, the time is over), the receiving engine computes
what it lacks itself and writes the same tokens. The transfer's end gives the blocks back in every case.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from dataclasses import dataclass, field

from twostroke.cluster.holder import Offer
from twostroke.cluster.transport import Incoming, TransferError, Transport
from twostroke.kv.addresses import Name
from twostroke.remote.client import BlockClient
from twostroke.types import Request

log = logging.getLogger(__name__)
ROOM_SECONDS = 0.02  # between two tries to find room for a request


@dataclass(slots=True)
class HandoverCounts:
    """Since the start."""

    done: int = 0  # requests that went on after blocks from elsewhere, or found all of them
    blocks: int = 0  # fetched and used
    bytes: int = 0
    seconds: float = 0.0  # of all handovers that were done
    failed: Counter[str] = field(default_factory=Counter)  # that computed their prompt again, by reason


class Handover:
    """Moves requests to one engine."""

    def __init__(self, receiver: BlockClient, transport: Transport):
        self.receiver = receiver
        self.transport = transport
        self.counts = HandoverCounts()

    async def run(self, offer: Offer, request: Request, tokens: int) -> bool:
        """A request goes on at the receiver; its first `tokens` tokens were computed where the offer comes from. False:
        the receiver did not take it, as it had no room in time or the transfer could not begin. EngineError: the
        receiver is gone or does not answer; it may have the request, and has to be told to abort it. However else this
        ends, no request is left there that waits for blocks."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        taken: list[tuple[Name, ...]] = []  # the blocks that it waits for, once it is taken
        complete = False
        incoming: Incoming | None = None
        try:
            async with asyncio.timeout(offer.seconds):
                incoming = await self.transport.connect(offer.address, offer.ticket)
                await self._take(request, tokens, incoming, offer.lease / 3, taken)
                complete = await self._fetch(request, taken[0], incoming) if taken[0] else True
                self.counts.done += complete
                self.counts.seconds += complete * (loop.time() - began)
        except TimeoutError:
            self._fail(request, "deadline")
        except TransferError as error:
            self._fail(request, "transfer", error)
        finally:
            try:
                if taken and taken[0] and not complete:
                    await self.receiver.arrive(request.id, None)  # it computes them; nothing, if it waits for none
            finally:
                if incoming is not None:
                    await incoming.close(complete)
        return bool(taken)

    async def _take(
        self, request: Request, tokens: int, incoming: Incoming, every: float, taken: list[tuple[Name, ...]]
    ) -> None:
        """Until the receiver has room for it. The lease is renewed meanwhile."""
        loop = asyncio.get_running_loop()
        renewed = loop.time()
        while not taken:
            asking = asyncio.ensure_future(self.receiver.expect(request, tokens))
            try:
                wanted = await asyncio.shield(asking)
            except asyncio.CancelledError:  # the question was asked: the answer says whether the request was taken
                wanted = await asking
                taken += [] if wanted is None else [wanted]
                raise
            if wanted is not None:
                taken.append(wanted)
                return
            await asyncio.sleep(ROOM_SECONDS)
            if loop.time() - renewed > every:
                await incoming.renew()
                renewed = loop.time()

    async def _fetch(self, request: Request, wanted: tuple[Name, ...], incoming: Incoming) -> bool:
        ready = self.receiver.ready
        assert ready is not None, "an engine that expects blocks has said that it is ready"
        blocks = await incoming.fetch(wanted, ready.settings.layout.block_bytes)
        with blocks.segment:
            # From here on the bytes are on this machine: the answer is awaited even if the time is over.
            arriving = asyncio.ensure_future(self.receiver.arrive(request.id, blocks.payload()))
            try:
                complete = await asyncio.shield(arriving)
            except asyncio.CancelledError:
                await arriving
                raise
        if complete:
            self.counts.blocks += len(blocks.found)
            self.counts.bytes += len(blocks.found) * ready.settings.layout.block_bytes
        else:
            self._fail(request, "damaged or missing")
        return bool(complete)

    def _fail(self, request: Request, reason: str, error: Exception | None = None) -> None:
        self.counts.failed[reason] += 1
        log.warning("request %d is computed again: %s", request.id, error or reason)
