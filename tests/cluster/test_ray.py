"""Deployments on a real Ray: the tokens of one engine alone, whatever is killed, stopped or cut on the way."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.bad_network import BadNetwork, Shaken, StuckNetwork
from tests.cluster.pairs import GREEDY, SETTINGS, all_back, answer, moved
from tests.cluster.rays import SHAPES, Standing, agent_pid, all_up, engine_pid, run_deployment
from tests.cluster.test_faults import LONG, prompts
from tests.cluster.test_pair import PROMPT, Alone
from tests.cluster.test_storm import hurt
from tests.waiting import until
from twostroke.cluster.deployment import Deployment, DeploymentPlan
from twostroke.cluster.member import Member
from twostroke.cluster.router import Role
from twostroke.errors import ConfigError
from twostroke.remote.async_engine import AsyncEngine
from twostroke.remote.client import EngineError
from twostroke.remote.messages import Report
from twostroke.remote.nixl_agent import package
from twostroke.sampling import Grammar, SamplingParams

pytestmark = pytest.mark.slow
SEED = os.environ.get("TWOSTROKE_SEED", "1")  # of the random levers


@pytest.fixture(scope="module")
def llama_alone(llama_folder: Path) -> Alone:
    return Alone(llama_folder)


def shape(address: str | None, kind: str = "1+1", **more: object) -> DeploymentPlan:
    settings = SETTINGS | {"max_batch_tokens": 64} | dict(more.pop("settings", {}))  # type: ignore[call-overload]
    return DeploymentPlan(**SHAPES[kind], settings=settings, address=address, apart=True, **more)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def standing(llama_folder: Path, ray_address: str) -> Iterator[Standing[Shaken]]:
    """Two workers of each kind, for several tests."""
    levers = {"speculate": "off", "prefix_cache": False}
    with contextlib.closing(
        Standing(Shaken, llama_folder, shape(ray_address, "2+2", share_cores=True, settings=levers))
    ) as running:
        yield running


class WhenWritten:
    """Does something at the moment when requests in flight have so many tokens."""

    def __init__(self, deployment: Deployment, count: int, act: Callable[[], None]):
        self.deployment, self.count, self.act, self.done = deployment, count, act, False
        deployment.on_report = self.on_report  # type: ignore[method-assign]

    def on_report(self, member: Member, report: Report) -> None:
        Deployment.on_report(self.deployment, member, report)
        if not self.done and sum(len(flight.written) for flight in self.deployment.flights.values()) >= self.count:
            self.done = True
            del self.deployment.on_report
            self.act()


def test_a_prefill_worker_is_killed(llama_alone: Alone, standing: Standing[Shaken]) -> None:
    """In the middle of prompts: they are computed elsewhere, and the worker is there again."""

    async def strike(engine: AsyncEngine, deployment: Deployment, pid_of: Callable, turn: int) -> bool:
        """False: the prompts were done before a report said that one is being computed."""
        many = [([(one + turn) % 290 + 3 for one in prompt] * 6)[:200] for prompt in prompts(6)]  # no worker has them
        want = [llama_alone.answer(prompt) for prompt in many]
        running = [asyncio.ensure_future(answer(engine, prompt)) for prompt in many]
        pool = [deployment.members[name] for name in ("prefill-0", "prefill-1")]
        while not any(member.counts.running for member in pool) and not all(one.done() for one in running):
            await asyncio.sleep(0.001)
        hit = next((member for member in pool if member.counts.running), None)
        before = 0 if hit is None else hit.losses
        if hit is not None:
            os.kill(pid_of(deployment, hit.name), signal.SIGKILL)
        assert [await one for one in running] == want
        if hit is None:
            return False
        began = time.monotonic()
        await all_back(engine, deployment, 10)
        await until(lambda: hit.losses > before, "its death was not seen")
        await all_up(deployment)
        print(f"back after {time.monotonic() - began:.1f} s")
        assert hit.losses == before + 1
        return True

    async def scenario(engine: AsyncEngine, deployment: Deployment) -> None:
        for number, pid_of in enumerate((agent_pid, engine_pid)):
            for turn in range(5 * number, 5 * number + 5):
                if await strike(engine, deployment, pid_of, turn):
                    break
            else:
                pytest.fail("no prompt was being computed in five turns")
        assert deployment.restarts == 0
        done = deployment.counts.done
        assert await answer(engine, PROMPT) == llama_alone.answer(PROMPT)
        await moved(deployment)
        assert deployment.counts.done == done + 1

    standing.run(scenario)


@pytest.mark.skipif(package() is not None, reason="NIXL is installed: it reads past the test's network")
def test_a_worker_is_lost_in_the_middle_of_a_transfer(llama_alone: Alone, standing: Standing[Shaken]) -> None:
    """A part of the blocks has come, and no more does. The worker that has them is lost, or the one that waits."""

    async def strike(
        engine: AsyncEngine, deployment: Shaken, turn: int, role: Role, pid_of: Callable, how: signal.Signals
    ) -> None:
        prompt = [(one * 7 + turn) % 290 + 3 for one in range(150 + turn)]
        network = deployment.network = StuckNetwork()
        running = asyncio.ensure_future(answer(engine, prompt))
        await until(lambda: network.stuck and deployment.moving, "no blocks are on their way")
        (flight,) = deployment.moving
        hit = deployment.offered if role is Role.PREFILL else flight.member
        assert hit is not None and hit.role is role and len(flight.written) == 1
        before, failed = hit.losses, sum(deployment.counts.failed.values())
        began = time.monotonic()
        os.kill(pid_of(deployment, hit.name), how)
        assert await running == llama_alone.answer(prompt)
        assert time.monotonic() - began < 20
        await moved(deployment)  # the answer may be complete before
        if role is Role.PREFILL:
            assert sum(deployment.counts.failed.values()) == failed + 1, "the other worker computes the prompt"
        deployment.network = None
        await until(lambda: hit.losses > before, "its loss was not seen")
        await all_up(deployment)
        await asyncio.wait_for(all_back(engine, deployment), 10)
        await network.close()

    async def scenario(engine: AsyncEngine, deployment: Shaken) -> None:
        cases = [
            (role, pid_of, how)
            for role in (Role.PREFILL, Role.DECODE)
            for pid_of, how in ((agent_pid, signal.SIGKILL), (engine_pid, signal.SIGKILL), (agent_pid, signal.SIGSTOP))
        ]
        for turn, case in enumerate(cases):
            await strike(engine, deployment, turn, *case)
        assert deployment.restarts == 0

    standing.run(scenario)


def test_a_decode_worker_is_killed_or_stopped(llama_alone: Alone, standing: Standing[Shaken]) -> None:
    """In the middle of streams: they go on at another worker after what was streamed."""
    want = [llama_alone.answer(prompt, LONG) for prompt in prompts(4)]

    async def strike(engine: AsyncEngine, deployment: Deployment, pid_of: Callable, how: signal.Signals) -> bool:
        """False: the worker had written all its answers before it was hit."""

        def hit() -> None:
            writers = [one for one in deployment.members.values() if one.name.startswith("decode")]
            busiest = max(writers, key=lambda one: one.streams)
            os.kill(pid_of(deployment, busiest.name), how)

        before, began = deployment.resumed, time.monotonic()
        struck = WhenWritten(deployment, 12, hit)
        assert list(await asyncio.gather(*(answer(engine, prompt, LONG) for prompt in prompts(4)))) == want
        assert struck.done and time.monotonic() - began < 20
        resumed = deployment.resumed > before
        await all_up(deployment)
        await all_back(engine, deployment, 10)
        return resumed

    async def scenario(engine: AsyncEngine, deployment: Deployment) -> None:
        for pid_of, how in (
            (agent_pid, signal.SIGKILL),
            (engine_pid, signal.SIGKILL),
            (agent_pid, signal.SIGSTOP),
            (engine_pid, signal.SIGSTOP),
        ):
            for _ in range(5):
                if await strike(engine, deployment, pid_of, how):
                    break
            else:
                pytest.fail("no worker was hit in the middle of an answer in five turns")
        assert deployment.restarts == 0

    standing.run(scenario)


def test_without_any_worker_each_answer_ends_once(llama_alone: Alone, standing: Standing[Shaken]) -> None:
    async def scenario(engine: AsyncEngine, deployment: Deployment) -> None:
        def strike() -> None:
            for name in deployment.members:
                os.kill(agent_pid(deployment, name), signal.SIGKILL)

        for _ in range(5):  # until they are hit in the middle of all answers
            stream = engine.submit(prompts(3), LONG)
            WhenWritten(deployment, 20, strike)
            ends = [piece.event.error async for piece in stream if piece.event.finish_reason is not None]
            assert len(ends) == 3
            if all(ends):
                break
            await all_up(deployment)
        assert all(ends)
        with pytest.raises(EngineError):
            engine.submit([PROMPT], GREEDY)
        await all_up(deployment)
        assert await answer(engine, PROMPT) == llama_alone.answer(PROMPT)

    standing.run(scenario)


# ---- identical tokens under random levers and faults -----------------------------------------------------------------


GRAMMARS = (None, None, Grammar("regex", "(yes|no|perhaps)( [a-z]{1,8})*"))


def levers(rng: random.Random) -> dict:
    caches = rng.random() < 0.7
    return {
        "max_batch_tokens": rng.choice([16, 50, 512]),
        "max_requests": rng.choice([2, 5, 16]),
        "prefix_cache": caches,
        "speculate": rng.choice(["auto", "off"]),
        "policy": rng.choice(["fcfs", "shortest", "prefill-first"]),
        "batching": rng.choice(["continuous", "continuous", "static"]),
        "kv_blocks": rng.choice([40, 60, 200]),
        "kv_offload": rng.choice([0, 1 << 17]) if caches else 0,
    }


async def one_request(engine: AsyncEngine, alone: Alone, rng: random.Random) -> None:
    shared = [(7 * i + 3) % 300 + 3 for i in range(rng.choice([0, 16, 45, 100]))]
    prompt = shared + [(rng.randrange(20) + 11 * i) % 300 + 3 for i in range(rng.randint(1, 60))]
    params = SamplingParams(
        max_tokens=rng.randint(1, 30), temperature=rng.choice([0.0, 1.0]), seed=17, n=rng.choice([1, 1, 3]), logprobs=1,
        grammar=rng.choice(GRAMMARS), frequency_penalty=rng.choice([0.0, 0.0, 0.7]),
    )  # fmt: skip
    await asyncio.sleep(rng.random() * 0.3)
    if rng.random() < 0.1:
        stream = engine.submit([prompt], params)
        await asyncio.sleep(rng.random() * 0.05)
        stream.close()
        ends = [piece async for piece in stream if piece.event.finish_reason is not None]
        assert len(ends) == params.n
    else:
        found, want = await answer(engine, prompt, params), alone.answer(prompt, params)
        assert [one[:2] for one in found] == [one[:2] for one in want]
        assert found == want, "the tokens are right, and log probabilities are not"


@pytest.mark.parametrize(
    ("kind", "family", "kv_dtype"),
    [("1+1", "llama", "int8"), ("2+2", "llama", "int4"), ("1+1", "gemma", "int4"), ("2+2", "gemma", "float16")],
)
def test_tokens_do_not_depend_on_levers_and_faults(
    llama_folder: Path, gemma_folder: Path, ray_address: str, kind: str, family: str, kv_dtype: str
) -> None:
    """Greedy and seeded, with windows (gemma) and without. Workers are killed and stopped, on a bad network."""
    rng = random.Random(f"{kind} {family} {SEED}")
    folder = gemma_folder if family == "gemma" else llama_folder
    alone = Alone(folder, kv_dtype=kv_dtype)
    common = {"max_model_len": 192, "kv_dtype": kv_dtype}
    made = shape(
        ray_address, kind, settings=common, prefill_settings=levers(rng), decode_settings=levers(rng), share_cores=True
    )

    async def scenario(engine: AsyncEngine, deployment: Shaken) -> None:
        network = deployment.network = BadNetwork(rng, 0.3)
        happened: Counter[str] = Counter()
        for _ in range(3):
            running = [asyncio.ensure_future(one_request(engine, alone, rng)) for _ in range(12)]
            await asyncio.sleep(rng.random() * 0.3)
            await hurt(deployment, rng, happened)
            await asyncio.gather(*running)
            await all_back(engine, deployment, 10)
            await all_up(deployment)
        assert deployment.restarts == 0 and happened and network.happened
        await network.close()

    with contextlib.closing(Standing(Shaken, folder, made)) as running:
        running.run(scenario)


# ---- what cannot start -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"settings": {"threads": 7}}, "2 workers need 14 cores together"),
        ({"decode_settings": {"kv_dtype": "float32"}}, "kv_dtype is int8 for prefill-0 and float32 for decode-0"),
        ({"settings": {"kv_blocks": 1, "max_model_len": 4000}}, "-0 on .*max_model_len"),
        ({"settings": {"device": "cuda"}}, "need a GPU each"),
    ],
)
def test_what_cannot_start_says_why(llama_folder: Path, ray_address: str, more: dict, words: str) -> None:
    async def nothing(engine: AsyncEngine, deployment: Deployment) -> None:
        raise AssertionError("it started")

    with pytest.raises(ConfigError, match=words):
        run_deployment(llama_folder, shape(ray_address, **more), nothing)


def test_a_cluster_that_is_not_there(llama_folder: Path) -> None:
    async def nothing(engine: AsyncEngine, deployment: Deployment) -> None:
        raise AssertionError("it started")

    pytest.importorskip("ray")
    with pytest.raises(ConfigError, match="no Ray cluster answers at"):
        run_deployment(llama_folder, shape("127.0.0.1:1"), nothing)
