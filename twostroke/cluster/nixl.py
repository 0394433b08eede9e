"""A transport whose bytes NIXL moves: over RDMA where it finds it, else over what UCX finds. Torch-free.

    holder ─▶ fetching side   Staged: a piece lies in memory that you may read
    fetching side ─▶ holder   Taken: it has been read, and its place can be used again

All messages, and with them tickets, leases and proofs of the key, go over TCP as in sockets.py. The bytes are copied
into a staging area, which is registered once: registering the memory of each transfer would take longer than the copy.
The fetching side reads them into the segment that it returns.

UCX asks its peers for no key: a process that reaches its ports may read and write the memory of this one.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import select
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

import msgspec

from twostroke.cluster.channel import Channel, limited
from twostroke.cluster.nixl_agent import Memory, NixlAgent, NixlError, Peer
from twostroke.cluster.session import ANSWER_SECONDS, Close, Message, say
from twostroke.cluster.sockets import TcpTransport
from twostroke.cluster.transport import Blocks, Source, TransferError
from twostroke.remote.segment import Segment

log = logging.getLogger(__name__)
T = TypeVar("T")
PIECE = 2 << 20  # bytes of a place in the staging area
PLACES = 16
AHEAD = 4  # pieces of one transfer that wait to be read
READ_SECONDS = 5.0  # for one piece
AVOID_SECONDS = 60.0  # for which a holder whose bytes did not come over NIXL is asked over TCP
EAGER_SECONDS = 0.002  # without a pause between two looks; then
PAUSE = 0.0005


class Staged(Message, frozen=True, tag="staged"):
    """peer: the holder's agent, with the right to read its staging area."""

    peer: Peer
    address: int
    size: int


class Taken(Message, frozen=True, tag="taken"):
    pass


FROM_HOLDER: msgspec.msgpack.Decoder[Staged] = msgspec.msgpack.Decoder(Staged)
TO_HOLDER: msgspec.msgpack.Decoder[Taken | Close] = msgspec.msgpack.Decoder(Taken | Close)


