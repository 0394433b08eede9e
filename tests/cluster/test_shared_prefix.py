"""A worker that is to compute a prompt gets the beginning from another one that has it: the same tokens, sooner."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.cluster.fakes import FakeTransport, Fault
from tests.cluster.pairs import GREEDY, PEERS, SETTINGS, all_back, answer, client, moved
from tests.cluster.test_faults import FAULTS, kill
from tests.cluster.test_pair import Alone
from tests.waiting import until
from twostroke.cluster.pools import PlacedWorker, Pools
from twostroke.cluster.router import Role
from twostroke.cluster.sockets import SharedMemoryTransport
from twostroke.cluster.transport import Transport
from twostroke.cluster.worker import Worker
from twostroke.remote.async_engine import AsyncEngine
from twostroke.sampling import SamplingParams

SHARED = [(7 * i) % 290 + 3 for i in range(128)]
PARAMS = GREEDY
SAMPLES = SamplingParams(temperature=1.0, seed=5, max_tokens=6, n=3)


@pytest.fixture(scope="module")
def llama_alone(llama_folder: Path) -> Alone:
    return Alone(llama_folder)


class Three(Pools):
    """Two prefill workers and a decode worker."""

    def prefill_at(self, name: str, seconds: float = 1.0) -> None:
        """The next prompts are computed there, for all that the router knows: the first worker is fast, and busy where
        the second is to do it, which takes so many seconds for a token."""
        first, second = self.members["p0"], self.members["p1"]
        first.speed.token, second.speed.token = 1e-5, seconds
        first.queued = 0 if name == "p0" else 10**8
        self._stale.update({first: None, second: None})


def run_three(
    folder: Path,
    scenario: Callable[[AsyncEngine, Three], Awaitable[None]],
    transport: Callable[[], Transport] = FakeTransport,
    kind: str = "thread",
    prefill: dict | None = None,
    mixed: tuple[str, ...] = (),
) -> None:
    """prefill: settings of two engines beside SETTINGS. mixed: the ways in which they compute.
    Afterwards every block is back in all engines."""

    async def whole() -> None:
        one = transport()
        roles = {"p0": Role.PREFILL, "p1": Role.PREFILL, "d": Role.DECODE}
        own = {Role.PREFILL: SETTINGS | (prefill or {}), Role.DECODE: SETTINGS}
        workers = {
            name: PlacedWorker(
                role,
                Worker(
                    client(folder, kind, own[role], mixed=mixed), one if isinstance(one, FakeTransport) else transport()
                ),
            )
            for name, role in roles.items()
        }
        three = Three(workers, apart=True)
        engine = AsyncEngine(folder, SETTINGS, client=three, max_queue=200)
        try:
            await asyncio.wait_for(engine.start(), 600)
            await asyncio.wait_for(scenario(engine, three), 600)
            three.prefill_at("p0")
            await all_back(engine, three)
            await until(lambda: not three.parcels._tasks, "parcels are left")
        finally:
            await engine.stop()

    asyncio.run(whole())


async def at(engine: AsyncEngine, three: Three, name: str, prompt: list[int], params: SamplingParams = PARAMS) -> list:
    """The answer to a prompt that one prefill worker computes."""
    three.prefill_at(name)
    before = three.members[name].counts.computed_tokens
    found = await answer(engine, prompt, params)
    await moved(three)
    assert three.members[name].counts.computed_tokens > before, "another worker computed it"
    return found


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_a_prefill_worker_fetches_what_another_has(llama_folder: Path, llama_alone: Alone, kind: str) -> None:
    prompts = [[*SHARED, *range(20 + number, 40 + number)] for number in range(3)]
    want = [llama_alone.answer(prompt) for prompt in prompts[:2]] + [llama_alone.answer(prompts[2], SAMPLES)]

    async def scenario(engine: AsyncEngine, three: Three) -> None:
        second = three.members["p1"]
        assert await at(engine, three, "p0", prompts[0]) == want[0]
        assert three.counts.shared == 0
        assert await at(engine, three, "p1", prompts[1]) == want[1]
        assert three.counts.shared == 8 and second.counts.computed_tokens == 20, "the beginning was computed again"
        assert await at(engine, three, "p1", prompts[2], SAMPLES) == want[2]
        assert three.counts.shared == 8, "what is there is not fetched again"
        assert not three.counts.failed

    transport = FakeTransport if kind == "thread" else lambda: SharedMemoryTransport(PEERS)
    run_three(llama_folder, scenario, transport, kind)


def test_samples_of_one_prompt_wait_for_its_beginning_together(llama_folder: Path, llama_alone: Alone) -> None:
    prompts = [[*SHARED, *range(20 + number, 40 + number)] for number in range(2)]
    want = llama_alone.answer(prompts[1], SAMPLES)

    async def scenario(engine: AsyncEngine, three: Three) -> None:
        await at(engine, three, "p0", prompts[0])
        assert await at(engine, three, "p1", prompts[1], SAMPLES) == want
        assert three.counts.shared == 8 and three.members["p1"].counts.computed_tokens < 128

    run_three(llama_folder, scenario)


def test_what_does_not_come_is_computed(llama_folder: Path, llama_alone: Alone) -> None:
    transport = FakeTransport()

    async def scenario(engine: AsyncEngine, three: Three) -> None:
        for number, fault in enumerate(FAULTS.values()):
            shared = [(7 * i + number) % 290 + 3 for i in range(64)]
            transport.fault = Fault
            await at(engine, three, "p0", [*shared, 5, 6])
            transport.fault = lambda fault=fault: Fault() if three._moves else fault  # type: ignore[misc]
            three.prefill_at("p1", 0.005)  # what would take longer than 0.32 s is not waited for
            prompt = [*shared, *range(30, 50)]
            assert await answer(engine, prompt, PARAMS) == llama_alone.answer(prompt, PARAMS)
            await moved(three)
        assert three.counts.shared == 0 and transport.open == 0

    run_three(llama_folder, scenario, lambda: transport)


def test_a_caller_leaves_and_the_holder_dies_while_a_beginning_comes(llama_folder: Path, llama_alone: Alone) -> None:
    transport = FakeTransport()
    prompts = [[*SHARED, *range(20 + number, 40 + number)] for number in range(3)]

    async def scenario(engine: AsyncEngine, three: Three) -> None:
        await at(engine, three, "p0", prompts[0])
        transport.fetched.clear()
        transport.fault = lambda: Fault(delay=0.3)
        three.prefill_at("p1")
        stream = engine.submit([prompts[1]], PARAMS)
        await until(lambda: transport.fetched, "nothing was fetched")
        stream.close()
        assert [piece.event.finish_reason async for piece in stream] == ["abort"]
        transport.fetched.clear()
        running = asyncio.ensure_future(answer(engine, prompts[2], PARAMS))
        await until(lambda: transport.fetched, "nothing was fetched")
        kill(three.members["p0"].worker.engine)
        assert await running == llama_alone.answer(prompts[2], PARAMS)
        await until(lambda: three.members["p0"].losses == 1, "its death was not seen")

    run_three(llama_folder, scenario, lambda: transport, "process")
