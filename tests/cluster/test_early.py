"""Blocks of a prompt travel while it is computed: the tokens are the same, and what is lost costs time only."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.fakes import BLOCK_BYTES, FakeTransport, Fault
from tests.cluster.pairs import GREEDY, PEERS, REAL, Pair, all_back, answer, moved, run_pair
from tests.cluster.test_faults import FAULTS, kill
from tests.cluster.test_pair import Alone
from tests.waiting import until
from twostroke.cluster.flight import Flight
from twostroke.cluster.holder import Copy
from twostroke.kv.addresses import Name
from twostroke.ops.interface import BLOCK
from twostroke.remote.async_engine import AsyncEngine
from twostroke.remote.blocks import BlockExchange
from twostroke.remote.loop import EngineLoop
from twostroke.remote.messages import Export, Exported
from twostroke.remote.segment import Segment
from twostroke.types import Event, RequestState

CHUNKS = {"max_batch_tokens": 32}


def prompt(number: int, length: int = 150) -> list[int]:
    return [(i * (2 * number + 3) + number) % 290 + 3 for i in range(length)]


@pytest.fixture(scope="module")
def llama_alone(llama_folder: Path) -> Alone:
    return Alone(llama_folder)


def delay_steps(monkeypatch: pytest.MonkeyPatch, delay: Callable[[RequestState, int], object]) -> None:
    """delay: called before each step of an engine that computes for another one, with the request and its tokens whose
    blocks were copied out."""
    plain = EngineLoop._step

    def slow(self: EngineLoop) -> list[Event]:
        for state, copied in self.blocks.followed.values():
            delay(state, copied)
        return plain(self)

    monkeypatch.setattr(EngineLoop, "_step", slow)


@contextlib.contextmanager
def noted_at_the_first_token(monkeypatch: pytest.MonkeyPatch, count: Callable[[], int]) -> Iterator[list[int]]:
    """What the count is whenever the first token of a request reaches the router. An answer may end within a moment, so
    its first token is not looked for from outside."""
    noted: list[int] = []
    plain = Flight.take

    def take(self: Flight, event: Event) -> Event:
        if event.token_ids and not self.written:
            noted.append(count())
        return plain(self, event)

    with monkeypatch.context() as patch:
        patch.setattr(Flight, "take", take)
        yield noted


def test_all_but_the_last_chunk_is_there_when_the_prompt_is_computed(
    llama_folder: Path, llama_alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """150 tokens in chunks of 32: eight of ten blocks travel before the first token, the last two after it, and the
    engine that has computed them is not asked for any."""
    want, asked = llama_alone.answer(prompt(1)), []
    plain = BlockExchange.export

    def export(self: BlockExchange, message: Export) -> Exported:
        asked.append(message)
        return plain(self, message)

    monkeypatch.setattr(BlockExchange, "export", export)

    async def scenario(engine: AsyncEngine, pair: Pair) -> None:
        def until_there(state: RequestState, copied: int) -> None:
            """A transfer is shorter than a step, as it is with larger models."""
            blocks, deadline = copied // BLOCK - state.request.lend, time.monotonic() + 60
            while pair.counts.early < blocks and time.monotonic() < deadline:
                time.sleep(0.001)

        delay_steps(monkeypatch, until_there)
        with noted_at_the_first_token(monkeypatch, lambda: pair.counts.early) as early:
            assert await answer(engine, prompt(1)) == want
        assert early == [8]
        await moved(pair)
        assert (pair.counts.done, pair.counts.blocks, pair.counts.early) == (1, 10, 8) and not pair.counts.failed
        assert pair.prefill.counts.computed_tokens == 150
        assert pair.decode.counts.computed_tokens == 11
        assert not asked and pair.prefill.worker.holder.leases.ended == {"done": 5}
        assert await answer(engine, prompt(1)) == want
        await moved(pair)
        assert pair.counts.blocks == 11, "full blocks that are there are not sent again"

    run_pair(llama_folder, scenario, prefill=CHUNKS, decode={"speculate": "off"})


def test_what_the_decode_worker_has_forgotten_is_sent_with_the_request(llama_folder: Path, llama_alone: Alone) -> None:
    """Whether the router knows of it or not."""
    many = [prompt(number) for number in range(9)]
    want = [llama_alone.answer(one) for one in many]

    async def scenario(engine: AsyncEngine, pair: Pair) -> None:
        for _ in range(2):
            for one, right in zip(many, want, strict=True):
                assert await answer(engine, one) == right
                await moved(pair)
        assert pair.counts.done == 18 and pair.counts.blocks > 9 * 9 and not pair.counts.failed

    small = {"kv_blocks": 24, "max_model_len": 200}
    run_pair(llama_folder, scenario, prefill=CHUNKS | {"kv_blocks": 200}, decode=small)


@pytest.mark.parametrize("transport", REAL)
def test_two_processes(llama_folder: Path, llama_alone: Alone, transport: type) -> None:
    want, before = llama_alone.answer(prompt(2, 240)), segments(os.getpid())  # of other tests

    async def scenario(engine: AsyncEngine, pair: Pair) -> None:
        assert await answer(engine, prompt(2, 240)) == want
        await moved(pair)
        assert pair.counts.blocks == 15 and pair.counts.early >= 2 and not pair.counts.failed
        await all_back(engine, pair)
        child = pair.prefill.worker.engine.child
        assert child is not None
        await until(lambda: segments(os.getpid()) <= before and not segments(child.process.pid), "a segment stays open")

    run_pair(llama_folder, scenario, lambda: transport(PEERS), "process", prefill={"max_batch_tokens": 16})


def segments(pid: int) -> set[tuple[str, int]]:
    """Shared memory that a process has open, on Linux: descriptors and inodes."""
    folder, found = f"/proc/{pid}/fd", set()
    if not os.path.isdir(folder):
        return found
    for name in os.listdir(folder):
        with contextlib.suppress(OSError):  # closed since they were listed
            if "memfd:twostroke" in os.readlink(f"{folder}/{name}"):
                found.add((name, os.stat(f"{folder}/{name}").st_ino))
    return found


def test_parcels_that_are_lost_cost_time_and_no_token(llama_folder: Path, llama_alone: Alone) -> None:
    """Whatever happens to them: their blocks come with the request."""
    transport, happened = FakeTransport(), []
    faults = list(FAULTS.values())
    want = [llama_alone.answer(prompt(number)) for number in range(len(faults))]

    async def scenario(engine: AsyncEngine, pair: Pair) -> None:
        def faulty() -> Fault:
            """While the prompt is computed."""
            happened.append(faults[number])
            return Fault() if pair._moves else faults[number]

        transport.fault = faulty
        for number in range(len(faults)):
            assert await answer(engine, prompt(number)) == want[number]
            await moved(pair)
            await all_back(engine, pair)
        assert pair.counts.done == len(faults) and pair.counts.blocks == 10 * len(faults)
        assert not pair.counts.failed and len(set(happened)) == len(faults) and pair.counts.early < 8 * len(faults)

    run_pair(llama_folder, scenario, lambda: transport, prefill=CHUNKS, transfer_seconds=6.0)


def test_a_prefill_process_is_killed_while_its_blocks_travel(llama_folder: Path, llama_alone: Alone) -> None:
    """It leaves nothing behind, and the decode worker computes what it lacks."""
    transport = FakeTransport()
    want = llama_alone.answer(prompt(3, 240))

    async def scenario(engine: AsyncEngine, pair: Pair) -> None:
        transport.gate.clear()
        running = asyncio.ensure_future(answer(engine, prompt(3, 240)))
        await until(lambda: transport.fetched, "nothing was fetched")
        kill(pair.prefill.worker.engine)
        await until(lambda: pair.prefill.losses == 1, "its death was not seen")
        transport.gate.set()
        assert await running == want
        holder = pair.prefill.worker.holder
        await until(lambda: not pair.parcels._tasks, "parcels are left")
        assert pair.prefill.losses == 1
        assert not holder._copies and not holder._tickets and holder.leases.ended.keys() <= {"failed"}
        assert pair.counts.early == 0 and transport.open == 0

    run_pair(llama_folder, scenario, lambda: transport, "process", prefill={"max_batch_tokens": 16})


def test_a_decode_process_is_killed_while_blocks_come(llama_folder: Path, llama_alone: Alone) -> None:
    transport = FakeTransport()
    want = llama_alone.answer(prompt(4, 240))

    async def scenario(engine: AsyncEngine, pair: Pair) -> None:
        transport.gate.clear()
        running = asyncio.ensure_future(answer(engine, prompt(4, 240)))
        await until(lambda: transport.fetched, "nothing was fetched")
        kill(pair.decode.worker.engine)
        await until(lambda: pair.decode.losses == 1, "its death was not seen")
        transport.gate.set()
        assert await running == want
        assert pair.decode.losses == 1

    run_pair(llama_folder, scenario, lambda: transport, "process", prefill={"max_batch_tokens": 16})


def test_a_prompt_that_is_aborted_leaves_no_parcel(llama_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it is computed: after its first blocks no step begins before it is aborted."""
    transport, aborted = FakeTransport(lambda: Fault(delay=0.05)), threading.Event()
    delay_steps(monkeypatch, lambda state, copied: copied and aborted.wait(60))

    async def scenario(engine: AsyncEngine, pair: Pair) -> None:
        stream = engine.submit([prompt(5, 240)], GREEDY)
        await until(lambda: transport.fetched, "nothing was fetched")
        stream.close()
        aborted.set()
        assert [piece.event.finish_reason async for piece in stream][-1] == "abort"

    run_pair(llama_folder, scenario, lambda: transport, prefill=CHUNKS)
    assert transport.open == 0


def test_a_copy_gives_what_is_wanted_of_it() -> None:
    names = tuple(Name(0, bytes([number]) * 16) for number in range(3))

    def copy() -> Copy:
        segment = Segment.create(3 * BLOCK_BYTES)
        for place in range(3):
            segment.view[place * BLOCK_BYTES : (place + 1) * BLOCK_BYTES] = bytes([place]) * BLOCK_BYTES
        return Copy(names, segment, 7)

    whole = copy().blocks(names)
    assert whole is not None and whole.checksum == 7 and whole.found == (0, 1, 2)
    some = copy().blocks(names[:0:-1])
    assert some is not None and bytes(some.segment.view) == b"\2" * BLOCK_BYTES + b"\1" * BLOCK_BYTES
    assert some.found == (0, 1) and some.checksum != 7
    other = copy()
    assert other.blocks([*names, Name(1, b"other")]) is None and other.segment.descriptor < 0
    whole.segment.close()
    some.segment.close()