class NixlTransport(TcpTransport):
    """Block data as reads of the holder's memory."""

    scheme = "nixl://"

    def __init__(self, key: bytes, interface: str = "127.0.0.1", port: int = 0):
        super().__init__(key, interface, port)
        self._agent: NixlAgent | None = None
        self._stage: Memory | None = None
        self._self: Peer
        self._free: asyncio.Queue[int]  # places of the staging area
        self._sending = 0  # transfers that are sent now
        self._driving: asyncio.Task[None] | None = None
        self._moved = 0.0  # when a piece was last staged or taken
        self._avoided: dict[str, float] = {}  # holders, and until when

    def start(self) -> None:
        """NixlError: NIXL is missing, or cannot work here."""
        if self._agent is None:
            self._agent = NixlAgent(self.interface)

    async def listen(self, source: Source) -> str:
        self.start()
        assert self._agent is not None
        self._stage = self._agent.register(memoryview(mmap.mmap(-1, PLACES * PIECE)))
        self._self = self._agent.as_peer()
        self._free = asyncio.Queue()
        for place in range(PLACES):
            self._free.put_nowait(place)
        return await super().listen(source)

    def avoids(self, address: str) -> bool:
        return self._avoided.get(address.removeprefix(self.scheme), 0.0) > time.monotonic()

    async def close(self) -> None:
        await super().close()
        if self._agent is not None:
            if self._stage is not None:
                self._agent.release(self._stage)
            self._agent.close()
            self._agent = self._stage = None

    # ---- the holder --------------------------------------------------------------------------------------------------

    async def send_bytes(self, channel: Channel, blocks: Blocks, renew: Callable[[], bool]) -> None:
        """Each piece that the other side takes renews the lease."""
        waiting: deque[int] = deque()  # places whose pieces are to be read
        self._drive(+1)
        try:
            for start in range(0, blocks.segment.size, PIECE):
                if len(waiting) == AHEAD or (waiting and self._free.empty()):
                    await self._taken(channel, waiting, renew)
                waiting.append(await self._free.get())
                await self._put(channel, waiting[-1], blocks.segment.view[start : start + PIECE])
            while waiting:
                await self._taken(channel, waiting, renew)
        finally:
            self._drive(-1)
            for place in waiting:
                self._free.put_nowait(place)

    async def _put(self, channel: Channel, place: int, piece: memoryview) -> None:
        assert self._stage is not None
        start = place * PIECE
        self._stage.view[start : start + len(piece)] = piece
        await say(channel, Staged(self._self, self._stage.address + start, len(piece)))
        self._moved = time.monotonic()

    async def _taken(self, channel: Channel, waiting: deque[int], renew: Callable[[], bool]) -> None:
        """The oldest piece has been read."""
        async with limited(ANSWER_SECONDS):
            if not isinstance(decoded(TO_HOLDER, await channel.receive()), Taken):
                raise TransferError("the other side has left")
        self._free.put_nowait(waiting.popleft())
        self._moved = time.monotonic()
        if not renew():
            raise TransferError("this transfer has ended")

    def _drive(self, change: int) -> None:
        self._sending += change
        if self._sending and self._driving is None:
            self._driving = asyncio.get_running_loop().create_task(self._progress())

    async def _progress(self) -> None:
        """Peers that cannot read this memory by themselves ask for its bytes."""
        try:
            while self._sending and self._agent is not None:
                self._agent.progress()
                await asyncio.sleep(0 if time.monotonic() - self._moved < EAGER_SECONDS else PAUSE)
        finally:
            self._driving = None

    # ---- the fetching side -------------------------------------------------------------------------------------------

    async def receive_bytes(self, channel: Channel, size: int) -> Segment:
        self.start()
        assert self._agent is not None
        self._agent.reap()
        segment = Segment.create(size)
        try:
            if size:
                await self._receive(channel, segment)
            return segment
        except NixlError as error:
            if gone(channel.sock):
                raise TransferError("the peer closed the connection") from None
            host, port, *_ = channel.sock.getpeername()
            log.warning("blocks come over TCP from %s for %g s: %s", host, AVOID_SECONDS, error)
            self._avoided[f"{host}:{port}"] = time.monotonic() + AVOID_SECONDS
            raise

    async def _receive(self, channel: Channel, segment: Segment) -> None:
        """After a failure the segment is not used any more."""
        assert self._agent is not None
        try:
            memory = self._agent.register(segment.view, segment.close)
        except NixlError:
            segment.close()
            raise
        try:
            start = 0
            while start < segment.size:
                staged = decoded(FROM_HOLDER, await channel.receive())
                if not 0 < staged.size <= segment.size - start:
                    raise TransferError("the peer sent a piece of another size")
                await self._read(channel.sock, staged, memory, start)
                await say(channel, Taken())
                start += staged.size
            self._agent.release(memory)
        except BaseException:
            self._agent.discard(memory)
            raise

    async def _read(self, sock: socket.socket, staged: Staged, memory: Memory, start: int) -> None:
        assert self._agent is not None
        read = self._agent.begin(staged.peer, staged.address, memory, start, staged.size)
        began = time.monotonic()
        try:
            while not self._agent.done(read):
                waited = time.monotonic() - began
                if gone(sock):
                    raise TransferError("the peer closed the connection")
                if waited > READ_SECONDS:
                    raise NixlError(f"no bytes came within {READ_SECONDS:g} s")
                await asyncio.sleep(0 if waited < EAGER_SECONDS else PAUSE)
        finally:
            self._agent.end(read)


def decoded(decoder: msgspec.msgpack.Decoder[T], body: bytes) -> T:
    try:
        return decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise TransferError(f"the peer sent no message of this protocol: {error}") from None


def gone(sock: socket.socket) -> bool:
    """The other side has closed the connection, or its process has ended."""
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)
    return bool(poll.poll(0))
