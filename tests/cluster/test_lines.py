"""Workers that join a router over a socket: the same protocol as on Ray, with agents as tasks of this process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

import twostroke
from tests.cluster.pairs import NAMES, SECRET, SETTINGS, all_back, answer, held_answers, moved
from tests.cluster.test_faults import LONG, prompts
from tests.cluster.test_pair import PROMPT, SAMPLED, Alone
from tests.waiting import until
from twostroke.cluster import agent
from twostroke.cluster.agent import Agent, Post, join, shared_memory
from twostroke.cluster.channel import derive
from twostroke.cluster.control import Joined
from twostroke.cluster.hub import Hub
from twostroke.cluster.pools import PlacedWorker, Pools
from twostroke.cluster.remote_worker import RemoteWorker, Silence
from twostroke.cluster.router import Role
from twostroke.cluster.transport import TransferError
from twostroke.errors import ConfigError
from twostroke.remote.async_engine import AsyncEngine
from twostroke.sampling import Grammar, SamplingParams

assert derive(SECRET, "names") == NAMES
Scenario = Callable[[AsyncEngine, "Lines"], Awaitable[None]]


@pytest.fixture(scope="module")
def llama_alone(llama_folder: Path) -> Alone:
    return Alone(llama_folder)


@pytest.fixture(autouse=True)
def log_level() -> Iterator[None]:
    """An agent sets the log level of its process, which is the process of all tests here."""
    log = logging.getLogger("twostroke")
    before = log.level
    yield
    log.setLevel(before)


class Lines(Pools):
    """Workers whose agents run here, each with an engine process of its own."""

    def __init__(self, folder: Path, roles: dict[str, Role], settings: dict, silence: Silence | None):
        self.remote = {
            number: RemoteWorker(name, folder, SETTINGS | settings, lambda: None, silence)
            for number, name in enumerate(roles)
        }
        workers = zip(roles.items(), self.remote.values(), strict=True)
        super().__init__({name: PlacedWorker(role, worker) for (name, role), worker in workers}, apart=True)
        self.hub = Hub(derive(SECRET, "control"), self.remote)
        self.agents: dict[int, Agent] = {}
        self.tasks: dict[int, asyncio.Task] = {}

    def listen(self) -> None:
        self.address = self.hub.listen("127.0.0.1")
        for number in self.remote:
            self.place(number)

    def place(self, number: int) -> None:
        made = self.agents[number] = Agent(Post(number, self.address, SECRET, "127.0.0.1", 1))
        self.tasks[number] = asyncio.get_running_loop().create_task(made.run())

    def pid(self, number: int) -> int:
        worker = self.agents[number].worker
        assert worker is not None
        return worker.engine.child.process.pid  # type: ignore[attr-defined]


def run_lines(
    folder: Path, roles: dict[str, Role], scenario: Scenario, silence: Silence | None = None, **settings: object
) -> None:
    async def whole() -> None:
        pools = Lines(folder, roles, settings, silence)
        engine = AsyncEngine(folder, SETTINGS, client=pools, max_queue=200)
        pools.listen()
        try:
            await asyncio.wait_for(engine.start(), 600)
            await asyncio.wait_for(scenario(engine, pools), 600)
            await all_back(engine, pools)
        finally:
            await engine.stop()
            await asyncio.wait(pools.tasks.values(), timeout=20)
            await pools.hub.close()

    asyncio.run(whole())


PAIR = {"prefill-0": Role.PREFILL, "decode-0": Role.DECODE}


def test_workers_join_and_share_requests(llama_folder: Path, llama_alone: Alone) -> None:
    choice = SamplingParams(max_tokens=30, temperature=1.0, seed=8, grammar=Grammar("regex", "(yes|no|perhaps)"))
    want = [llama_alone.answer(PROMPT), llama_alone.answer(PROMPT[:50], SAMPLED), llama_alone.answer(PROMPT, choice)]

    async def scenario(engine: AsyncEngine, pools: Lines) -> None:
        assert await answer(engine, PROMPT) == want[0]
        assert await answer(engine, PROMPT[:50], SAMPLED) == want[1]
        assert await answer(engine, PROMPT, choice) == want[2]
        await moved(pools)
        assert pools.counts.done == 4 and pools.counts.bytes > 0 and not pools.counts.failed
        assert pools.link.link.bandwidth > 1e4
        await engine.change({"max_gap": 0.4})
        assert engine.intake.settings.max_gap == 0.4
        with pytest.raises(ConfigError, match="cannot change while the engine runs"):
            await engine.change({"kv_blocks": 4})
        assert await engine.steps(0, 3)
        stream = engine.submit([PROMPT[::-1]], SamplingParams(max_tokens=40, temperature=0, ignore_eos=True))
        async for _ in stream:
            pass
        timeline = stream.answers[0].sample.timeline
        assert 0 < timeline.transfer < timeline.decode
        assert timeline.queue + timeline.prefill + timeline.decode == pytest.approx(timeline.e2e)

    run_lines(llama_folder, PAIR, scenario)


def test_blocks_travel_before_their_requests(llama_folder: Path, llama_alone: Alone) -> None:
    """Those of a prompt that is computed, and those of a beginning that another worker has."""
    many = [[*PROMPT, *PROMPT, number] for number in (5, 9)]
    want = [llama_alone.answer(prompt) for prompt in many]

    async def scenario(engine: AsyncEngine, pools: Lines) -> None:
        first, second = pools.members["prefill-0"], pools.members["prefill-1"]
        first.speed.token, second.speed.token = 1e-5, 1.0
        pools._stale.update({first: None, second: None})
        assert await answer(engine, many[0]) == want[0]
        await moved(pools)
        assert pools.counts.early >= 2 and pools.counts.blocks == 10 and not pools.counts.failed
        first.speed.token, first.queued, second.speed.token = 1e-5, 10**8, 1.0  # it would take long there
        pools._stale.update({first: None, second: None})
        assert await answer(engine, many[1]) == want[1]
        await moved(pools)
        assert pools.counts.shared == 9 and second.counts.computed_tokens == 151 - 144 and not pools.counts.failed
        first.queued = 0

    roles = {"prefill-0": Role.PREFILL, "prefill-1": Role.PREFILL, "decode-0": Role.DECODE}
    run_lines(llama_folder, roles, scenario, max_batch_tokens=32)


def test_a_worker_whose_line_is_cut_joins_again(
    llama_folder: Path, llama_alone: Alone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of streams: they go on at the other worker, with the same tokens."""
    want = [llama_alone.answer(prompt, LONG) for prompt in prompts(3)]

    async def scenario(engine: AsyncEngine, pools: Lines) -> None:
        streams = [asyncio.ensure_future(answer(engine, prompt, LONG)) for prompt in prompts(3)]
        await until(lambda: sum(len(flight.written) for flight in pools.flights.values()) >= 60, "nothing was written")
        pools.agents[1].line.close()
        go_on()
        await asyncio.wait((pools.tasks[1],))
        assert [await stream for stream in streams] == want
        assert pools.resumed >= 1 and pools.restarts == 0
        assert engine.intake.settings.max_requests == pools.members["prefill-0"].worker.ready.settings.max_requests
        pools.place(1)
        await until(lambda: pools.members["decode-0"].usable, "it has not joined again")
        before = pools.counts.done
        assert await answer(engine, prompts(1)[0], LONG) == want[0]
        await moved(pools)
        assert pools.counts.done == before + 1
        steps = engine.counts.steps
        assert steps >= 100, "what a lost worker has counted stays"

    with held_answers(monkeypatch, tmp_path / "hold") as go_on:
        run_lines(llama_folder, PAIR, scenario, speculate="off")


