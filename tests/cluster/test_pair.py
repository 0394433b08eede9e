"""A prompt is computed by one engine and its answer written by another: the tokens are those of one engine alone."""

from __future__ import annotations

import asyncio
import time
from math import inf
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cluster.fakes import FakeTransport
from tests.cluster.pairs import (
    GREEDY,
    OVER_NIXL,
    PEERS,
    REAL,
    SETTINGS,
    Pair,
    answer,
    moved,
    needs_nixl,
    run_pair,
)  # fmt: skip
from twostroke.cluster.router import Ask, Router
from twostroke.engine.llm import LLM
from twostroke.errors import ConfigError
from twostroke.record import replace
from twostroke.remote.async_engine import AsyncEngine
from twostroke.remote.loop import EngineLoop
from twostroke.remote.messages import Direct
from twostroke.sampling import Grammar, SamplingParams
from twostroke.types import Event

PROMPT = [(7 * i) % 290 + 3 for i in range(75)]
SAMPLED = SamplingParams(max_tokens=14, temperature=1.0, seed=17, logprobs=2, n=2)


class Alone:
    """Answers of one engine alone, remembered."""

    def __init__(self, folder: Path, **more: object):
        self.llm = LLM(folder, **(SETTINGS | {"kv_blocks": 400, "prefix_cache": False, "speculate": "off"} | more))
        self.known: dict = {}

    def answer(self, prompt: list[int], params: SamplingParams = GREEDY) -> list:
        key = (tuple(prompt), repr(replace(params, priority=0)))
        if key not in self.known:
            output = self.llm.generate([prompt], params)[0]
            self.known[key] = [(one.token_ids, one.finish_reason, one.logprobs) for one in output.samples]
        return self.known[key]


@pytest.fixture(scope="module")
def llama_alone(llama_folder: Path) -> Alone:
    return Alone(llama_folder)


@pytest.mark.parametrize("transport", REAL)
def test_two_processes_write_one_answer(llama_folder: Path, llama_alone: Alone, transport: type) -> None:
    want, sampled = llama_alone.answer(PROMPT), llama_alone.answer(PROMPT[:50], SAMPLED)

    async def scenario(engine: AsyncEngine, pair: Pair) -> None:
        counts = pair.counts
        assert await answer(engine, PROMPT) == want
        await moved(pair)
        assert (counts.done, counts.blocks, sum(counts.failed.values())) == (1, 5, 0)
        assert pair.prefill.counts.computed_tokens == len(PROMPT)
        assert pair.decode.counts.computed_tokens == 11, "the last block too has come, which is full in part"
        assert await answer(engine, PROMPT) == want
        assert await answer(engine, PROMPT[:50], SAMPLED) == sampled
        await moved(pair)
        assert counts.done == 4 and counts.blocks == 8, "full blocks that are there are not sent again"
        assert pair.prefill.worker.holder.leases.ended == {"done": 4}

    run_pair(llama_folder, scenario, lambda: transport(PEERS), "process", decode={"speculate": "off"})


asks = st.tuples(
    st.sampled_from([0, 16, 45, 100]),  # tokens that other prompts begin with too
    st.integers(0, 20),
    st.integers(1, 60),
    st.integers(1, 20),
    st.sampled_from([0.0, 1.0]),
    st.sampled_from([1, 1, 3]),
)
engines = st.fixed_dictionaries(
    {
        "max_batch_tokens": st.sampled_from([16, 50, 2048]),
        "max_requests": st.sampled_from([2, 5, 16]),
        "kv_blocks": st.sampled_from([40, 44, 200]),
        "prefix_cache": st.booleans(),
        "chunked_prefill": st.sampled_from([True, True, False]),
        "batching": st.sampled_from(["continuous", "continuous", "static"]),
        "speculate": st.sampled_from(["auto", "off"]),
        "kv_offload": st.sampled_from([0, 1 << 17]),
    }
)


