"""Whatever is lost on the way, every request ends with the right tokens or one clear error, and every block is back."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest

from tests.cluster.fakes import FakeTransport, Fault
from tests.cluster.pairs import GREEDY, PEERS, REAL, Pair, all_back, answer, held_answers, moved, run_pair
from tests.cluster.test_pair import PROMPT, Alone
from tests.waiting import until
from twostroke.cluster import flight
from twostroke.cluster.pools import GONE, MOST_RESUMED, NO_RETRY, TOO_OFTEN
from twostroke.cluster.sockets import SharedMemoryTransport
from twostroke.ops.interface import BLOCK
from twostroke.record import replace
from twostroke.remote import client, process
from twostroke.remote.async_engine import ENGINE_GONE, AsyncEngine
from twostroke.remote.blocks import BlockExchange
from twostroke.remote.loop import EngineLoop
from twostroke.remote.messages import Expect, Expected
from twostroke.remote.process import ProcessEngine
from twostroke.sampling import SamplingParams
from twostroke.types import Event

FAULTS = {
    "refuse": Fault(refuse=True),
    "cut renewals": Fault(cut_renewals=True),
    "cut": Fault(cut=True),
    "corrupt": Fault(corrupt=True),
    "truncate": Fault(truncate=True),
    "forget": Fault(forget=2),
    "too late": Fault(delay=60.0),
}
LONG = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)


@pytest.fixture(scope="module")
def llama_alone(llama_folder: Path) -> Alone:
    return Alone(llama_folder)


def prompts(count: int) -> list[list[int]]:
    return [[(i * (2 * k + 3) + k) % 290 + 3 for i in range(40 + k)] for k in range(count)]


def test_every_fault_of_a_transport_costs_time_and_no_token(llama_folder: Path, llama_alone: Alone) -> None:
    transport = FakeTransport()
    want = [llama_alone.answer(prompt) for prompt in prompts(len(FAULTS))]

    async def scenario(engine: AsyncEngine, pair: Pair) -> None:
        for number, (prompt, fault) in enumerate(zip(prompts(len(FAULTS)), FAULTS.values(), strict=True)):
            transport.fault = lambda fault=fault: fault  # type: ignore[misc]
            assert await answer(engine, prompt) == want[number]
            await moved(pair)
            assert sum(pair.counts.failed.values()) == number + 1
            await all_back(engine, pair)
        assert pair.counts.failed == {"transfer": 3, "damaged or missing": 3, "deadline": 1}
        assert pair.counts.done == 0 and transport.open == 0
        assert pair.decode.counts.computed_tokens >= sum(map(len, prompts(len(FAULTS))))

    run_pair(llama_folder, scenario, lambda: transport, transfer_seconds=3.0)


def test_the_tokens_after_the_last_full_block_are_computed_where_their_bytes_do_not_come(
    llama_folder: Path, llama_alone: Alone
) -> None:
    want = llama_alone.answer(PROMPT)

    async def scenario(engine: AsyncEngine, pair: Pair) -> None:
        assert await answer(engine, PROMPT) == want
        await moved(pair)
        assert pair.counts.done == 1 and not pair.counts.failed
        assert pair.decode.counts.computed_tokens == len(PROMPT) % BLOCK + len(want[0][0]) - 1
        await all_back(engine, pair)

    run_pair(llama_folder, scenario, lambda: FakeTransport(lambda: Fault(forget=1)), decode={"speculate": "off"})


def test_a_lease_that_is_not_renewed_ends(llama_folder: Path, llama_alone: Alone) -> None:
    """The decode side waits longer than the lease lasts before it fetches, as a stopped process does."""
    want = llama_alone.answer(PROMPT)

    async def scenario(engine: AsyncEngine, pair: Pair) -> None:
        assert await answer(engine, PROMPT) == want
        await moved(pair)
        assert pair.prefill.worker.holder.leases.ended == {"expired": 1}
        assert pair.counts.failed == {"transfer": 1}

    run_pair(llama_folder, scenario, lambda: FakeTransport(lambda: Fault(delay=0.4)), lease=0.1)


def test_blocks_are_not_waited_for_beyond_the_deadline_of_the_request(
    llama_folder: Path, llama_alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The transfer itself may take ten minutes. A request without a deadline waits for it."""
    monkeypatch.setattr(flight, "LEAST_FETCH", 0.2)
    want = llama_alone.answer(PROMPT)
    transport = FakeTransport(lambda: Fault(delay=600.0))

    async def scenario(engine: AsyncEngine, pair: Pair) -> None:
        pair.decode.speed.token = 1e-6
        assert await asyncio.wait_for(answer(engine, PROMPT, replace(GREEDY, deadline=0.5)), 120) == want
        await moved(pair)
        assert pair.counts.failed == {"deadline": 1} and pair.counts.done == 0
        assert pair.prefill.worker.holder.leases.ended == {"failed": 1}
        await all_back(engine, pair)
        patient = engine.submit([prompts(1)[0]], GREEDY)
        await until(lambda: len(transport.fetched) == 2, "nothing was fetched")
        await asyncio.sleep(1.5)
        assert pair.moving and pair.counts.failed == {"deadline": 1}
        patient.close()
        ends = [piece.event.finish_reason async for piece in patient]
        assert ends[-1] in ("abort", "length")  # its worker may have written all of it before it is told

    run_pair(llama_folder, scenario, lambda: transport, lease=600.0, transfer_seconds=600.0)


