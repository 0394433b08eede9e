"""Workers whose engines have two ranks each (tensor parallelism): their blocks have the parts of both, and travel."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.cluster.pairs import GREEDY, PEERS, SETTINGS, Pair, answer, moved, run_pair
from tests.cluster.rays import all_up, engine_pid, run_deployment
from tests.cluster.test_pair import PROMPT, SAMPLED, Alone
from tests.cluster.test_ray import shape
from tests.serve.server import children
from twostroke.cluster.deployment import Deployment
from twostroke.cluster.sockets import SharedMemoryTransport
from twostroke.engine.llm import LLM
from twostroke.errors import ConfigError
from twostroke.remote.async_engine import AsyncEngine

RANKS = {"parallel": 2}


@pytest.fixture(scope="module")
def in_two(llama_folder: Path) -> Alone:
    return Alone(llama_folder, **RANKS)


@pytest.mark.parametrize("kind", ["process", "thread"])
def test_two_engines_of_two_ranks_write_one_answer(llama_folder: Path, in_two: Alone, kind: str) -> None:
    want, sampled = in_two.answer(PROMPT), in_two.answer(PROMPT[:50], SAMPLED)
    part = in_two.llm.settings.layout.block_bytes

    async def scenario(engine: AsyncEngine, pair: Pair) -> None:
        assert await answer(engine, PROMPT) == want
        await moved(pair)
        counts = pair.counts
        assert (counts.done, counts.blocks, counts.bytes, sum(counts.failed.values())) == (1, 5, 10 * part, 0)
        assert pair.decode.counts.computed_tokens == GREEDY.max_tokens - 1
        assert await answer(engine, PROMPT[:50], SAMPLED) == sampled

    levers = RANKS | {"speculate": "off"}
    run_pair(llama_folder, scenario, lambda: SharedMemoryTransport(PEERS), kind, prefill=levers, decode=levers)


def test_parts_of_all_ranks_are_in_a_block(llama_folder: Path, in_two: Alone) -> None:
    """What one engine gives another one has, byte for byte."""
    second = LLM(llama_folder, **SETTINGS, **RANKS)
    in_two.answer(PROMPT)
    ours, theirs = in_two.llm.engine.core.runner.kv, second.engine.core.runner.kv
    assert ours.exchanged_bytes == 2 * ours.layout.block_bytes == in_two.llm.settings.exchanged_bytes
    memory = bytearray(3 * ours.exchanged_bytes)
    ours.export_to([2, 0, 1], memoryview(memory))
    size = ours.exchanged_bytes
    assert bytes(memory[:size]) == ours.export(2) and any(memory[size // 2 : size]), "rank 1 has written nothing"
    theirs.take_in([(7, memory[:size])])
    assert theirs.export(7) == ours.export(2)
    with pytest.raises(ValueError, match="a block has"):
        theirs.take_in([(7, memory[: size // 2])])
    second.close()


def test_workers_must_have_equally_many_ranks(llama_folder: Path) -> None:
    async def nothing(engine: AsyncEngine, pair: Pair) -> None:
        raise AssertionError("it started")

    with pytest.raises(ConfigError, match="parallel is 2 for prefill and 1 for decode"):
        run_pair(llama_folder, nothing, prefill=RANKS)


@pytest.mark.slow
def test_ranks_on_ray(llama_folder: Path, in_two: Alone, ray_address: str) -> None:
    """The tokens of one engine with two ranks; a rank that is killed ends its engine, which is started again."""
    want = in_two.answer(PROMPT)

    async def scenario(engine: AsyncEngine, deployment: Deployment) -> None:
        assert [worker.settings["threads"] for worker in deployment.numbered.values()] == [1, 1]
        assert await answer(engine, PROMPT) == want
        assert await answer(engine, PROMPT[:50], SAMPLED) == in_two.answer(PROMPT[:50], SAMPLED)
        await moved(deployment)
        assert deployment.counts.done == 3 and deployment.counts.blocks and not deployment.counts.failed
        (rank,) = children(engine_pid(deployment, "prefill-0"))
        os.kill(rank, signal.SIGKILL)
        other = [token + 1 for token in PROMPT]
        assert await answer(engine, other) == in_two.answer(other)
        await all_up(deployment)
        assert await answer(engine, other[:40]) == in_two.answer(other[:40])

    run_deployment(llama_folder, shape(ray_address, settings=RANKS), scenario)


@pytest.mark.slow
def test_ranks_need_cores(llama_folder: Path, ray_address: str) -> None:
    async def nothing(engine: AsyncEngine, deployment: Deployment) -> None:
        raise AssertionError("it started")

    with pytest.raises(ConfigError, match=r"2 workers need 12 cores together \(parallel × threads\)"):
        run_deployment(llama_folder, shape(ray_address, settings=RANKS | {"threads": 3}), nothing)


def test_a_worker_on_gpus_takes_one_for_each_rank() -> None:
    def devices(gpus: float, **settings: object) -> tuple[list[str], list[int]]:
        deployment = Deployment.__new__(Deployment)
        deployment.numbered = {n: SimpleNamespace(settings={**RANKS, **settings}) for n in range(2)}  # type: ignore
        found = deployment._devices(SimpleNamespace(gpus=gpus))  # type: ignore[arg-type]
        return found, deployment._gpus(found)

    assert devices(4.0) == (["cuda", "cuda"], [2, 2])
    assert devices(3.0) == (["cpu", "cpu"], [0, 0])
    with pytest.raises(ConfigError, match=r"2 workers with device=cuda need 2 GPUs \(parallel\) each, .* has 3 free"):
        devices(3.0, device="cuda")
    with pytest.raises(ConfigError, match="need a GPU each"):
        devices(1.0, device="cuda", parallel=1)