def check_levers(
    folder: Path, alone: Alone, many: list, prefill: dict, decode: dict, direct: Direct | None = None, **common: object
) -> Pair:
    """Requests at once, twice: the second time with what the caches hold by then."""
    for one in (prefill, decode):
        if not one["prefix_cache"]:
            one["kv_offload"] = 0
    pairs = []

    async def one(engine: AsyncEngine, ask: tuple) -> None:
        shared, own, length, max_tokens, temperature, n = ask
        prompt = [(7 * i + 3) % 300 + 3 for i in range(shared)] + [(own + 11 * i) % 300 + 3 for i in range(length)]
        params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=17, n=n, logprobs=1)
        assert await answer(engine, prompt, params) == alone.answer(prompt, params)

    async def scenario(engine: AsyncEngine, pair: Pair) -> None:
        pairs.append(pair)
        for _ in range(2):
            await asyncio.gather(*(one(engine, ask) for ask in many))

    base = {"max_model_len": 192} | common
    run_pair(folder, scenario, FakeTransport, "thread", prefill=base | prefill, decode=base | decode, direct=direct)
    return pairs[0]


@needs_nixl
@settings(max_examples=3)
@given(st.lists(asks, min_size=2, max_size=5), engines, engines)
def test_tokens_do_not_depend_on_any_lever_over_nixl(
    llama_folder: Path, llama_alone: Alone, many: list, prefill: dict, decode: dict
) -> None:
    check_levers(llama_folder, llama_alone, many, prefill, decode, OVER_NIXL)


@settings(max_examples=3)
@given(st.lists(asks, min_size=2, max_size=5), engines, engines)
def test_tokens_do_not_depend_on_any_lever(
    llama_folder: Path, llama_alone: Alone, many: list, prefill: dict, decode: dict
) -> None:
    check_levers(llama_folder, llama_alone, many, prefill, decode)


@pytest.mark.slow
@pytest.mark.parametrize("direct", [None, pytest.param(OVER_NIXL, marks=needs_nixl)], ids=["bytes", "nixl"])
@pytest.mark.parametrize("kv_dtype", ["int8", "int4", "float16"])
@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_tokens_do_not_depend_on_any_lever_with_narrow_blocks_and_windows(
    family: str, kv_dtype: str, direct: Direct | None, llama_folder: Path, gemma_folder: Path
) -> None:
    folder = gemma_folder if family == "gemma" else llama_folder
    alone = Alone(folder, kv_dtype=kv_dtype)

    @settings(max_examples=12)
    @given(st.lists(asks, min_size=2, max_size=6), engines, engines)
    def check(many: list, prefill: dict, decode: dict) -> None:
        check_levers(folder, alone, many, prefill, decode, direct, kv_dtype=kv_dtype)

    check()


@pytest.mark.parametrize("kv_dtype", ["int8", "float32"])
def test_windows_and_narrow_blocks_travel(gemma_folder: Path, kv_dtype: str) -> None:
    want = Alone(gemma_folder, kv_dtype=kv_dtype).answer(PROMPT)

    async def scenario(engine: AsyncEngine, pair: Pair) -> None:
        assert await answer(engine, PROMPT) == want
        await moved(pair)
        counts = pair.counts
        assert counts.done == 1 and not counts.failed
        assert pair.decode.counts.computed_tokens < len(PROMPT), "the prompt was not computed again"

    narrow = {"kv_dtype": kv_dtype}
    run_pair(gemma_folder, scenario, prefill=narrow, decode=narrow)


def test_what_a_request_may_ask_for_is_kept_across_the_engines(llama_folder: Path, llama_alone: Alone) -> None:
    """Penalties, minimum lengths, stop strings, scores of the prompt, grammars and answers of one token."""
    many = [
        SamplingParams(max_tokens=1, temperature=0),
        SamplingParams(max_tokens=2, temperature=0),
        SamplingParams(max_tokens=20, temperature=1.0, seed=5, frequency_penalty=1.0, presence_penalty=0.5),
        SamplingParams(max_tokens=20, temperature=1.0, seed=6, min_tokens=6, stop_token_ids=tuple(range(100, 200))),
        SamplingParams(max_tokens=30, temperature=0.8, seed=7, stop=["e"]),
        SamplingParams(max_tokens=5, temperature=0, prompt_logprobs=1, logprobs=3),
        SamplingParams(max_tokens=30, temperature=1.0, seed=8, grammar=Grammar("regex", "(yes|no|perhaps)")),
    ]
    want = [llama_alone.answer(PROMPT[:40], params) for params in many]

    async def scenario(engine: AsyncEngine, pair: Pair) -> None:
        assert [await answer(engine, PROMPT[:40], params) for params in many] == want
        await moved(pair)
        assert pair.counts.done >= 4 and not pair.counts.failed

    run_pair(llama_folder, scenario)


