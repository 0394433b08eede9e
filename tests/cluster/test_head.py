"""Ray's head is lost while requests run: each ends, with the right tokens or with one error. A new head at the old
address gets the workers."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.pairs import SETTINGS
from tests.cluster.rays import RunningRay, Standing, free_port, tree, without_tokens
from tests.cluster.test_faults import LONG, prompts
from tests.cluster.test_pair import PROMPT, Alone
from twostroke.cluster.deployment import Deployment, DeploymentPlan
from twostroke.remote.async_engine import AsyncEngine
from twostroke.remote.client import EngineError

pytestmark = pytest.mark.slow
ENDS = 30.0  # seconds in which a request ends


@pytest.fixture
def ray() -> Iterator[list[RunningRay]]:
    """One that is lost."""
    with without_tokens():
        running = [RunningRay(free_port())]
        yield running
        for one in running:
            one.stop()


async def ends(engine: AsyncEngine, prompt: list[int]) -> tuple[tuple[int, ...], str | None]:
    """What was written of the answer, and the error that ended it: within its time, and once."""
    stream = engine.submit([prompt], LONG)
    pieces = await asyncio.wait_for(collected(stream), ENDS)
    finished = [piece.event for piece in pieces if piece.event.finish_reason is not None]
    assert len(finished) == 1
    return tuple(token for piece in pieces for token in piece.event.token_ids), finished[0].error


async def collected(stream) -> list:
    return [piece async for piece in stream]


def test_the_head_is_lost(llama_folder: Path, ray: list[RunningRay]) -> None:
    alone = Alone(llama_folder)
    want = [tuple(alone.answer(prompt, LONG)[0][0]) for prompt in prompts(3)]
    shape = DeploymentPlan(
        prefill=1, decode=1, settings=SETTINGS | {"speculate": "off"}, address=ray[0].address, apart=True
    )
    standing = Standing(Deployment, llama_folder, shape)

    async def begun(deployment: Deployment, running: list[asyncio.Future]) -> None:
        """Until an answer has begun, or all have ended."""
        while not all(one.done() for one in running):
            if any(flight.written for flight in deployment.flights.values()):
                return
            await asyncio.sleep(0.001)

    async def lose_the_control_store(engine: AsyncEngine, deployment: Deployment) -> None:
        """Workers live: nothing is lost, and nothing is refused."""
        running = [asyncio.ensure_future(ends(engine, prompt)) for prompt in prompts(3)]
        await begun(deployment, running)
        os.kill(ray[0].process.pid, signal.SIGSTOP)  # it would end what is left
        for pid in ray[0].pids("gcs_server"):
            os.kill(pid, signal.SIGKILL)
        assert [await one for one in running] == [(tokens, None) for tokens in want]
        assert await ends(engine, prompts(3)[1]) == (want[1], None)

    async def lose_the_machine(engine: AsyncEngine, deployment: Deployment) -> None:
        """And its workers: each answer is a part of the right one and ends with an error; others are refused. Without
        its control store Ray ends its workers by itself after a while, so that all may be refused."""
        running = [asyncio.ensure_future(ends(engine, prompt)) for prompt in prompts(3)]
        await begun(deployment, running)
        for pid in tree(ray[0].process.pid) - {ray[0].process.pid}:
            os.kill(pid, signal.SIGKILL)
        for one, tokens in zip(running, want, strict=True):
            try:
                written, error = await one
            except EngineError:
                continue
            assert written == tokens[: len(written)]
            assert error or written == tokens
        async with asyncio.timeout(ENDS):
            while True:
                try:
                    written, error = await ends(engine, PROMPT)
                    assert error or written == tuple(alone.answer(PROMPT, LONG)[0][0])
                except EngineError:
                    return

    async def a_new_head(engine: AsyncEngine, deployment: Deployment) -> None:
        """At the old address: workers are placed there, and serve."""
        assert await ends(engine, prompts(3)[2]) == (want[2], None)

    try:
        standing.run(lose_the_control_store)
        standing.run(lose_the_machine)
        ray[0].stop()
        ray.append(RunningRay(int(ray[0].address.rpartition(":")[2])))
        standing.run(a_new_head)
    finally:
        standing.close()
