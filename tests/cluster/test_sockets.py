"""Bytes over real sockets: they arrive as they were sent, only to peers that have the key, and never damaged."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cluster.fakes import BLOCK_BYTES, Shelf
from tests.cluster.pairs import PEERS, SOCKETS
from tests.serve.server import wait_until
from tests.waiting import until
from twostroke.cluster import channel as channels
from twostroke.cluster import session, sockets
from twostroke.cluster.channel import HEADER, Channel, derive
from twostroke.cluster.sockets import SharedMemoryTransport, SocketTransport, TcpTransport
from twostroke.cluster.transport import TransferError
from twostroke.cluster.transports import fitting_transport
from twostroke.kv.addresses import Name
from twostroke.remote.messages import Located

TICKET = bytes(range(16))
NAMES = tuple(Name(i % 2, bytes([i, 255 - i] * 8)) for i in range(40))
every = pytest.mark.parametrize("kind", SOCKETS)


def run(kind: type[SocketTransport], scenario: Callable[..., Awaitable[None]], shelf: Shelf | None = None) -> Shelf:
    shelf = shelf or Shelf()

    async def whole() -> None:
        transport = kind(PEERS)
        try:
            await asyncio.wait_for(scenario(transport, await transport.listen(shelf)), 30)
        finally:
            await transport.close()

    gc.collect()
    before = descriptors()
    asyncio.run(whole())
    assert all(segment.descriptor < 0 for segment in shelf.segments), "a segment was left open"
    # What other tests have left may be closed meanwhile, and threads of theirs may open something for a moment.
    wait_until(lambda: descriptors() <= before, "a descriptor was left open", 30)
    return shelf


def descriptors() -> set[tuple[str, str]]:
    """Those of this process, and what each of them is."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that has listed them
            found.add((name, os.readlink(f"/proc/self/fd/{name}")))
    return found


@every
@pytest.mark.parametrize("block_bytes", [BLOCK_BYTES, 100_000])  # one frame, and several
def test_blocks_arrive_as_they_were_sent(kind: type[SocketTransport], block_bytes: int) -> None:
    shelf = Shelf(block_bytes)

    async def scenario(transport: SocketTransport, address: str) -> None:
        incoming = await transport.connect(address, TICKET)
        await incoming.renew()
        blocks = await incoming.fetch(NAMES, block_bytes)
        with blocks.segment:
            assert bytes(blocks.segment.view) == b"".join(map(shelf.content, NAMES))
            assert blocks.found == tuple(range(40))
        await incoming.close(True)
        assert shelf.ended == [(TICKET, True)], "the holder has ended the transfer when `close` returns"
        with pytest.raises(TransferError, match="has ended"):
            await transport.connect(address, TICKET)

    run(kind, scenario, shelf)
    assert shelf.renewed >= 2


def test_each_pair_of_workers_takes_the_way_that_fits_it() -> None:
    """Shared memory where the holder's socket is on this machine and is seen, else TCP."""

    async def scenario() -> None:
        shelf, holder, ours = Shelf(), fitting_transport(PEERS, "127.0.0.1"), fitting_transport(PEERS, "127.0.0.1")
        machine, shared, tcp = (await holder.listen(shelf)).split(" ")
        ways = [
            (f"{machine} {shared} {tcp}", socket.AF_UNIX),
            (f"another-machine {shared} {tcp}", socket.AF_INET),
            (f"{machine} unix:///of-another-container {tcp}", socket.AF_INET),
        ]
        for number, (address, family) in enumerate(ways):
            incoming = await ours.connect(address, bytes([number] * 16))
            assert incoming.channel.sock.family == family  # type: ignore[attr-defined]
            blocks = await incoming.fetch(NAMES, BLOCK_BYTES)
            assert not isinstance(blocks, Located)
            with blocks.segment:
                assert bytes(blocks.segment.view) == b"".join(map(shelf.content, NAMES))
            await incoming.close(True)
        with pytest.raises(TransferError, match="no address of a worker with this transport"):
            await ours.connect(f"another-machine {shared}", TICKET)
        await ours.close()
        await holder.close()

    asyncio.run(asyncio.wait_for(scenario(), 30))


@every
def test_a_side_that_dies_ends_the_transfer(kind: type[SocketTransport]) -> None:
    shelf = Shelf()

    async def scenario(transport: SocketTransport, address: str) -> None:
        incoming = await transport.connect(address, TICKET)
        incoming.channel.close()  # as the end of its process does
        await until(lambda: shelf.ended == [(TICKET, False)], "its end was not seen")
        other = await transport.connect(address, bytes(16))
        await transport.close()
        with pytest.raises(TransferError):
            await other.fetch(NAMES, BLOCK_BYTES)
        await other.close(False)
        assert shelf.ended[1:] == [(bytes(16), False)]

    run(kind, scenario, shelf)


@every
def test_a_peer_without_the_key_gets_nothing(kind: type[SocketTransport]) -> None:
    shelf = Shelf()

    async def scenario(transport: SocketTransport, address: str) -> None:
        stranger = kind(derive(bytes(32), "peers"))
        with pytest.raises(TransferError, match="key of this deployment"):
            await stranger.connect(address, TICKET)
        loop = asyncio.get_running_loop()
        for first in (b"GET / HTTP/1.1\r\n\r\n" + bytes(100), b"", channels.HELLO + bytes(32)):
            sock = await transport._reach(address)
            await loop.sock_sendall(sock, first)
            said = await loop.sock_recv(sock, 1 << 16) if first.startswith(channels.HELLO) else b""
            await loop.sock_sendall(sock, said[32:] or b"x")  # a proof that is a reflection of the server's own
            sock.close()
        await asyncio.sleep(0.05)

    run(kind, scenario, shelf)
    assert shelf.renewed == 0 and not shelf.ended


