"""A prompt is computed by one engine and its answer written by another: the tokens are those of one engine alone."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.cluster.fakes import FakeTransport
from tests.cluster.pairs import GREEDY, PEERS, SETTINGS, answer, run_pair
from twostroke.cluster.pair import Pair
from twostroke.cluster.sockets import SharedMemoryTransport, TcpTransport
from twostroke.engine.llm import LLM
from twostroke.remote.async_engine import AsyncEngine
from twostroke.sampling import SamplingParams

PROMPT = [(7 * i) % 290 + 3 for i in range(75)]


def alone(folder: Path, prompt: list[int], params: SamplingParams, **settings: object) -> list:
    output = LLM(folder, **(SETTINGS | settings)).generate([prompt], params)[0]
    return [(one.token_ids, one.finish_reason, one.logprobs) for one in output.samples]


@pytest.mark.parametrize("transport", [SharedMemoryTransport, TcpTransport])
def test_two_processes_write_one_answer(llama_folder: Path, transport: type) -> None:
    want = alone(llama_folder, PROMPT, GREEDY)

    async def scenario(engine: AsyncEngine, pair: Pair) -> None:
        assert await answer(engine, PROMPT) == want
        counts = pair.handover.counts
        assert (counts.done, counts.blocks, sum(counts.failed.values())) == (1, 4, 0)
        assert pair.prefill.counts.computed_tokens == len(PROMPT)
        assert pair.decode.counts.computed_tokens == len(PROMPT) - 64 + 11
        assert await answer(engine, PROMPT) == want
        assert counts.done == 2 and counts.blocks == 4, "blocks that are there are not sent again"

    run_pair(llama_folder, scenario, lambda: transport(PEERS), "process")