def test_requests_that_the_caller_aborts_leave_nothing(llama_folder: Path) -> None:
    """At any moment: in the prefill engine, in a transfer, while it waits for room, in the decode engine."""
    rng = random.Random(5)

    async def one(engine: AsyncEngine, prompt: list[int]) -> str | None:
        stream = engine.submit([prompt], LONG)
        await asyncio.sleep(rng.random() * 0.12)
        stream.close()
        pieces = [piece async for piece in stream]
        ends = [piece.event.finish_reason for piece in pieces if piece.event.finish_reason is not None]
        assert len(ends) == 1
        return ends[0]

    async def scenario(engine: AsyncEngine, pair: Pair) -> None:
        for _ in range(3):
            ends = await asyncio.gather(*(one(engine, prompt) for prompt in prompts(12)))
            assert "abort" in ends
        assert await answer(engine, PROMPT)

    slow = FakeTransport(lambda: Fault(delay=rng.random() * 0.1))
    run_pair(llama_folder, scenario, lambda: slow, prefill={"max_batch_tokens": 16}, decode={"max_requests": 4})
    assert slow.open == 0


@pytest.mark.parametrize("copied", [True, False])
def test_blocks_that_are_lent_give_way_to_a_prompt_that_needs_them(
    llama_folder: Path, llama_alone: Alone, copied: bool
) -> None:
    """The prefill engine has room for one long prompt. Transfers that wait do not keep the next prompt from running.
    They bring their blocks if these were copied out."""
    many = [[(i * k) % 290 + 3 for i in range(150)] for k in (3, 5, 11)]
    want = [llama_alone.answer(prompt) for prompt in many]

    async def scenario(engine: AsyncEngine, pair: Pair) -> None:
        assert list(await asyncio.gather(*(answer(engine, prompt) for prompt in many))) == want
        await moved(pair)
        failed = sum(pair.counts.failed.values())
        assert failed == 0 if copied else 0 < failed <= 3

    small = {"kv_blocks": 11, "max_model_len": 170}
    slow = FakeTransport(lambda: Fault(delay=1.0))
    run_pair(llama_folder, scenario, lambda: slow, prefill=small, decode={"prefix_cache": copied})


