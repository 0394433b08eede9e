"""Blocks over NIXL: pieces, places, and peers that fail. The tests of all transports (test_sockets.py) have it too."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.cluster.fakes import Shelf
from tests.cluster.pairs import PEERS, answer, moved
from tests.cluster.rays import run_deployment
from tests.cluster.test_early import segments
from tests.cluster.test_faults import prompts
from tests.cluster.test_pair import Alone
from tests.cluster.test_ray import shape
from tests.cluster.test_sockets import NAMES, TICKET, until
from twostroke.cluster import nixl, nixl_agent, session
from twostroke.cluster.deployment import Deployment
from twostroke.cluster.nixl import PIECE, PLACES, NixlTransport
from twostroke.cluster.nixl_agent import NixlError, devices, package
from twostroke.cluster.sockets import SharedMemoryTransport, TcpTransport
from twostroke.cluster.transport import Incoming, TransferError
from twostroke.cluster.transports import FittingTransport, fitting_transport
from twostroke.errors import ConfigError
from twostroke.remote.async_engine import AsyncEngine

needs_nixl = pytest.mark.skipif(package() is None, reason="nixl is not installed")
LARGE = 3 * PIECE // len(NAMES)  # bytes of a block: all of them are three pieces

HOLDER = """
import asyncio, sys
from tests.cluster.fakes import Shelf
from tests.cluster.pairs import PEERS, answer, moved
from tests.cluster.rays import run_deployment
from twostroke.cluster.nixl import NixlTransport

async def serve():
    print(await NixlTransport(PEERS).listen(Shelf(int(sys.argv[1]))), flush=True)
    await asyncio.sleep(60)

asyncio.run(serve())
"""


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 60))


def holder(block_bytes: int) -> subprocess.Popen[str]:
    """In another process."""
    return subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(block_bytes)], stdout=subprocess.PIPE, text=True,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip


async def fetched(incoming: Incoming, block_bytes: int) -> bytes:
    blocks = await incoming.fetch(NAMES, block_bytes)
    with blocks.segment:
        return bytes(blocks.segment.view)


def test_nothing_of_nixl_is_imported_before_it_is_used() -> None:
    load = "import sys, twostroke.cluster.agent, twostroke.cluster.deployment"
    code = f"{load}; print([name for name in sys.modules if 'nixl' in name])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['twostroke.cluster.nixl_agent', 'twostroke.cluster.nixl']"


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_agent, "PACKAGES", ())
    with pytest.raises(ConfigError, match=r"--transport nixl: NIXL is not installed: pip install 'twostroke\[nixl\]'"):
        fitting_transport(PEERS, "127.0.0.1", "nixl")
    found = fitting_transport(PEERS, "192.0.2.1", "auto")
    assert isinstance(found, FittingTransport) and found.nixl is None


@needs_nixl
def test_one_machine_has_no_use_for_it() -> None:
    """Its ports are not opened where workers have shared memory."""
    found = fitting_transport(PEERS, "127.0.0.1")
    assert isinstance(found, FittingTransport) and found.nixl is None
    assert isinstance(fitting_transport(PEERS, "127.0.0.1", "tcp"), TcpTransport)


def test_the_device_of_an_address() -> None:
    assert devices("127.0.0.1") == ["lo"]
    assert devices("192.0.2.77") == []


@needs_nixl
def test_only_the_configured_interface_is_listened_on() -> None:
    async def scenario() -> None:
        transport = NixlTransport(PEERS)
        before = listening()
        await transport.listen(Shelf())
        opened = listening() - before
        await transport.close()
        assert len(opened) == 2 and {place.split(":")[0] for place in opened} == {"0100007F"}
        assert nixl_agent.DEVICES not in os.environ

    run(scenario)


def listening() -> set[str]:
    """Local addresses of the sockets on which this process listens, as the system writes them."""
    inodes = {
        os.readlink(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
        if os.path.lexists(f"/proc/self/fd/{fd}")
    }
    rows = [
        line.split() for name in ("tcp", "tcp6") for line in Path("/proc/self/net", name).read_text().splitlines()[1:]
    ]
    return {row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes}


@needs_nixl
def test_two_processes() -> None:
    """Pieces arrive in order, again and again, and more transfers at once than there are places."""

    async def scenario() -> None:
        there, transport, shelf = holder(LARGE), NixlTransport(PEERS), Shelf(LARGE)
        try:
            address = await asyncio.to_thread(there.stdout.readline)
            want = b"".join(map(shelf.content, NAMES))
            many = [await transport.connect(address.strip(), bytes([i] * 16)) for i in range(PLACES + 4)]
            found = await asyncio.gather(*(fetched(incoming, LARGE) for incoming in many))
            assert all(one == want for one in found)
            for incoming in many:
                await incoming.close(True)
        finally:
            there.kill()
            there.wait()
            await transport.close()

    run(scenario)


@needs_nixl
@pytest.mark.parametrize(
    ("how", "ways"),
    [(signal.SIGKILL, "all"), (signal.SIGKILL, "tcp"), (signal.SIGSTOP, "tcp")],  # tcp: the holder must help to read
)
def test_a_holder_that_is_gone_ends_the_transfer(
    how: signal.Signals, ways: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed: at once. Stopped: when a read takes too long; it is avoided then."""
    monkeypatch.setattr(nixl, "READ_SECONDS", 0.5)
    monkeypatch.setenv("UCX_TLS", ways)

    async def scenario() -> None:
        there, transport = holder(LARGE), NixlTransport(PEERS)
        try:
            address = (await asyncio.to_thread(there.stdout.readline)).strip()
            first, second = [await transport.connect(address, bytes([i] * 16)) for i in range(2)]
            await fetched(first, LARGE)
            read, began = transport._read, time.monotonic()

            async def strike(*given: object) -> None:
                there.send_signal(how)
                await asyncio.sleep(0.05)
                await read(*given)

            monkeypatch.setattr(transport, "_read", strike)
            with pytest.raises(NixlError if how is signal.SIGSTOP else TransferError):
                await fetched(second, LARGE)
            assert time.monotonic() - began < 3
            assert transport.avoids(address) == (how is signal.SIGSTOP)
            for one in (first, second):
                one.channel.close()
        finally:
            there.kill()
            there.wait()
            await transport.close()
        assert not segments(os.getpid())

    run(scenario)


