"""A connection between two workers of a deployment: both prove that they have its key, then exchange sealed frames.

    client ─▶ server   HELLO, a random challenge
    server ─▶ client   a random challenge, proof                     proof = HMAC-SHA-256(key, role, both challenges)
    client ─▶ server   proof

A frame is a length, a keyed BLAKE2b tag and the body. The key of the tags is made from both challenges. A tag also
covers the direction and the number of the frame, so frames cannot be altered, repeated, left out or reflected. Bodies
are not encrypted: on a network that others can read, KV blocks can be read too.

Bodies go straight between the socket and the memory that holds them. A receiver that does not read stops the sender.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import secrets
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import blake2b

from twostroke.cluster.transport import TransferError

HELLO = b"twostroke blocks 1\n"  # with the version of this protocol
CHALLENGE = PROOF = 32
TAG = 16
HEADER = struct.Struct(f"<I{TAG}s")
MAX_CONTROL = 8 << 20  # bytes of a frame that is not block data: the names of 300,000 blocks
SMALL = 1 << 16  # bytes of a frame that is copied, to be sent with its header
HANDSHAKE_SECONDS = 5.0


def derive(secret: bytes, use: str) -> bytes:
    """A key for one use from the secret that a deployment shares: "names" of blocks, "peers" that authenticate."""
    if len(secret) < 16:
        raise ValueError("the secret of a deployment must have at least 16 bytes")
    return hmac.digest(secret, b"twostroke " + use.encode(), "sha256")


def proof(key: bytes, role: bytes, challenges: bytes) -> bytes:
    return hmac.digest(key, role + challenges, "sha256")


class Channel:
    """Frames over a connected, non-blocking socket. Every failure is a TransferError."""

    def __init__(self, sock: socket.socket):
        self.sock = sock
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # an answer is not held back
        self._loop = asyncio.get_running_loop()
        self._session = b""
        self._sent = self._received = 0
        self._mine = self._theirs = b""

    # ---- proof of the key --------------------------------------------------------------------------------------------

    async def prove_as_client(self, key: bytes) -> None:
        mine = secrets.token_bytes(CHALLENGE)
        async with limited(HANDSHAKE_SECONDS):
            await self._write(HELLO + mine)
            answer = await self._read(CHALLENGE + PROOF)
            both = mine + answer[:CHALLENGE]
            if not hmac.compare_digest(answer[CHALLENGE:], proof(key, b"server", both)):
                raise TransferError("the peer does not have the key of this deployment")
            await self._write(proof(key, b"client", both))
        self._begin(key, both, b"client", b"server")

    async def prove_as_server(self, key: bytes) -> None:
        mine = secrets.token_bytes(CHALLENGE)
        async with limited(HANDSHAKE_SECONDS):
            asked = await self._read(len(HELLO) + CHALLENGE)
            if asked[: len(HELLO)] != HELLO:
                raise TransferError("the peer speaks another protocol or version")
            both = asked[len(HELLO) :] + mine
            await self._write(mine + proof(key, b"server", both))
            if not hmac.compare_digest(await self._read(PROOF), proof(key, b"client", both)):
                raise TransferError("the peer does not have the key of this deployment")
        self._begin(key, both, b"server", b"client")

    def _begin(self, key: bytes, both: bytes, mine: bytes, theirs: bytes) -> None:
        self._session = proof(key, b"frames", both)
        self._mine, self._theirs = mine, theirs

    # ---- frames ------------------------------------------------------------------------------------------------------

    async def send(self, body: bytes | memoryview) -> None:
        tag = self._tag(self._mine, self._sent, body)
        self._sent += 1
        header = HEADER.pack(len(body), tag)
        if len(body) <= SMALL:
            await self._write(header + body)
        else:
            await self._write(header)
            await self._write(body)

    async def receive(self) -> bytes:
        size, tag = await self._header(MAX_CONTROL)
        body = bytearray(size)
        await self._fill(memoryview(body))
        self._check(tag, body)
        return bytes(body)

    async def receive_into(self, memory: memoryview) -> int:
        """One frame at the beginning of `memory`; its length."""
        size, tag = await self._header(len(memory))
        if not size:
            raise TransferError("the peer sent an empty frame")
        await self._fill(memory[:size])
        self._check(tag, memory[:size])
        return size

    async def _header(self, most: int) -> tuple[int, bytes]:
        size, tag = HEADER.unpack(await self._read(HEADER.size))
        if size > most:
            raise TransferError(f"the peer sent a frame of {size} bytes, over the limit of {most}")
        return size, tag

    def _tag(self, role: bytes, number: int, body: bytes | bytearray | memoryview) -> bytes:
        made = blake2b(role + number.to_bytes(8, "little"), key=self._session, digest_size=TAG)
        made.update(body)
        return made.digest()

    def _check(self, tag: bytes, body: bytearray | memoryview) -> None:
        if not hmac.compare_digest(tag, self._tag(self._theirs, self._received, body)):
            raise TransferError("a frame arrived damaged")
        self._received += 1

    # ---- descriptors (Unix sockets) ----------------------------------------------------------------------------------

    async def send_descriptor(self, descriptor: int) -> None:
        while True:
            try:
                socket.send_fds(self.sock, [b"!"], [descriptor])
                return
            except BlockingIOError:
                await self._ready(writing=True)
            except OSError as error:
                raise TransferError(f"the connection broke: {error}") from None

    async def receive_descriptor(self) -> int:
        while True:
            try:
                data, found, *_ = socket.recv_fds(self.sock, 1, 1)
            except BlockingIOError:
                await self._ready(writing=False)
                continue
            except OSError as error:
                raise TransferError(f"the connection broke: {error}") from None
            if len(found) != 1:
                raise TransferError("the peer sent no shared memory")
            if data != b"!":
                os.close(found[0])
                raise TransferError("the peer sent no shared memory")
            return found[0]

    async def _ready(self, writing: bool) -> None:
        loop, ready = self._loop, asyncio.Event()
        add, remove = (loop.add_writer, loop.remove_writer) if writing else (loop.add_reader, loop.remove_reader)
        add(self.sock, ready.set)
        try:
            await ready.wait()
        finally:
            remove(self.sock)

    # ---- bytes -------------------------------------------------------------------------------------------------------

    async def _write(self, data: bytes | memoryview) -> None:
        try:
            await self._loop.sock_sendall(self.sock, data)
        except OSError as error:
            raise TransferError(f"the connection broke: {error}") from None

    async def _read(self, size: int) -> bytes:
        data = bytearray(size)
        await self._fill(memoryview(data))
        return bytes(data)

    async def _fill(self, memory: memoryview) -> None:
        while memory:
            try:
                count = await self._loop.sock_recv_into(self.sock, memory)
            except OSError as error:
                raise TransferError(f"the connection broke: {error}") from None
            if not count:
                raise TransferError("the peer closed the connection")
            memory = memory[count:]

    def shut(self) -> None:
        """Both sides see the end of the connection; the socket is still to be closed."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.sock.close()


@asynccontextmanager
async def limited(seconds: float) -> AsyncIterator[None]:
    """A time limit whose end is a TransferError."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise TransferError("the peer did not answer in time") from None
