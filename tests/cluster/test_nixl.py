"""Blocks over NIXL: engines read them from each other's pools. What pairs and processes do with every transport
(test_pair.py, test_early.py, test_faults.py) is tested with it too."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from tests.cluster.pairs import OVER_NIXL, PEERS, NixlTransport, Pair, all_back, answer, moved, needs_nixl, run_pair
from tests.cluster.rays import run_deployment
from tests.cluster.test_faults import prompts
from tests.cluster.test_pair import PROMPT, Alone
from tests.cluster.test_ray import shape
from tests.waiting import until
from twostroke.cluster.deployment import Deployment
from twostroke.cluster.sockets import TcpTransport
from twostroke.cluster.transports import FittingTransport, direct_reads, fitting_transport
from twostroke.errors import ConfigError
from twostroke.kv.blocks import BlockPool
from twostroke.kv.lending import LentBlocks
from twostroke.remote import direct, nixl_agent
from twostroke.remote.async_engine import AsyncEngine
from twostroke.remote.direct import DirectBlocks
from twostroke.remote.messages import Direct, Located
from twostroke.remote.nixl_agent import NixlAgent, NixlError, devices, package
from twostroke.sampling import SamplingParams

BLOCKS, SIZE, LARGE = 24, 5_000, 1 << 20  # bytes of a block
HOLDER = """
import msgspec
from tests.cluster.test_nixl import BLOCKS, LARGE, End
end = End(1, LARGE)
located = end.blocks.place(list(range(BLOCKS)), range(BLOCKS), -1)
print(msgspec.msgpack.encode(located).hex(), flush=True)
input()
"""


class Pool:
    """A pool of bytes, as `KVStorage` has one."""

    def __init__(self, seed: int, size: int):
        self.data = np.random.default_rng(seed).integers(0, 256, (BLOCKS, size), np.uint8)
        self.layout = SimpleNamespace(block_bytes=size)


class End:
    """One engine's part of it."""

    def __init__(self, seed: int, size: int = SIZE):
        self.storage, self.pool = Pool(seed, size), BlockPool(BLOCKS)
        for _ in range(BLOCKS):  # requests have them all
            self.pool.take()
        self.woken = threading.Event()
        lent = LentBlocks(SimpleNamespace(pool=self.pool))  # type: ignore[arg-type]
        self.blocks = DirectBlocks(self.storage, lent, "127.0.0.1", self.woken.set)  # type: ignore[arg-type]
        self.results: list[tuple[str, bool]] = []

    def read(self, located: Located, into: list[int]) -> None:
        self.blocks.begin(located, into, lambda error, ended: self.results.append((error, ended)))

    def wait(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline, f"a read does not end: {self.results}"
            self.woken.wait(0.01)
            self.blocks.finish()


@pytest.fixture
def ends():  # type: ignore[no-untyped-def]
    made = [End(1), End(2)]
    yield made
    for end in made:
        end.blocks.close()


# ---- where it is used ------------------------------------------------------------------------------------------------


def test_nothing_of_nixl_is_imported_before_it_is_used() -> None:
    load = "import sys, twostroke.cluster.agent, twostroke.cluster.deployment, twostroke.remote.child_main"
    code = f"{load}; print([name for name in sys.modules if 'nixl' in name])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['twostroke.remote.nixl_agent']"


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_agent, "PACKAGES", ())
    with pytest.raises(ConfigError, match=r"--transport nixl: NIXL is not installed: pip install 'twostroke\[nixl\]'"):
        direct_reads("127.0.0.1", "nixl")
    assert direct_reads("192.0.2.1", "auto") is None
    with pytest.raises(NixlError, match="not installed"):
        NixlAgent("127.0.0.1")


@needs_nixl
def test_what_a_choice_means() -> None:
    assert isinstance(fitting_transport(PEERS, "127.0.0.1"), FittingTransport)
    assert isinstance(fitting_transport(PEERS, "127.0.0.1", "tcp"), TcpTransport)
    assert isinstance(fitting_transport(PEERS, "127.0.0.1", "nixl"), TcpTransport)
    assert direct_reads("127.0.0.1", "tcp") is None
    assert direct_reads("127.0.0.1", "auto") == Direct("127.0.0.1", False)
    assert direct_reads("127.0.0.1", "nixl") == OVER_NIXL


@needs_nixl
def test_pools_in_the_memory_of_one_host_have_shared_memory(llama_folder: Path) -> None:
    """Ports are not opened where workers have it."""

    async def scenario(engine: AsyncEngine, pair: Pair) -> None:
        assert not pair.decode.worker.engine.ready.direct
        await answer(engine, PROMPT)

    run_pair(llama_folder, scenario, direct=Direct("127.0.0.1", False))


