"""A storm of random faults on a real deployment: every request ends in time, with the right tokens or one clear error.

Something happens to most transfers of blocks, and in each round to one process or line too. TWOSTROKE_FAULTS=500 is the
long one, of about ten minutes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.cluster.bad_network import BadNetwork, Shaken
from tests.cluster.pairs import SETTINGS, all_back
from tests.cluster.rays import SHAPES, Standing, agent_pid, engine_pid
from tests.cluster.test_pair import Alone
from twostroke.cluster.deployment import Deployment, DeploymentPlan
from twostroke.remote.async_engine import AsyncEngine
from twostroke.remote.client import EngineError
from twostroke.sampling import SamplingParams

pytestmark = pytest.mark.slow
FAULTS = int(os.environ.get("TWOSTROKE_FAULTS", "40"))
SHARE = 0.8  # of the transfers that something happens to
ENDS = 60.0  # seconds in which a request ends
EACH = 8  # requests of a round
KINDS = ("kill engine", "kill engine", "kill agent", "stop engine", "stop agent", "cut line")


def random_ask(alone: Alone, rng: random.Random) -> tuple[list[int], SamplingParams, list[int]]:
    """A request, and the right tokens of its answer."""
    start = rng.randrange(290)
    prompt = [(start + 11 * i) % 290 + 3 for i in range(rng.randint(20, 120))]
    params = SamplingParams(max_tokens=rng.randint(2, 40), temperature=rng.choice([0.0, 1.0]), seed=17)
    return prompt, params, list(alone.answer(prompt, params)[0][0])


async def one_request(engine: AsyncEngine, ask: tuple, rng: random.Random) -> str:
    """How it ended."""
    prompt, params, want = ask
    await asyncio.sleep(rng.random() * 0.3)
    stream = engine.submit([prompt], params)
    stays = rng.random() < 0.9
    if not stays:
        asyncio.get_running_loop().call_later(rng.random() * 0.1, stream.close)
    written: list[int] = []
    ends = []
    async with asyncio.timeout(ENDS):
        async for piece in stream:
            written += piece.event.token_ids
            ends += [piece.event] if piece.event.finish_reason is not None else []
    assert len(ends) == 1 and written == want[: len(written)]
    if ends[0].error:
        return "error"
    assert len(written) == len(want) or not stays
    return "right" if stays else "left"


async def hurt(deployment: Deployment, rng: random.Random, happened: Counter[str]) -> None:
    """A process is killed, or stopped for a while, or the line of a worker is cut."""
    name, kind = rng.choice(list(deployment.members)), rng.choice(KINDS)
    with contextlib.suppress(EngineError, OSError):
        if not deployment.members[name].up:
            return  # it is being started again
        if kind == "cut line":
            deployment.members[name].worker._line.close()  # type: ignore[attr-defined]
        else:
            pid = (agent_pid if kind.endswith("agent") else engine_pid)(deployment, name)
            os.kill(pid, signal.SIGKILL if kind.startswith("kill") else signal.SIGSTOP)
            if kind.startswith("stop"):
                await asyncio.sleep(rng.random() * 4)
                os.kill(pid, signal.SIGCONT)
        happened[kind] += 1


def test_a_storm_of_faults(llama_folder: Path, ray_address: str) -> None:
    rng, alone = random.Random(23), Alone(llama_folder)
    settings = SETTINGS | {"max_batch_tokens": 32}
    shape = DeploymentPlan(
        **SHAPES["2+2"], settings=settings, prefill_settings={"prefix_cache": False}, address=ray_address, apart=True,
        share_cores=True,
    )  # type: ignore[arg-type]  # fmt: skip
    ended: Counter[str] = Counter()

    async def scenario(engine: AsyncEngine, deployment: Shaken) -> None:
        network = deployment.network = BadNetwork(rng, SHARE)
        longest = 0.0
        while network.happened.total() < FAULTS:
            asks = [random_ask(alone, rng) for _ in range(EACH)]
            running = [asyncio.ensure_future(one_request(engine, ask, rng)) for ask in asks]
            await asyncio.sleep(rng.random() * 0.4)
            await hurt(deployment, rng, network.happened)
            ended.update(await asyncio.gather(*running))
            began = time.monotonic()
            await all_back(engine, deployment, 10)
            longest = max(longest, time.monotonic() - began)
            print(network.happened.total(), "faults,", ended.total(), "requests", flush=True)
            while sum(member.usable for member in deployment.members.values()) < 3:
                await asyncio.sleep(0.05)
        print(f"{network.happened.total()} faults {dict(network.happened)}; requests {dict(ended)}; all back within")
        print(
            f"{longest:.1f} s; {deployment.counts}, {deployment.resumed} resumed, {deployment.restarts} without workers"
        )
        assert deployment.counts.failed and deployment.counts.done
        await network.close()

    with contextlib.closing(Standing(Shaken, llama_folder, shape)) as standing:
        standing.run(scenario, 600 + 10 * FAULTS)