def test_a_decode_engine_that_answers_too_late_keeps_nothing(
    llama_folder: Path, llama_alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it took the request is not known in time: the other engine goes on, and the late one gives all back."""
    want, plain, over = llama_alone.answer(PROMPT), BlockExchange.expect, threading.Event()

    def late(self: BlockExchange, message: Expect) -> Expected:
        over.wait(60)
        return plain(self, message)

    monkeypatch.setattr(BlockExchange, "expect", late)
    monkeypatch.setattr(client, "ANSWER_SECONDS", 1.5)

    async def scenario(engine: AsyncEngine, pair: Pair) -> None:
        assert await answer(engine, PROMPT) == want
        over.set()
        assert pair.prefill.counts.output_tokens == 12 and pair.counts.done == 0

    for transfer_seconds in (10.0, 1.0):
        over.clear()
        run_pair(llama_folder, scenario, transfer_seconds=transfer_seconds)


# ---- processes that are killed ---------------------------------------------------------------------------------------


def kill(engine: object, how: int = signal.SIGKILL) -> None:
    assert isinstance(engine, ProcessEngine) and engine.child is not None
    os.kill(engine.child.process.pid, how)


SLOW = """
import time, twostroke.remote.loop as loop
def slow(self, step=loop.EngineLoop._step):
    time.sleep(0.1 if self.blocks.followed else 0.0)
    return step(self)
loop.EngineLoop._step = slow
"""  # an engine that computes for another one


def test_a_prefill_process_is_killed(llama_folder: Path, llama_alone: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a transfer, then in the middle of a prefill: the decode engine goes on with the same tokens."""
    monkeypatch.setattr(process, "BOOT", SLOW + process.BOOT)  # a prompt is not computed before its engine is killed
    transport = FakeTransport()
    others = [[one + turn for one in reversed(PROMPT)] * 3 for turn in range(6)]
    want = llama_alone.answer(PROMPT[:31]), [llama_alone.answer(other) for other in others]

    async def strike(engine: AsyncEngine, pair: Pair, turn: int) -> None:
        """While it has a prompt, or after that."""
        await until(lambda: pair.prefill.worker.engine.healthy, "it was not started again")
        second = asyncio.ensure_future(answer(engine, others[turn]))
        await until(lambda: pair.prefill.counts.running or second.done(), "the prompt is not computed")
        kill(pair.prefill.worker.engine)
        assert await second == want[1][turn]
        await until(lambda: pair.prefill.losses == 2 + turn, "its death was not seen")

    async def scenario(engine: AsyncEngine, pair: Pair) -> None:
        first = asyncio.ensure_future(answer(engine, PROMPT[:31]))
        transport.gate.clear()
        await until(lambda: transport.fetched, "nothing was fetched")
        kill(pair.prefill.worker.engine)
        await until(lambda: pair.prefill.losses == 1, "its death was not seen")
        transport.gate.set()
        assert await first == want[0]
        await moved(pair)
        assert pair.counts.failed == {"transfer": 1} and pair.prefill.worker.holder.leases.ended == {"failed": 1}
        assert engine.client.healthy and pair.restarts == 0
        for turn in range(len(others)):  # until the prompt had not ended when its engine was killed
            await strike(engine, pair, turn)
            if pair.resumed:
                break
        assert pair.resumed == 1

    run_pair(llama_folder, scenario, lambda: transport, "process", prefill={"max_batch_tokens": 32})


def test_a_decode_process_is_killed(
    llama_folder: Path, llama_alone: Alone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of streams: they go on where they were, on the other engine. Without any engine each ends once."""
    want = [llama_alone.answer(prompt, LONG) for prompt in prompts(3)]

    async def scenario(engine: AsyncEngine, pair: Pair) -> None:
        streams = [asyncio.ensure_future(answer(engine, prompt, LONG)) for prompt in prompts(3)]
        await until(lambda: sum(len(flight.written) for flight in pair.flights.values()) > 60, "nothing was written")
        kill(pair.decode.worker.engine)
        go_on()
        assert [await stream for stream in streams] == want
        assert pair.resumed >= 1 and pair.restarts == 0
        await until(lambda: pair.decode.worker.engine.healthy, "it was not started again")  # else it may come between
        hold.touch()
        lost = engine.submit(prompts(2), LONG)
        await until(lambda: any(flight.written for flight in pair.flights.values()), "nothing was written")
        for side in (pair.prefill, pair.decode):
            kill(side.worker.engine)
        go_on()
        pieces = [piece async for piece in lost]
        assert [piece.event.error for piece in pieces if piece.event.finish_reason is not None] == [ENGINE_GONE] * 2
        await until(lambda: pair.prefill.usable and pair.decode.usable, "they were not started again")
        assert await answer(engine, prompts(1)[0], LONG) == want[0]

    hold = tmp_path / "hold"
    with held_answers(monkeypatch, hold) as go_on:
        run_pair(llama_folder, scenario, lambda: SharedMemoryTransport(PEERS), "process")


def test_an_answer_without_retry_ends_with_an_error(
    llama_folder: Path, llama_alone: Alone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has begun when its engine is killed. The one beside it goes on elsewhere."""
    once = replace(LONG, retry=False)
    want = [llama_alone.answer(prompt, LONG) for prompt in prompts(3)]

    async def ended(engine: AsyncEngine, prompt: list[int]) -> tuple[list[int], list[str | None]]:
        pieces = [piece.event async for piece in engine.submit([prompt], once)]
        tokens = [token for event in pieces for token in event.token_ids]
        return tokens, [event.error for event in pieces if event.finish_reason is not None]

    async def scenario(engine: AsyncEngine, pair: Pair) -> None:
        first = asyncio.ensure_future(ended(engine, prompts(1)[0]))
        second = asyncio.ensure_future(answer(engine, prompts(2)[1], LONG))
        await until(
            lambda: [len(flight.written) > 30 for flight in pair.flights.values()] == [True, True],
            "the answers have not begun",
        )
        kill(pair.decode.worker.engine)
        go_on()
        tokens, errors = await first
        assert tokens == list(want[0][0][0])[: len(tokens)] and len(tokens) > 30 and errors == [NO_RETRY]
        assert await second == want[1]
        await until(lambda: pair.decode.usable, "it was not started again")
        third = asyncio.ensure_future(ended(engine, prompts(3)[2]))
        assert await third == (list(want[2][0][0]), [None])

    off = {"speculate": "off"}  # both answers grow by one token in each step
    with held_answers(monkeypatch, tmp_path / "hold", answers=2) as go_on:
        run_pair(llama_folder, scenario, lambda: SharedMemoryTransport(PEERS), "process", prefill=off, decode=off)


def test_an_answer_whose_workers_are_lost_again_and_again_ends_with_an_error(
    llama_folder: Path, llama_alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that ends its workers does not end all of them. Here they only count as lost."""
    want = list(llama_alone.answer(PROMPT, LONG)[0][0])
    step = EngineLoop._step

    def slow(self: EngineLoop) -> list[Event]:
        time.sleep(0.01)
        return step(self)

    monkeypatch.setattr(EngineLoop, "_step", slow)

    async def scenario(engine: AsyncEngine, pair: Pair) -> None:
        stream, written = engine.submit([PROMPT], LONG), 0
        (one,) = pair.flights.values()
        for turn in range(MOST_RESUMED + 1):
            await until(lambda before=written: len(one.written) > before and not pair._moves, "nothing was written")  # type: ignore[misc]
            written, lost, number = len(one.written), one.member, one.number
            assert lost is not None and pair.resumed == turn
            pair.on_lost(lost, "it ended")
            lost.worker.abort([number])
        pieces = [piece.event async for piece in stream]
        tokens = [token for event in pieces for token in event.token_ids]
        assert [event.error for event in pieces if event.finish_reason is not None] == [TOO_OFTEN]
        assert tokens == want[: len(tokens)] and MOST_RESUMED < len(tokens) < len(want)
        assert pair.prefill.usable and pair.decode.usable

    run_pair(llama_folder, scenario, prefill={"speculate": "off"}, decode={"speculate": "off"})


# ---- storms ----------------------------------------------------------------------------------------------------------


def random_fault(rng: random.Random) -> Fault:
    if rng.random() < 0.5:
        return Fault(delay=rng.random() * 0.05)
    return rng.choice(list(FAULTS.values())[:-1])


@pytest.mark.slow
def test_five_hundred_random_faults(llama_folder: Path, llama_alone: Alone) -> None:
    rng = random.Random(11)
    many = prompts(20)
    params = [GREEDY, SamplingParams(max_tokens=20, temperature=1.0, seed=3)]
    transport = FakeTransport(lambda: random_fault(rng))

    async def one(engine: AsyncEngine) -> None:
        prompt, asked = rng.choice(many)[: rng.randint(16, 60)], rng.choice(params)
        if rng.random() < 0.2:
            stream = engine.submit([prompt], asked)
            await asyncio.sleep(rng.random() * 0.1)
            stream.close()
            assert sum([piece.event.finish_reason is not None async for piece in stream]) == 1
        else:
            assert await answer(engine, prompt, asked) == llama_alone.answer(prompt, asked)

    async def scenario(engine: AsyncEngine, pair: Pair) -> None:
        counts = pair.counts
        while sum(counts.failed.values()) < 500:
            await asyncio.gather(*(one(engine) for _ in range(8)))
        await all_back(engine, pair)
        assert counts.done > 100 and transport.open == 0

    run_pair(llama_folder, scenario, lambda: transport, prefill={"prefix_cache": False}, decode={"prefix_cache": False})


@pytest.mark.slow
@pytest.mark.parametrize("transport", REAL)
def test_processes_that_are_killed_and_stopped_again_and_again(
    llama_folder: Path, llama_alone: Alone, transport: type
) -> None:
    """One engine at a time: every answer is right. Each round ends with all blocks and leases back."""
    rng = random.Random(13)

    async def one(engine: AsyncEngine, prompt: list[int]) -> None:
        await asyncio.sleep(rng.random() * 0.3)
        assert await answer(engine, prompt, LONG) == llama_alone.answer(prompt, LONG)

    async def scenario(engine: AsyncEngine, pair: Pair) -> None:
        for _ in range(8):
            await until(lambda: pair.prefill.usable and pair.decode.usable, "they were not started again")
            running = [asyncio.ensure_future(one(engine, prompt)) for prompt in prompts(6)]
            await asyncio.sleep(rng.random() * 0.4)
            side = rng.choice([pair.prefill, pair.decode])
            stopped = rng.random() < 0.4
            kill(side.worker.engine, signal.SIGSTOP if stopped else signal.SIGKILL)
            if stopped:
                await asyncio.sleep(1.0)
                kill(side.worker.engine, signal.SIGCONT)
            await asyncio.gather(*running)
            await all_back(engine, pair, 10)
        assert pair.restarts == 0

    run_pair(llama_folder, scenario, lambda: transport(PEERS), "process")


def test_a_request_without_any_engine_ends_at_once(llama_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are lost between the check of their health and the request."""
    monkeypatch.setattr(Pair, "healthy", True)

    async def scenario(engine: AsyncEngine, pair: Pair) -> None:
        pair.prefill.up = pair.decode.up = False
        stream = engine.submit([PROMPT[:10]], GREEDY)
        pieces = [piece async for piece in stream]
        assert [piece.event.error for piece in pieces] == [GONE]
        pair.prefill.up = pair.decode.up = True

    run_pair(llama_folder, scenario)