@needs_nixl
def test_several_ranks_are_refused(llama_folder: Path) -> None:
    async def nothing(engine: AsyncEngine, pair: Pair) -> None:
        raise AssertionError("it started")

    ranks = {"parallel": 2}
    with pytest.raises(ConfigError, match="--transport nixl: it cannot be used with parallel above 1"):
        run_pair(llama_folder, nothing, kind="process", prefill=ranks, decode=ranks, direct=OVER_NIXL)


def test_the_device_of_an_address() -> None:
    assert devices("127.0.0.1") == ["lo"]
    assert devices("192.0.2.77") == []


@needs_nixl
def test_only_the_configured_interface_is_listened_on() -> None:
    before = listening()
    agent = NixlAgent("127.0.0.1")
    opened = listening() - before
    assert opened and {place.split(":")[0] for place in opened} == {"0100007F"}
    assert nixl_agent.DEVICES not in os.environ
    del agent


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


# ---- reads -----------------------------------------------------------------------------------------------------------


@needs_nixl
def test_blocks_are_read_into_others(ends: list[End]) -> None:
    """Several reads at once, blocks in any order; the others keep their bytes."""
    holder, reader = ends
    before = reader.storage.data.copy()
    into = {1: 20, 5: 3, 2: 21, 9: 0, 8: 1, 7: 2}
    for some in ([1, 5, 2], [9, 8, 7]):
        reader.read(holder.blocks.place(some, range(3), -1), [into[block] for block in some])
    assert [reader.pool.references[block] for block in into.values()] == [2] * 6
    reader.wait(lambda: len(reader.results) == 2)
    assert reader.results == [("", True)] * 2
    for block, to in into.items():
        assert (reader.storage.data[to] == holder.storage.data[block]).all()
        before[to] = holder.storage.data[block]
    assert (reader.storage.data == before).all()
    assert reader.pool.references == [1] * BLOCKS, "blocks are kept after their reads"


@needs_nixl
def test_blocks_that_changed_meanwhile_are_not_used(ends: list[End]) -> None:
    """The holder's lease was over, and another request got them."""
    holder, reader = ends
    located = holder.blocks.place([4], [0], -1)
    holder.storage.data[4, 77] ^= 1
    reader.read(located, [6])
    reader.wait(lambda: reader.results)
    assert reader.results == [(direct.DAMAGED, True)] and reader.pool.references == [1] * BLOCKS


@needs_nixl
def test_a_peer_that_is_not_one(ends: list[End]) -> None:
    holder, reader = ends
    located = holder.blocks.place([4], [0], -1)
    foreign = msgspec.structs.replace(located, metadata=b"nothing")
    outside = msgspec.structs.replace(located, addresses=(located.addresses[0] + (1 << 30),))
    for number, wrong in enumerate((foreign, outside), 1):
        reader.read(wrong, [6])
        reader.wait(lambda number=number: len(reader.results) == number)
        (error, ended) = reader.results[-1]
        assert "cannot be reached" in error and ended and reader.pool.references == [1] * BLOCKS
    reader.read(located, [6])
    reader.wait(lambda: len(reader.results) == 3)
    assert reader.results[-1] == ("", True), "one that fails does not keep others from being read"


@needs_nixl
@pytest.mark.parametrize("how", [signal.SIGCONT, signal.SIGKILL])
def test_blocks_of_a_read_that_goes_on_are_kept(how: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    """A holder is stopped. The caller hears that no bytes came, and the blocks are kept until the read has ended: the
    bytes come when the holder goes on, whether they are wanted or not."""
    monkeypatch.setenv("UCX_TLS", "tcp")  # the holder must help to read
    monkeypatch.setattr(direct, "READ_SECONDS", 0.5)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, stdin=subprocess.PIPE, cwd=Path(__file__).parents[2]
    )
    reader = End(2, LARGE)
    try:
        located = msgspec.msgpack.decode(bytes.fromhex(holder.stdout.readline().decode()), type=Located)
        every = list(range(BLOCKS))
        reader.read(located, every)
        reader.wait(lambda: reader.results)
        assert reader.results == [("", True)]
        reader.storage.data[:] = 0
        holder.send_signal(signal.SIGSTOP)
        reader.read(located, every)
        reader.wait(lambda: len(reader.results) == 2)
        assert reader.results[-1] == ("no bytes came within 0.5 s", False)
        time.sleep(0.2)
        reader.blocks.finish()
        assert reader.pool.references == [2] * BLOCKS and not reader.storage.data[-1].any()
        holder.send_signal(how)
        reader.wait(lambda: reader.pool.references == [1] * BLOCKS)
        assert reader.storage.data[-1].any() == (how is signal.SIGCONT)
        assert len(reader.results) == 2, "the caller hears of it once"
    finally:
        holder.kill()
        holder.wait()
        reader.blocks.close()


