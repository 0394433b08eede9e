"""How bytes of KV blocks come from a holder to the side that wants them: the protocol of all transports. Torch-free.

A transfer has one connection. Its fetching side renews the lease over it while the request waits for room, then fetches
the blocks it lacks, then says whether it could use them. A connection that ends early ends the transfer, so the death
of either side frees what the other one keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from twostroke.kv.addresses import Name
from twostroke.remote.messages import BlockPayload, Located
from twostroke.remote.segment import Segment


class TransferError(Exception):
    """The blocks do not come: the peer is gone, refuses, is too slow, or sends what it should not."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Bytes of blocks in a segment, whose owner closes it: which of the wanted ones, and the CRC-32 of their bytes."""

    segment: Segment
    found: tuple[int, ...]
    checksum: int

    def payload(self) -> BlockPayload:
        """The blocks in the form that an engine process of this machine reads."""
        return BlockPayload(self.segment.path, self.segment.size, self.found, self.checksum)


class BlockSource(Protocol):
    """What a transport serves from: the holder of blocks."""

    def renew(self, ticket: bytes) -> bool:
        """False: this transfer has ended."""

    async def fetch(self, ticket: bytes, wanted: Sequence[Name], direct: bool = False) -> Blocks | Located:
        """The blocks of a transfer. direct: the other side can read them from the pool of their engine. TransferError:
        it has ended, or they are gone."""

    def end(self, ticket: bytes, complete: bool) -> None:
        """The other side has taken everything, or is gone."""


class Incoming(Protocol):
    """The fetching side's end of one transfer. TransferError from every method but `close`."""

    async def renew(self) -> None:
        """Keep the lease, and see that the holder is there."""

    async def fetch(self, wanted: Sequence[Name], block_bytes: int, direct: bool = False) -> Blocks | Located:
        """The bytes of these blocks, as far as the holder has them; the caller closes their segment. direct: or, where
        the holder's engine allows it, the place in its pool. They are kept there until this end is closed."""

    async def close(self, complete: bool) -> None:
        """Complete: the blocks were used, or none were lacking. The holder has then ended the transfer, if it lives."""


class Transport(Protocol):
    async def listen(self, source: BlockSource) -> str:
        """Serve the source's transfers. Returns the address for peers."""

    async def connect(self, address: str, ticket: bytes) -> Incoming:
        """Begin a transfer that the holder at this address has offered."""

    async def close(self) -> None: ...
