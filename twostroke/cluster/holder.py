"""Lends the blocks of one engine: offers them, serves those that peers fetch, and gives them back. Torch-free.

The engine keeps the blocks of a request that was made with `lend`. Here is decided until when (transfer.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from twostroke.cluster.transfer import Leases
from twostroke.cluster.transport import Blocks, TransferError, Transport
from twostroke.kv.addresses import Name
from twostroke.remote.client import BlockClient, EngineError
from twostroke.remote.segment import Segment

LEASE_SECONDS = 5.0  # without renewal
LONGEST_SLEEP = 0.5  # seconds between two looks for leases that are over


class Offer(NamedTuple):
    """What the other side needs to fetch the blocks of a request."""

    address: str
    ticket: bytes
    lease: float  # seconds after which it must be renewed
    seconds: float  # until the transfer's deadline


class Holder:
    """A `Source` of blocks for a transport."""

    def __init__(
        self,
        engine: BlockClient,
        transport: Transport,
        lease: float = LEASE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.engine = engine
        self.transport = transport
        self.clock = clock
        self.leases = Leases(lease, self._give_back, clock)
        self._tickets: dict[int, bytes] = {}  # of the open transfers, by the request whose blocks they are
        self.address = ""
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self.address = await self.transport.listen(self)
        self._watching = asyncio.get_running_loop().create_task(self._watch())

    async def stop(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watching
        await self.transport.close()
        self.leases.fail_all()

    def offer(self, lent: int, seconds: float) -> Offer:
        """Blocks that a request has left, to be fetched within so many seconds."""
        ticket = self._tickets[lent] = self.leases.offer(lent, seconds)
        return Offer(self.address, ticket, self.leases.seconds, seconds)

    def withdraw(self, lent: int) -> None:
        """The blocks that a request has left are not needed any more. Nothing, if they are back."""
        ticket = self._tickets.get(lent)
        if ticket is not None:
            self.leases.end(ticket, False)

    def _give_back(self, lent: int) -> None:
        self._tickets.pop(lent, None)
        self.engine.take_back([lent])

    def engine_lost(self) -> None:
        self.leases.fail_all()

    async def _watch(self) -> None:
        while True:
            due = self.leases.next_end()
            await asyncio.sleep(LONGEST_SLEEP if due is None else min(LONGEST_SLEEP, max(0.01, due - self.clock())))
            self.leases.expire()

    # ---- what the transport asks -----------------------------------------------------------------------------------

    def renew(self, ticket: bytes) -> bool:
        return self.leases.renew(ticket)

    async def fetch(self, ticket: bytes, wanted: Sequence[Name]) -> Blocks:
        ready = self.engine.ready
        lent = self.leases.begin(ticket)
        if lent is None or ready is None:
            raise TransferError("this transfer has ended")
        if len(wanted) > ready.settings.kv_blocks:
            raise TransferError("more blocks are wanted than there are")
        segment = Segment.create(len(wanted) * ready.settings.layout.block_bytes)
        try:
            exported = await self.engine.export(lent, wanted, segment.path)
            if not self.leases.renew(ticket):
                raise TransferError("this transfer has ended")
            return Blocks(segment, exported.found, exported.checksum)
        except EngineError as error:
            segment.close()
            raise TransferError(f"the engine that has the blocks is gone: {error}") from None
        except BaseException:
            segment.close()
            raise

    def end(self, ticket: bytes, complete: bool) -> None:
        self.leases.end(ticket, complete)