# ---- engines ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama_alone(llama_folder: Path) -> Alone:
    return Alone(llama_folder)


@needs_nixl
@pytest.mark.parametrize("ended", [True, False])
def test_reads_that_fail_cost_time_and_no_token(
    llama_folder: Path, llama_alone: Alone, ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be read is computed; then the blocks of this holder come as bytes."""
    want = [llama_alone.answer(prompt) for prompt in prompts(3)]
    begin, failing = DirectBlocks.begin, [True]

    def fail(self: DirectBlocks, located: Located, blocks: list[int], done: direct.OnDone) -> None:
        if failing:
            done("it is made to fail", ended)
        else:
            begin(self, located, blocks, done)

    monkeypatch.setattr(DirectBlocks, "begin", fail)

    async def scenario(engine: AsyncEngine, pair: Pair) -> None:
        assert await answer(engine, prompts(3)[0]) == want[0]
        await moved(pair)
        assert sum(pair.counts.failed.values()) == 1 and not pair.counts.blocks
        assert await answer(engine, prompts(3)[1]) == want[1]
        await moved(pair)
        assert pair.counts.done == 1 and pair.counts.blocks, "they came as bytes"
        failing.clear()
        pair.decode.worker.handover._avoided.clear()
        assert await answer(engine, prompts(3)[2]) == want[2]
        await moved(pair)
        assert pair.counts.done == 2 and sum(pair.counts.failed.values()) == 1

    run_pair(llama_folder, scenario, direct=OVER_NIXL)


@needs_nixl
def test_only_what_lacks_is_read(llama_folder: Path, llama_alone: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of what another engine has is there already."""
    begin, read = DirectBlocks.begin, []

    def count(self: DirectBlocks, located: Located, blocks: list[int], done: direct.OnDone) -> None:
        read.append(len(blocks))
        begin(self, located, blocks, done)

    monkeypatch.setattr(DirectBlocks, "begin", count)

    async def scenario(engine: AsyncEngine, pair: Pair) -> None:
        source, to = pair.prefill.worker, pair.decode.worker
        await answer(engine, PROMPT[:65], SamplingParams(max_tokens=1, temperature=0))  # no other engine goes on
        for length, lacking in ((32, [2]), (64, [2, 2]), (64, [2, 2])):
            parcel = await source.look_up(PROMPT[:length], b"", 0)
            assert parcel is not None and len(parcel.names) == length // 16
            await to.collect(PROMPT[:length], b"", parcel)
            assert read == lacking
            source.release([parcel.number])
        assert await answer(engine, PROMPT[:65]) == llama_alone.answer(PROMPT[:65])

    run_pair(llama_folder, scenario, direct=OVER_NIXL)


@needs_nixl
@pytest.mark.parametrize("ways", ["all", "tcp"])  # tcp: the holder's process must help to read
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_holder_that_is_gone(
    llama_folder: Path, llama_alone: Alone, how: signal.Signals, ways: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While its blocks are read: the answer is the same, and every block is back."""
    monkeypatch.setenv("UCX_TLS", ways)
    want = llama_alone.answer(PROMPT)

    async def scenario(engine: AsyncEngine, pair: Pair) -> None:
        child = pair.prefill.worker.engine.child
        handover, fetched = pair.decode.worker.handover, []
        arrive = handover.receiver.arrive

        async def strike(request_id: int, payload: object) -> object:
            if isinstance(payload, Located) and not fetched:
                fetched.append(payload)
                os.kill(child.process.pid, how)
            return await arrive(request_id, payload)  # type: ignore[arg-type]

        monkeypatch.setattr(handover.receiver, "arrive", strike)
        assert await answer(engine, PROMPT) == want
        assert fetched
        if how is signal.SIGSTOP:
            os.kill(child.process.pid, signal.SIGCONT)
        await until(lambda: pair.prefill.usable, "it was not started again")
        assert await answer(engine, PROMPT[:70]) == llama_alone.answer(PROMPT[:70])
        await all_back(engine, pair, 30)

    run_pair(llama_folder, scenario, lambda: NixlTransport(PEERS), "process")


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
