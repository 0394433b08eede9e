"""What the two ends of a transfer's connection say to each other, after each has proved that it has the key.

    fetching side ─▶ holder   Open, Renew any number of times, Fetch once, Close
    holder ─▶ fetching side   Kept after Open and Renew, Granted and the bytes after Fetch, or Refused at any time

The bytes are sent as frames (TCP), or as the descriptor of the memory that holds them (one machine). Between engines
that read each other's pools Located is sent instead: where the blocks lie.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from twostroke.cluster.channel import Channel, limited
from twostroke.cluster.transport import Blocks, BlockSource, TransferError
from twostroke.kv.addresses import Name
from twostroke.remote.messages import Located
from twostroke.remote.segment import Segment

ANSWER_SECONDS = 10.0  # for an answer without bytes
CLOSE_SECONDS = 2.0
DATA_FRAME = 1 << 20


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A message is an array on the wire that starts with the name of the message."""


class Open(Message, frozen=True, tag="open"):
    ticket: bytes


class Renew(Message, frozen=True, tag="renew"):
    pass


class Fetch(Message, frozen=True, tag="fetch"):
    wanted: tuple[Name, ...]
    direct: bool = False


class Close(Message, frozen=True, tag="close"):
    complete: bool


class Kept(Message, frozen=True, tag="kept"):
    pass


class Granted(Message, frozen=True, tag="granted"):
    """`size` bytes follow. The blocks in them are those of `found`; the memory may be larger than they are."""

    size: int
    found: tuple[int, ...]
    checksum: int


class Refused(Message, frozen=True, tag="refused"):
    why: str


ENCODER = msgspec.msgpack.Encoder()
PeerReply = Kept | Granted | Located | Refused
FROM_HOLDER: msgspec.msgpack.Decoder[PeerReply] = msgspec.msgpack.Decoder(PeerReply)
TO_HOLDER: msgspec.msgpack.Decoder[Open | Renew | Fetch | Close] = msgspec.msgpack.Decoder(Open | Renew | Fetch | Close)
SendBytes = Callable[[Channel, Blocks, Callable[[], bool]], Awaitable[None]]
ReceiveBytes = Callable[[Channel, int], Awaitable[Segment]]


async def say(channel: Channel, message: Message | Located) -> None:
    await channel.send(ENCODER.encode(message))


# ---- the holder ------------------------------------------------------------------------------------------------------


async def serve(channel: Channel, source: BlockSource, send_bytes: SendBytes) -> None:
    """One transfer, until its other side closes it or is gone. However it ends, the source hears of it once."""
    message = await heard(channel)
    if not isinstance(message, Open):
        raise TransferError("the first message must be Open")
    ticket, complete = message.ticket, False
    try:
        if not source.renew(ticket):
            await say(channel, Refused("this transfer has ended"))
            return
        await say(channel, Kept())
        while not isinstance(message := await heard(channel), Close):
            await answer(channel, source, ticket, message, send_bytes)
        complete = message.complete
    finally:
        source.end(ticket, complete)


async def answer(
    channel: Channel, source: BlockSource, ticket: bytes, message: Open | Renew | Fetch, send_bytes: SendBytes
) -> None:
    if isinstance(message, Fetch):
        try:
            blocks = await source.fetch(ticket, message.wanted, message.direct)
        except TransferError as error:
            await say(channel, Refused(str(error)))
            return
        if isinstance(blocks, Located):
            await say(channel, blocks)
            return
        with blocks.segment:
            await say(channel, Granted(blocks.segment.size, blocks.found, blocks.checksum))
            await send_bytes(channel, blocks, lambda: source.renew(ticket))
    elif isinstance(message, Renew) and source.renew(ticket):
        await say(channel, Kept())
    else:
        await say(channel, Refused("this transfer has ended"))


async def heard(channel: Channel) -> Open | Renew | Fetch | Close:
    try:
        return TO_HOLDER.decode(await channel.receive())
    except msgspec.MsgspecError as error:
        raise TransferError(f"the peer sent no message of this protocol: {error}") from None


# ---- the fetching side -----------------------------------------------------------------------------------------------


class Connection:
    """An `Incoming` transfer over a channel."""

    def __init__(self, channel: Channel, receive_bytes: ReceiveBytes):
        self.channel = channel
        self._receive_bytes = receive_bytes

    async def open(self, ticket: bytes) -> None:
        await say(self.channel, Open(ticket))
        await self._kept()

    async def renew(self) -> None:
        await say(self.channel, Renew())
        await self._kept()

    async def _kept(self) -> None:
        async with limited(ANSWER_SECONDS):
            if not isinstance(await self._heard(), Kept):
                raise TransferError("the peer sent an answer that was not asked for")

    async def fetch(self, wanted: Sequence[Name], block_bytes: int, direct: bool = False) -> Blocks | Located:
        await say(self.channel, Fetch(tuple(wanted), direct))
        granted = await self._heard()
        if direct and isinstance(granted, Located):
            return granted
        if not isinstance(granted, Granted) or granted.size != len(wanted) * block_bytes:
            raise TransferError("the peer sent blocks of another size")
        return Blocks(await self._receive_bytes(self.channel, granted.size), granted.found, granted.checksum)

    async def _heard(self) -> Kept | Granted | Located:
        try:
            message = FROM_HOLDER.decode(await self.channel.receive())
        except msgspec.MsgspecError as error:
            raise TransferError(f"the peer sent no message of this protocol: {error}") from None
        if isinstance(message, Refused):
            raise TransferError(f"the peer refused: {message.why}")
        return message

    async def close(self, complete: bool) -> None:
        try:
            with contextlib.suppress(TransferError):
                async with limited(CLOSE_SECONDS):
                    await say(self.channel, Close(complete))
                    await self.channel.receive()  # the holder closes once it has ended the transfer
        finally:
            self.channel.close()


# ---- bytes -----------------------------------------------------------------------------------------------------------


async def send_frames(channel: Channel, blocks: Blocks, renew: Callable[[], bool]) -> None:
    """Each frame that the other side takes renews the lease."""
    for start in range(0, blocks.segment.size, DATA_FRAME):
        await channel.send(blocks.segment.view[start : start + DATA_FRAME])
        if not renew():
            raise TransferError("this transfer has ended")


async def receive_frames(channel: Channel, size: int) -> Segment:
    segment = Segment.create(size)
    try:
        start = 0
        while start < size:
            start += await channel.receive_into(segment.view[start : start + DATA_FRAME])
        return segment
    except BaseException:
        segment.close()
        raise


async def send_memory(channel: Channel, blocks: Blocks, renew: Callable[[], bool]) -> None:
    await channel.send_descriptor(blocks.segment.descriptor)


async def receive_memory(channel: Channel, size: int) -> Segment:
    try:
        return Segment.adopt(await channel.receive_descriptor(), size)
    except OSError as error:
        raise TransferError(f"the peer's memory cannot be used: {error}") from None
