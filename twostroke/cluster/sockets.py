"""Transports over sockets: TCP between machines, a Unix socket and shared memory on one machine. Torch-free.

Both listen on one address only, which the deployment configures, and serve a peer after it has proved that it has the
key of the deployment (channel.py).
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import socket
import tempfile
from pathlib import Path
from typing import Any

from twostroke.cluster import session
from twostroke.cluster.acceptor import Acceptor, bound, place_of
from twostroke.cluster.channel import HANDSHAKE_SECONDS, Channel, limited
from twostroke.cluster.session import Connection
from twostroke.cluster.transport import BlockSource, TransferError

log = logging.getLogger(__name__)
MAX_PEERS = 512  # connections that a holder serves at once


class SocketTransport:
    """The part that does not depend on the kind of socket."""

    send_bytes: session.SendBytes
    receive_bytes: session.ReceiveBytes

    def __init__(self, key: bytes):
        """key: of the peers of a deployment, see `channel.derive`."""
        self._key = key
        self._acceptor: Acceptor | None = None

    def _bind(self) -> tuple[socket.socket, str]:
        """A socket to listen on, and its address for peers."""
        raise NotImplementedError

    async def _reach(self, address: str) -> socket.socket:
        """A connected socket. OSError or ValueError: it cannot be reached."""
        raise NotImplementedError

    # ---- the holder --------------------------------------------------------------------------------------------------

    async def listen(self, source: BlockSource) -> str:
        sock, address = self._bind()
        self._acceptor = Acceptor(sock, lambda peer: self._serve(peer, source), MAX_PEERS)
        return address

    async def _serve(self, sock: socket.socket, source: BlockSource) -> None:
        channel = Channel(sock)
        try:
            await channel.prove_as_server(self._key)
            await session.serve(channel, source, self.send_bytes)
        except TransferError as error:
            log.info("a transfer ended early: %s", error)
        finally:
            channel.close()

    # ---- the fetching side -------------------------------------------------------------------------------------------

    async def connect(self, address: str, ticket: bytes) -> Connection:
        try:
            async with limited(HANDSHAKE_SECONDS):
                channel = Channel(await self._reach(address))
        except (OSError, ValueError) as error:
            raise TransferError(f"{address} cannot be reached: {error}") from None
        try:
            await channel.prove_as_client(self._key)
            connection = Connection(channel, self.receive_bytes)
            await connection.open(ticket)
            return connection
        except BaseException:
            channel.close()
            raise

    async def close(self) -> None:
        """Transfers that are under way end with an error for both sides."""
        if self._acceptor is not None:
            await self._acceptor.close()
            self._acceptor = None


class TcpTransport(SocketTransport):
    """Block data as frames of a TCP stream."""

    scheme = "tcp://"
    send_bytes = staticmethod(session.send_frames)
    receive_bytes = staticmethod(session.receive_frames)

    def __init__(self, key: bytes, interface: str = "127.0.0.1", port: int = 0):
        """interface: the address to listen on, and no other. port: 0 for any that is free."""
        super().__init__(key)
        self.interface = interface
        self.port = port

    def _bind(self) -> tuple[socket.socket, str]:
        sock = bound(self.interface, self.port)
        return sock, f"{self.scheme}{place_of(sock)}"

    async def _reach(self, address: str) -> socket.socket:
        host, _, port = address.removeprefix(self.scheme).rpartition(":")
        loop = asyncio.get_running_loop()
        family, kind, _, _, place = (await loop.getaddrinfo(host, int(port), type=socket.SOCK_STREAM))[0]
        return await reach(socket.socket(family, kind), place)


class SharedMemoryTransport(SocketTransport):
    """Block data in memory that both processes map: its descriptor is passed over a Unix socket, and nothing is copied
    on the way. For processes of one user on one Linux machine."""

    send_bytes = staticmethod(session.send_memory)
    receive_bytes = staticmethod(session.receive_memory)

    def __init__(self, key: bytes):
        super().__init__(key)
        self._folder: Path | None = None

    def _bind(self) -> tuple[socket.socket, str]:
        self._folder = Path(tempfile.mkdtemp(prefix="twostroke-"))  # which only this user can enter
        sock = socket.socket(socket.AF_UNIX)
        sock.bind(str(self._folder / "blocks"))
        return sock, f"unix://{self._folder / 'blocks'}"

    async def _reach(self, address: str) -> socket.socket:
        return await reach(socket.socket(socket.AF_UNIX), address.removeprefix("unix://"))

    async def close(self) -> None:
        await super().close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


async def reach(sock: socket.socket, place: Any) -> socket.socket:
    sock.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(sock, place)
        return sock
    except BaseException:
        sock.close()
        raise
