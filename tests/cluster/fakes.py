"""A transport in memory that cuts, delays, damages and shortens what it carries, and a source without an engine."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from twostroke.cluster.transport import Blocks, BlockSource, TransferError
from twostroke.kv.addresses import Name
from twostroke.record import replace
from twostroke.remote.messages import Located
from twostroke.remote.segment import Segment

BLOCK_BYTES = 1000


@dataclass(frozen=True)
class Fault:
    """What happens to one transfer."""

    refuse: bool = False  # the holder cannot be reached
    cut_renewals: bool = False  # the connection ends before the blocks are asked for
    cut: bool = False  # it ends while they are sent
    corrupt: bool = False
    truncate: bool = False
    forget: int = 0  # so many of the last blocks are not found
    delay: float = 0.0  # seconds before the first byte

    @property
    def harmless(self) -> bool:
        return self == replace(Fault(), delay=self.delay)


class FakeTransport:
    """Sources and fetching sides in one process. `fault` says what happens to each transfer."""

    def __init__(self, fault: Callable[[], Fault] = Fault):
        self.fault = fault
        self.sources: dict[str, BlockSource] = {}  # by address
        self.fetched: list[int] = []  # blocks of each transfer that was begun
        self.open = 0
        self.gate = asyncio.Event()  # transfers that have begun go on while it is set
        self.gate.set()

    async def listen(self, source: BlockSource) -> str:
        address = f"fake {len(self.sources)}"
        self.sources[address] = source
        return address

    async def connect(self, address: str, ticket: bytes) -> FakeIncoming:
        fault = self.fault()
        source = self.sources.get(address)
        if source is None or fault.refuse or not source.renew(ticket):
            raise TransferError("refused")
        self.open += 1
        return FakeIncoming(self, source, ticket, fault)

    async def close(self) -> None:
        return


class FakeIncoming:
    def __init__(self, transport: FakeTransport, source: BlockSource, ticket: bytes, fault: Fault):
        self.transport, self.source, self.ticket, self.fault = transport, source, ticket, fault

    async def renew(self) -> None:
        if self.fault.cut_renewals or not self.source.renew(self.ticket):
            raise TransferError("the peer closed the connection")

    async def fetch(self, wanted: Sequence[Name], block_bytes: int, direct: bool = False) -> Blocks | Located:
        self.transport.fetched.append(len(wanted))
        await asyncio.sleep(self.fault.delay)
        await self.transport.gate.wait()
        if self.fault.cut_renewals:
            raise TransferError("the peer closed the connection")
        blocks = await self.source.fetch(self.ticket, wanted, direct)
        if isinstance(blocks, Located):
            return blocks
        size, found = blocks.segment.size, blocks.found
        try:
            if self.fault.cut:
                raise TransferError("the peer closed the connection")
            if self.fault.corrupt:
                blocks.segment.view[size // 2] ^= 1
            if self.fault.forget:
                found = found[: -self.fault.forget]
                return replace(
                    blocks, found=found, checksum=zlib.crc32(blocks.segment.view[: len(found) * block_bytes])
                )
            if self.fault.truncate:
                shorter = Segment.create(size - 7)
                shorter.view[:] = blocks.segment.view[:-7]
                blocks.segment.close()
                return replace(blocks, segment=shorter)
            return blocks
        except TransferError:
            blocks.segment.close()
            raise

    async def close(self, complete: bool) -> None:
        self.transport.open -= 1
        self.source.end(self.ticket, complete)


class Shelf:
    """A `BlockSource` that has any block: its bytes are made from its name."""

    def __init__(self, block_bytes: int = BLOCK_BYTES):
        self.block_bytes = block_bytes
        self.renewed = 0
        self.ended: list[tuple[bytes, bool]] = []
        self.segments: list[Segment] = []
        self.closed_tickets: set[bytes] = set()

    def renew(self, ticket: bytes) -> bool:
        self.renewed += 1
        return ticket not in self.closed_tickets

    async def fetch(self, ticket: bytes, wanted: Sequence[Name], direct: bool = False) -> Blocks:
        if ticket in self.closed_tickets:
            raise TransferError("this transfer has ended")
        segment = Segment.create(len(wanted) * self.block_bytes)
        for place, name in enumerate(wanted):
            segment.view[place * self.block_bytes : (place + 1) * self.block_bytes] = self.content(name)
        self.segments.append(segment)
        return Blocks(segment, tuple(range(len(wanted))), zlib.crc32(segment.view))

    def content(self, name: Name) -> bytes:
        return (name.digest * self.block_bytes)[: self.block_bytes]

    def end(self, ticket: bytes, complete: bool) -> None:
        self.ended.append((ticket, complete))
        self.closed_tickets.add(ticket)