@needs_nixl
def test_a_read_that_fails_is_followed_by_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between machines that NIXL cannot connect."""

    async def scenario() -> None:
        one, other = (
            FittingTransport(SharedMemoryTransport(PEERS), NixlTransport(PEERS), TcpTransport(PEERS)) for _ in range(2)
        )
        shelf = Shelf(LARGE)
        address = await one.listen(shelf)
        other.machine = "another one"
        monkeypatch.setattr(other.nixl, "start", fails(other.nixl))
        incoming = await other.connect(address, TICKET)
        with pytest.raises(NixlError, match="cannot be reached"):
            await incoming.fetch(NAMES, LARGE)
        await incoming.close(False)
        await until(lambda: shelf.ended == [(TICKET, False)])
        incoming = await other.connect(address, bytes(16))
        assert await fetched(incoming, LARGE) == b"".join(map(shelf.content, NAMES))
        await incoming.close(True)
        assert incoming._receive_bytes is session.receive_frames
        await other.close()
        await one.close()

    run(scenario)


def fails(transport: NixlTransport) -> Callable[[], None]:
    """NIXL is there, and does not know what the peer sends."""
    start = transport.start

    def begin() -> None:
        start()
        transport._agent._meet = lambda peer: transport._agent._agent.add_remote_agent(b"nothing")

    return begin


@pytest.mark.slow
@needs_nixl
def test_workers_on_ray(llama_folder: Path, ray_address: str) -> None:
    alone = Alone(llama_folder)
    want = [alone.answer(prompt) for prompt in prompts(4)]

    async def scenario(engine: AsyncEngine, deployment: Deployment) -> None:
        assert [await answer(engine, prompt) for prompt in prompts(4)] == want
        await moved(deployment)
        assert deployment.counts.done == 4 and deployment.counts.blocks and not deployment.counts.failed

    run_deployment(llama_folder, shape(ray_address, transport="nixl"), scenario)


@pytest.mark.slow
@pytest.mark.skipif(package() is not None, reason="nixl is installed")
def test_workers_without_it_say_so(llama_folder: Path, ray_address: str) -> None:
    async def nothing(engine: AsyncEngine, deployment: Deployment) -> None:
        raise AssertionError("it started")

    with pytest.raises(ConfigError, match="--transport nixl: NIXL is not installed"):
        run_deployment(llama_folder, shape(ray_address, transport="nixl"), nothing)