def test_timelines_cover_both_engines(llama_folder: Path) -> None:
    async def scenario(engine: AsyncEngine, pair: Pair) -> None:
        stream = engine.submit([PROMPT], GREEDY)
        async for _ in stream:
            pass
        timeline = stream.answers[0].sample.timeline
        assert timeline.queue + timeline.prefill + timeline.decode == pytest.approx(timeline.e2e)
        assert timeline.prompt_tokens == len(PROMPT) and timeline.output_tokens == 12
        assert timeline.cached_tokens == 0 and timeline.chunks >= 1
        assert timeline.arrival <= timeline.scheduled <= timeline.token_times[0] <= timeline.end

    run_pair(llama_folder, scenario)


def test_short_prompts_stay_on_the_decode_engine(llama_folder: Path, llama_alone: Alone) -> None:
    want = llama_alone.answer(PROMPT[:15])

    async def scenario(engine: AsyncEngine, pair: Pair) -> None:
        assert await answer(engine, PROMPT[:15]) == want
        assert pair.prefill.counts.computed_tokens == 0

    run_pair(llama_folder, scenario)


def test_routes_know_when_a_first_token_is_due(llama_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the request, or from the target of the deployment."""
    due: list[float] = []
    choose = Router.choose

    def asked(router: Router, ask: Ask, *others: Any) -> Any:
        due.append(ask.due)
        return choose(router, ask, *others)

    monkeypatch.setattr(Router, "choose", asked)

    async def scenario(engine: AsyncEngine, pair: Pair) -> None:
        await answer(engine, PROMPT)
        await answer(engine, PROMPT, replace(GREEDY, deadline=5000.0))
        pair.ttft = 900.0
        await answer(engine, PROMPT)
        assert due[0] == inf and 4900 < due[1] < 5000 and 800 < due[2] < 900

    run_pair(llama_folder, scenario)


def test_a_decode_engine_without_room_keeps_the_lease_until_it_has_some(
    llama_folder: Path, llama_alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request at a time, and leases that are shorter than two answers: each waits for its turn, none is lost."""
    prompts = [[(i * k) % 290 + 3 for i in range(40)] for k in (3, 5, 11, 13)]
    long = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
    want = [llama_alone.answer(prompt, long) for prompt in prompts]
    step = EngineLoop._step

    def slow(self: EngineLoop) -> list[Event]:
        time.sleep(0.03 if self.settings.max_requests == 1 else 0.0)  # 1.8 s for an answer
        return step(self)

    monkeypatch.setattr(EngineLoop, "_step", slow)

    async def scenario(engine: AsyncEngine, pair: Pair) -> None:
        assert list(await asyncio.gather(*(answer(engine, prompt, long) for prompt in prompts))) == want
        await moved(pair)
        assert pair.counts.done == 4 and not pair.counts.failed

    one = {"max_requests": 1, "speculate": "off"}
    run_pair(llama_folder, scenario, decode=one, lease=3.0, transfer_seconds=60.0)


def test_engines_that_name_blocks_differently_do_not_start(llama_folder: Path) -> None:
    async def nothing(engine: AsyncEngine, pair: Pair) -> None:
        raise AssertionError("they started")

    with pytest.raises(ConfigError, match="kv_dtype is int8 for prefill and float32 for decode"):
        run_pair(llama_folder, nothing, prefill={"kv_dtype": "int8"}, decode={"kv_dtype": "float32"})


def test_settings_change_in_both_engines_or_in_none(llama_folder: Path) -> None:
    async def scenario(engine: AsyncEngine, pair: Pair) -> None:
        await engine.change({"max_gap": 0.5})
        assert pair.prefill.worker.engine.changed == pair.decode.worker.engine.changed == {"max_gap": 0.5}
        with pytest.raises(ConfigError, match="max_batch_tokens must not be below max_requests"):
            await engine.change({"max_batch_tokens": 3})
        assert pair.decode.worker.engine.changed == {"max_gap": 0.5}
        assert pair.prefill.worker.engine.changed["max_batch_tokens"] == 256
        with pytest.raises(ConfigError, match="shows the sum over its workers"):
            await engine.change({"max_requests": 2})
        assert engine.intake.settings.max_requests == 5
        assert engine.intake.settings.max_gap == 0.5
        assert await answer(engine, PROMPT)

    first = {"max_requests": 2, "max_batch_tokens": 256}
    run_pair(llama_folder, scenario, prefill=first, decode={"max_requests": 5})
