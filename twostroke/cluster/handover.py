"""One request moves from the engine that computed its prompt to the engine that writes its answer. Torch-free.

    parcels ─▶ connect, fetch ─▶ the receiving engine's cache       while the prompt is computed
    offer ─▶ connect ─▶ the receiving engine makes room and names what it lacks ─▶ fetch ─▶ it goes on

Whatever goes wrong on the way (the holder dies, bytes are damaged, the time is over), the receiving engine computes
what it lacks itself and writes the same tokens. The transfer's end gives the blocks back in every case.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from twostroke.cluster.holder import Offer, Parcel
from twostroke.cluster.transport import Blocks, Incoming, TransferError, Transport
from twostroke.kv.addresses import Name
from twostroke.remote.client import BlockClient
from twostroke.remote.messages import BlockData, Located
from twostroke.types import Request

log = logging.getLogger(__name__)
AVOID_SECONDS = 60.0  # for which blocks of a holder that could not be read from its pool come as bytes
ROOM_SECONDS = 0.02  # between two tries to find room for a request
TRANSFER, DEADLINE, DAMAGED = "transfer", "deadline", "damaged or missing"  # why blocks did not come


class Moved(NamedTuple):
    """How one request moved."""

    taken: bool  # the receiver has it
    blocks: int = 0  # fetched and used
    bytes: int = 0
    seconds: float = 0.0  # until it could go on, or has failed
    waited: float = 0.0  # of these, until the receiver had room for it
    failed: str = ""  # why the receiver computes the prompt itself; empty: it does not

    @property
    def on_way(self) -> float:
        """Seconds that the blocks took, without the wait for room."""
        return self.seconds - self.waited


@dataclass(slots=True)
class HandoverCounts:
    """Since the start."""

    done: int = 0  # requests that went on after blocks from elsewhere, or found all of them
    blocks: int = 0  # fetched and used
    early: int = 0  # of these, while their prompt was computed
    shared: int = 0  # blocks that a worker fetched before it computed the rest of a prompt
    bytes: int = 0
    seconds: float = 0.0  # in which the blocks of all handovers that were done came
    failed: Counter[str] = field(default_factory=Counter)  # that computed their prompt again, by reason

    def add(self, moved: Moved) -> None:
        if moved.failed:
            self.failed[moved.failed] += 1
            return
        self.done += 1
        self.blocks += moved.blocks
        self.bytes += moved.bytes
        self.seconds += moved.on_way

    def add_early(self, moved: Moved) -> None:
        """A parcel. One that did not come is no failure: its blocks come when the prompt is computed."""
        self.blocks += moved.blocks
        self.early += moved.blocks
        self.bytes += moved.bytes


class Handover:
    """Moves requests to one engine."""

    def __init__(self, receiver: BlockClient, transport: Transport):
        self.receiver = receiver
        self.transport = transport
        self._avoided: dict[str, float] = {}  # holders whose pool cannot be read, and until when

    async def run(self, offer: Offer, request: Request, tokens: int) -> Moved:
        """A request goes on at the receiver; its first `tokens` tokens were computed where the offer comes from. Not
        taken: the receiver had no room in time, or the transfer could not begin. EngineError: the receiver is gone or
        does not answer; it may have the request, and has to be told to abort it. However else this ends, no request is
        left there that waits for blocks."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        taken: list[tuple[Name, ...]] = []  # the blocks that it waits for, once it is taken
        fetched: int | None = None  # blocks, once all that lacked are there
        failed, seconds = "", 0.0
        asked = room = None  # when
        incoming: Incoming | None = None
        try:
            async with asyncio.timeout(offer.seconds):
                incoming = await self.transport.connect(offer.address, offer.ticket)
                asked = loop.time()
                await self._take(request, tokens, incoming, offer.lease / 3, taken)
                room = loop.time()
                async with asyncio.timeout(offer.fetch):
                    fetched = await self._fetch(request, taken[0], incoming, offer) if taken[0] else 0
                failed = DAMAGED if fetched is None else ""
        except TimeoutError:
            failed = DEADLINE
        except TransferError as error:
            log.info("the blocks of request %d did not come: %s", request.id, error)
            failed = TRANSFER
        finally:
            complete = fetched is not None and not failed
            seconds = loop.time() - began
            waited = 0.0 if asked is None else (room or loop.time()) - asked
            try:
                if taken and taken[0] and not complete:
                    await self.receiver.arrive(request.id, None)  # it computes them; nothing, if it waits for none
            finally:
                if incoming is not None:
                    await incoming.close(complete)
        if failed:
            log.warning("request %d is computed again: %s", request.id, failed)
            return Moved(bool(taken), 0, 0, seconds, waited, failed)
        return Moved(True, fetched or 0, (fetched or 0) * self._block_bytes(), seconds, waited)

    async def collect(self, tokens: Sequence[int], salt: bytes, parcel: Parcel) -> Moved:
        """Blocks of the beginning of a prompt, which ends with these tokens, go to the receiver's cache. Not taken:
        they did not come, or the receiver does not want them."""
        loop = asyncio.get_running_loop()
        began, stored, incoming = loop.time(), 0, None
        try:
            async with asyncio.timeout(parcel.offer.seconds):
                incoming = await self.transport.connect(parcel.offer.address, parcel.offer.ticket)
                offer = parcel.offer
                blocks = await incoming.fetch(parcel.names, self._block_bytes(), self._reads(offer.address))
                with payload_of(blocks) as payload, renewing(incoming, offer.lease, payload):
                    answer = await self.receiver.store(tokens, salt, parcel.names, payload)
                stored = answer.blocks
                self._judge(offer.address, answer.unread)
        except (TimeoutError, TransferError) as error:
            log.info("blocks of a prompt did not come while it was computed: %s", error)
        finally:
            if incoming is not None:
                await incoming.close(stored > 0)
        return Moved(stored > 0, stored, stored * self._block_bytes(), loop.time() - began)

    def _block_bytes(self) -> int:
        ready = self.receiver.ready
        assert ready is not None, "an engine that expects blocks has said that it is ready"
        return ready.settings.exchanged_bytes

    async def _take(
        self, request: Request, tokens: int, incoming: Incoming, every: float, taken: list[tuple[Name, ...]]
    ) -> None:
        """Wait until the receiver has room for the request. The lease is renewed meanwhile."""
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

    async def _fetch(
        self, request: Request, wanted: tuple[Name, ...], incoming: Incoming, offer: Offer
    ) -> int | None:  # fmt: skip
        """How many blocks came. None: they were damaged, or not all of them."""
        blocks = await incoming.fetch(wanted, self._block_bytes(), self._reads(offer.address))
        with payload_of(blocks) as payload, renewing(incoming, offer.lease, payload):
            # From here on the receiver has them, or reads them: the answer is awaited even if the time is over.
            arriving = asyncio.ensure_future(self.receiver.arrive(request.id, payload))
            try:
                answer = await asyncio.shield(arriving)
            except asyncio.CancelledError:
                self._judge(offer.address, (await arriving).unread)
                raise
        self._judge(offer.address, answer.unread)
        return len(blocks.found) if answer.complete else None

    def _reads(self, address: str) -> bool:
        """Whether the receiver reads blocks of this holder from its pool, if the holder allows it."""
        ready = self.receiver.ready
        avoided = self._avoided.get(address, 0.0) > asyncio.get_running_loop().time()
        return ready is not None and ready.direct and not avoided

    def _judge(self, address: str, unread: bool) -> None:
        if unread:
            log.warning("blocks of %s come as bytes for %g s: they could not be read", address, AVOID_SECONDS)
            self._avoided[address] = asyncio.get_running_loop().time() + AVOID_SECONDS


@contextmanager
def renewing(incoming: Incoming, lease: float, payload: BlockData) -> Iterator[None]:
    """While blocks are read from the holder's pool, their lease goes on. Bytes that have come need none."""

    async def renew() -> None:
        with suppress(TransferError):  # the checksums show what it meant
            while True:
                await asyncio.sleep(lease / 3)
                await incoming.renew()

    task = asyncio.ensure_future(renew()) if isinstance(payload, Located) else None
    try:
        yield
    finally:
        if task is not None:
            task.cancel()


@contextmanager
def payload_of(blocks: Blocks | Located) -> Iterator[BlockData]:
    """The blocks in the form that the receiver takes."""
    if isinstance(blocks, Located):
        yield blocks
    else:
        with blocks.segment:
            yield blocks.payload()
