"""Lends the blocks of one engine: offers them, serves those that peers fetch, and gives them back. Torch-free.

The engine copies out what a request with `lend` computes, step by step, and keeps its blocks after its end. This file
decides for how long (transfer.py). Each part of a prompt that is still computed is a transfer of its own. What was
copied out is served from the copy: the engine may be in a long step by then. An engine whose pool others read copies
nothing out: it says where the blocks lie, and keeps them.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from twostroke.cluster.transfer import Leases
from twostroke.cluster.transport import Blocks, TransferError, Transport
from twostroke.kv.addresses import Name
from twostroke.remote.client import BlockClient, EngineError
from twostroke.remote.messages import Exported, Located
from twostroke.remote.segment import Segment

LEASE_SECONDS = 5.0  # without renewal
LONGEST_SLEEP = 0.5  # seconds between two looks for leases that are over


class Offer(NamedTuple):
    """What the other side needs to fetch the blocks of a request."""

    address: str
    ticket: bytes
    lease: float  # seconds after which it must be renewed
    seconds: float  # until the transfer's deadline
    fetch: float | None = None  # in which the blocks are to come, once there is room for the request; None: until then


class Copy(NamedTuple):
    """Blocks that the engine has copied out."""

    names: tuple[Name, ...]
    segment: Segment
    checksum: int

    def blocks(self, wanted: Sequence[Name]) -> Blocks | None:
        """The wanted blocks; None: they are not all here. The copy is used up."""
        if tuple(wanted) == self.names:
            return Blocks(self.segment, tuple(range(len(self.names))), self.checksum)
        with self.segment:
            places = {name: place for place, name in enumerate(self.names)}
            if not places.keys() >= set(wanted):
                return None
            size = self.segment.size // len(self.names)
            some = Segment.create(len(wanted) * size)
            for to, name in enumerate(wanted):
                start = places[name] * size
                some.view[to * size : (to + 1) * size] = self.segment.view[start : start + size]
            return Blocks(some, tuple(range(len(wanted))), zlib.crc32(some.view))


class InPool(NamedTuple):
    """Blocks that the engine keeps in its pool."""

    names: tuple[Name, ...]
    located: Located

    def has(self, wanted: Sequence[Name]) -> bool:
        return set(self.names) >= set(wanted)

    def blocks(self, wanted: Sequence[Name]) -> Located:
        """The wanted blocks, all of which are here."""
        places = {name: place for place, name in enumerate(self.names)}
        some = [places[name] for name in wanted]
        addresses = tuple(self.located.addresses[place] for place in some)
        sums = tuple(self.located.sums[place] for place in some)
        return msgspec.structs.replace(self.located, addresses=addresses, sums=sums, found=tuple(range(len(wanted))))


class Parcel(NamedTuple):
    """Blocks of the beginning of a prompt, offered."""

    number: int  # to `release` them with
    tokens: int  # of the prompt, up to the end of these blocks
    names: tuple[Name, ...]
    offer: Offer


class Holder:
    """A `BlockSource` of blocks for a transport."""

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
        self._copies: dict[int, asyncio.Future[Copy | InPool | None]] = {}  # of the same; parcels: numbers below zero
        self._parcels = itertools.count(-1, -1)
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

    def offer(self, lent: int, seconds: float, copied: bool = False) -> Offer:
        """Blocks that a request has left, to be fetched within so many seconds. copied: the engine has copied out the
        last of them, and `keep` will be called."""
        if copied:
            self._copies[lent] = asyncio.get_running_loop().create_future()
        ticket = self._tickets[lent] = self.leases.offer(lent, seconds)
        return Offer(self.address, ticket, self.leases.seconds, seconds)

    def parcel(self, tokens: int, copy: Copy | InPool, seconds: float) -> Parcel:
        """Blocks of a prompt that is still computed, to be fetched within so many seconds."""
        number = next(self._parcels)
        offer = self.offer(number, seconds, copied=True)
        self.keep(number, copy)
        return Parcel(number, tokens, copy.names, offer)

    def keep(self, lent: int, copy: Copy | InPool | None) -> None:
        """The last blocks of a request that has ended; None: there are no more."""
        coming = self._copies.get(lent)
        if coming is not None and not coming.done():
            coming.set_result(copy)
        else:
            self._let_go(copy)

    def _let_go(self, copy: Copy | InPool | None) -> None:
        if isinstance(copy, InPool):
            self.engine.take_back([copy.located.held])
        elif copy is not None:
            copy.segment.close()

    def withdraw(self, lent: int) -> None:
        """The blocks that a request has left, or those of a parcel, are not needed any more. Nothing, if they are
        back."""
        ticket = self._tickets.get(lent)
        if ticket is not None:
            self.leases.end(ticket, False)

    def _give_back(self, lent: int) -> None:
        self._tickets.pop(lent, None)
        copy = self._copies.pop(lent, None)
        if copy is not None and not copy.done():
            copy.set_result(None)  # a peer may wait for it
        elif copy is not None:
            self._let_go(copy.result())
        if lent >= 0:
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

    async def fetch(self, ticket: bytes, wanted: Sequence[Name], direct: bool = False) -> Blocks | Located:
        ready = self.engine.ready
        lent = self.leases.begin(ticket)
        if lent is None or ready is None:
            raise TransferError("this transfer has ended")
        if len(wanted) > ready.settings.kv_blocks:
            raise TransferError("more blocks are wanted than there are")
        copy = await self._copy(lent)
        if isinstance(copy, InPool) and copy.has(wanted):
            return copy.blocks(wanted) if direct else await self._export(ticket, copy.located.held, wanted)
        if isinstance(copy, Copy) and (copied := copy.blocks(wanted)) is not None:
            return copied
        if lent < 0:
            raise TransferError("a parcel has other blocks than those that are wanted")
        return await (self._locate if direct and ready.direct else self._export)(ticket, lent, wanted)

    async def _copy(self, lent: int) -> Copy | InPool | None:
        """What the engine has given of these blocks: it comes in a moment, or the transfer ends."""
        if lent not in self._copies:
            return None
        copy = await asyncio.shield(self._copies[lent])
        if isinstance(copy, InPool):
            return copy
        self._copies.pop(lent, None)
        return None if copy is None or copy.segment.descriptor < 0 else copy

    async def _export(self, ticket: bytes, lent: int, wanted: Sequence[Name]) -> Blocks:
        """Bytes of blocks that the engine keeps under this number."""
        ready = self.engine.ready
        if ready is None:
            raise TransferError("this transfer has ended")
        segment = Segment.create(len(wanted) * ready.settings.exchanged_bytes)
        try:
            exported = await self._exported(ticket, lent, wanted, segment.path)
            return Blocks(segment, exported.found, exported.checksum)
        except BaseException:
            segment.close()
            raise

    async def _locate(self, ticket: bytes, lent: int, wanted: Sequence[Name]) -> Located:
        exported = await self._exported(ticket, lent, wanted, "")
        if exported.located is None:
            raise TransferError("the engine that has the blocks lets no other read them")
        return exported.located

    async def _exported(self, ticket: bytes, lent: int, wanted: Sequence[Name], path: str) -> Exported:
        try:
            exported = await self.engine.export(lent, wanted, path)
        except EngineError as error:
            raise TransferError(f"the engine that has the blocks is gone: {error}") from None
        if not self.leases.renew(ticket):
            raise TransferError("this transfer has ended")
        return exported

    def end(self, ticket: bytes, complete: bool) -> None:
        self.leases.end(ticket, complete)