def test_a_holder_without_the_key_is_not_read() -> None:
    async def scenario(transport: SocketTransport, address: str) -> None:
        liar = TcpTransport(derive(bytes(32), "peers"))
        try:
            with pytest.raises(TransferError, match="key of this deployment"):
                await transport.connect(await liar.listen(Shelf()), TICKET)
        finally:
            await liar.close()

    run(TcpTransport, scenario)


def test_a_silent_peer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "HANDSHAKE_SECONDS", 0.1)

    async def scenario(transport: SocketTransport, address: str) -> None:
        sock = await transport._reach(address)
        loop = asyncio.get_running_loop()
        assert await loop.sock_recv(sock, 1) == b"", "the holder closes the connection"
        sock.close()

    run(TcpTransport, scenario)


def test_only_the_configured_interface_is_listened_on(tmp_path: Path) -> None:
    async def scenario(transport: SocketTransport, address: str) -> None:
        assert address.startswith("tcp://127.0.0.1:")
        assert transport._acceptor is not None
        assert transport._acceptor._sock.getsockname()[0] == "127.0.0.1"

    run(TcpTransport, scenario)

    async def private(transport: SocketTransport, address: str) -> None:
        folder = Path(address.removeprefix("unix://")).parent
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        await transport.close()
        assert not folder.exists()

    run(SharedMemoryTransport, private)


def test_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "MAX_PEERS", 2)

    async def scenario(transport: SocketTransport, address: str) -> None:
        open_ones = [await transport.connect(address, bytes([i] * 16)) for i in range(2)]
        with pytest.raises(TransferError):
            await transport.connect(address, TICKET)
        for one in open_ones:
            await one.close(False)

    run(TcpTransport, scenario)


# ---- frames ----------------------------------------------------------------------------------------------------------


async def two_ends() -> tuple[Channel, Channel]:
    ours, theirs = socket.socketpair()
    for sock in (ours, theirs):
        sock.setblocking(False)
    client, server = Channel(ours), Channel(theirs)
    await asyncio.gather(client.prove_as_client(PEERS), server.prove_as_server(PEERS))
    return client, server


@settings(max_examples=20)
@given(st.binary(max_size=200), st.integers(0, 10_000), st.integers(1, 255))
def test_a_frame_with_any_altered_byte_is_refused(body: bytes, place: int, change: int) -> None:
    async def scenario() -> None:
        client, server = await two_ends()
        sealed = bytearray(HEADER.pack(len(body), client._tag(b"client", 0, body)) + body)
        sealed[place % len(sealed)] ^= change
        client.sock.send(sealed)
        client.sock.shutdown(socket.SHUT_WR)
        with pytest.raises(TransferError):
            await server.receive()
        client.close()
        server.close()

    asyncio.run(scenario())


def test_frames_cannot_be_repeated_reflected_or_left_out() -> None:
    async def scenario() -> None:
        for spoil in ("repeat", "reflect", "leave out"):
            client, server = await two_ends()
            if spoil == "reflect":
                await client.send(b"hello")
                server.sock.send(server.sock.recv(1000))
                receiver = client
            else:
                client._sent += spoil == "leave out"
                await client.send(b"hello")
                client._sent -= 1
                await client.send(b"hello")
                assert spoil != "repeat" or await server.receive() == b"hello"
                receiver = server
            with pytest.raises(TransferError, match="damaged"):
                await receiver.receive()
            client.close()
            server.close()

    asyncio.run(scenario())


def test_a_length_over_the_limit_is_refused_before_memory_is_taken() -> None:
    async def scenario() -> None:
        client, server = await two_ends()
        client.sock.send(HEADER.pack(channels.MAX_CONTROL + 1, bytes(16)))
        with pytest.raises(TransferError, match="over the limit"):
            await server.receive()
        client.close()
        server.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("body", [b"", b"\x91\xa5other", b"\x92\xa4open\xc4", b"\x91\xa5fetch"])
def test_what_is_no_message_ends_the_connection(body: bytes) -> None:
    async def scenario() -> None:
        client, server = await two_ends()
        await client.send(body)
        with pytest.raises(TransferError):
            await session.serve(server, Shelf(), session.send_frames)
        client.close()
        server.close()

    asyncio.run(scenario())


def test_a_slow_reader_stops_the_sender() -> None:
    """Back-pressure: what is not read is not taken from memory into buffers without bound."""

    async def scenario() -> None:
        client, server = await two_ends()
        sent = 0

        async def send() -> None:
            nonlocal sent
            for _ in range(64):
                await client.send(bytes(1 << 20))
                sent += 1

        sending = asyncio.ensure_future(send())
        await asyncio.sleep(0.1)
        assert sent < 8
        memory = memoryview(bytearray(1 << 20))
        for _ in range(64):
            assert await server.receive_into(memory) == 1 << 20
        await sending
        client.close()
        server.close()

    asyncio.run(scenario())


def test_a_short_secret_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 16 bytes"):
        derive(b"secret", "peers")
    assert derive(bytes(16), "peers") != derive(bytes(16), "names")