@pytest.mark.slow
def test_what_a_stopped_engine_has_goes_on_elsewhere(
    llama_folder: Path, llama_alone: Alone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = [llama_alone.answer(prompt, LONG) for prompt in prompts(3)]

    async def scenario(engine: AsyncEngine, pools: Lines) -> None:
        streams = [asyncio.ensure_future(answer(engine, prompt, LONG)) for prompt in prompts(3)]
        await until(lambda: sum(len(flight.written) for flight in pools.flights.values()) >= 30, "nothing was written")
        pid = pools.pid(1)
        os.kill(pid, signal.SIGSTOP)
        go_on()
        try:
            assert [await stream for stream in streams] == want
            assert pools.members["decode-0"].up and pools.resumed >= 1
        finally:
            os.kill(pid, signal.SIGCONT)

    with held_answers(monkeypatch, tmp_path / "hold") as go_on:
        run_lines(llama_folder, PAIR, scenario)


def test_a_stranger_does_not_join(llama_folder: Path) -> None:
    async def scenario() -> None:
        worker = RemoteWorker("worker-0", llama_folder, {}, lambda: None)
        hub = Hub(derive(SECRET, "control"), {0: worker})
        address = hub.listen("127.0.0.1")
        with pytest.raises(TransferError):
            await join(Post(0, address, b"another secret of 24 byt", "127.0.0.1", 1))
        line = await join(Post(0, address, SECRET, "127.0.0.1", 1))
        line.send(Joined(7, twostroke.__version__, 1, "here"))
        with pytest.raises(TransferError):
            await asyncio.wait_for(line.receive(), 10)
        assert worker.joined is None
        host, port = address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET / HTTP/1.1\r\n" * 20)
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 20) == b""
        writer.close()
        line.close()
        await hub.close()

    asyncio.run(scenario())


def test_another_version_is_refused_with_a_sentence(llama_folder: Path) -> None:
    async def scenario() -> None:
        worker = RemoteWorker("worker-0", llama_folder, {}, lambda: None)
        hub = Hub(derive(SECRET, "control"), {0: worker})
        line = await join(Post(0, hub.listen("127.0.0.1"), SECRET, "127.0.0.1", 1))
        line.send(Joined(0, "0.0.9", 1, "other-machine"))
        with pytest.raises(ConfigError, match="other-machine has twostroke"):
            await asyncio.wait_for(worker._first, 10)
        line.close()
        await hub.close()

    asyncio.run(scenario())


def test_workers_of_one_machine_share_its_memory(llama_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "free_memory", lambda: 10**9)
    alone, shared = shared_memory({"threads": 1}, llama_folder, 1), shared_memory({"threads": 1}, llama_folder, 4)
    assert "kv_memory" not in alone and 5e7 < shared["kv_memory"] < 2.5e8
    assert shared_memory({"kv_blocks": 9}, llama_folder, 4) == {"kv_blocks": 9}
