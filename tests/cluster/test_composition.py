"""What a deployment is made of works together: kinds of attention, drafts, tenants, priorities, limits."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.cluster.pairs import GREEDY, Pair, answer, moved, run_pair
from tests.cluster.test_pair import PROMPT, SAMPLED, Alone
from tests.draft.paying import make_paying_drafter
from tests.waiting import until
from twostroke.cluster import parcels
from twostroke.cluster.member import Speed
from twostroke.cluster.parcels import patience
from twostroke.cluster.router import Role
from twostroke.engine import build
from twostroke.remote.admission import BusyError
from twostroke.remote.async_engine import AsyncEngine
from twostroke.remote.loop import EngineLoop
from twostroke.sampling import SamplingParams
from twostroke.schedule import asking
from twostroke.types import Request

LONG = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)


@pytest.mark.parametrize(
    ("family", "kv_dtype"),
    [("latent", "int8"), ("latent", "float32"), ("compressed", "bfloat16"), ("compressed", "float32")],
)
def test_latent_and_compressed_entries_travel(
    family: str, kv_dtype: str, deepseek_pair: tuple[Path, Path], compressed_folder: Path
) -> None:
    folder, narrow = deepseek_pair[0] if family == "latent" else compressed_folder, {"kv_dtype": kv_dtype}
    alone = Alone(folder, **narrow)
    want = alone.answer(PROMPT), alone.answer(PROMPT[:50], SAMPLED)

    async def scenario(engine: AsyncEngine, pair: Pair) -> None:
        assert (await answer(engine, PROMPT), await answer(engine, PROMPT[:50], SAMPLED)) == want
        await moved(pair)
        assert pair.counts.done == 3 and pair.counts.bytes and not pair.counts.failed
        assert pair.decode.counts.cached_tokens >= 64 + 2 * 32, "no prompt was computed again"

    run_pair(folder, scenario, prefill=narrow, decode=narrow | {"speculate": "off"})


@pytest.mark.parametrize("family", ["llama", "latent"])
def test_a_draft_model_goes_on_where_the_answer_is_written(
    family: str, llama_pair: tuple[Path, Path], deepseek_pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever steps take on this machine: drafts pay."""
    monkeypatch.setattr(build, "make_drafter", make_paying_drafter)
    target, draft = llama_pair if family == "llama" else deepseek_pair
    drafting = {"draft_model": str(draft), "speculate": "auto"}
    want = Alone(target).answer(PROMPT, LONG)

    async def scenario(engine: AsyncEngine, pair: Pair) -> None:
        assert await answer(engine, PROMPT, LONG) == want
        await moved(pair)
        assert pair.counts.done == 1 and not pair.counts.failed
        assert pair.decode.counts.drafted_tokens > 0 and pair.prefill.counts.drafted_tokens == 0

    run_pair(target, scenario, prefill=drafting, decode=drafting)


def test_tenants_share_no_blocks_in_any_worker(llama_folder: Path) -> None:
    want = Alone(llama_folder).answer(PROMPT)[0][0]

    async def asked(engine: AsyncEngine, pair: Pair, salt: bytes) -> tuple[int, int]:
        """Blocks that travelled, and tokens of the prompt that were found."""
        before = pair.counts.blocks
        stream = engine.submit([PROMPT], GREEDY, salt)
        async for _ in stream:
            pass
        await moved(pair)
        sample = stream.answers[0].sample
        assert sample.token_ids == want
        return pair.counts.blocks - before, sample.timeline.cached_tokens

    async def scenario(engine: AsyncEngine, pair: Pair) -> None:
        assert await asked(engine, pair, b"one") == (5, 0)
        assert await asked(engine, pair, b"two") == (5, 0), "the other tenant's blocks are in both workers"
        assert await asked(engine, pair, b"one") == (1, 64)

    run_pair(llama_folder, scenario, decode={"speculate": "off"})


@pytest.mark.parametrize(("policy", "field"), [("priority", "priority"), ("deadline", "deadline")])
def test_the_more_important_request_gets_the_place_where_answers_are_written(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch, policy: str, field: str
) -> None:
    """By priority, or the one whose first token is due soonest, in hours. One place there. Requests that come from the
    other worker wait for it, and ask again and again. The answer that has it goes on when all of them have asked."""
    order, all_asked = [7, 2, 9, 4], threading.Event()
    ended: list[int] = []

    def held(self: EngineLoop, step: Any = EngineLoop._step) -> Any:
        if len(self.blocks.asking._asked) == len(order):
            all_asked.set()
        if not all_asked.is_set() and any(one.output_length >= 5 for one in self.core.scheduler.running.values()):
            time.sleep(0.001)
            return []  # no step: it is asked meanwhile
        return step(self)

    monkeypatch.setattr(EngineLoop, "_step", held)
    monkeypatch.setattr(asking, "SILENT_SECONDS", 60.0)  # none of them asks no more, however slow this machine is

    async def one(engine: AsyncEngine, prompt: list[int], place: int) -> None:
        given: dict[str, Any] = {field: place if field == "priority" else 3600.0 * place}
        await answer(engine, prompt, SamplingParams(max_tokens=60, temperature=0, ignore_eos=True, **given))
        ended.append(place)

    async def scenario(engine: AsyncEngine, pair: Pair) -> None:
        first = asyncio.ensure_future(one(engine, PROMPT, 0))
        await until(lambda: pair.decode.counts.running, "the first answer has not begun")
        prompts = [[token + place + 1 for token in PROMPT[:40]] for place in range(len(order))]
        others = [asyncio.ensure_future(one(engine, *given)) for given in zip(prompts, order, strict=True)]
        await until(all_asked.is_set, "not all requests have come")
        await asyncio.gather(first, *others)
        assert ended == [0, *sorted(order)]
        assert not pair.counts.failed

    one_place = {"max_requests": 1, "speculate": "off", "policy": policy}
    run_pair(llama_folder, scenario, prefill={"policy": policy}, decode=one_place, transfer_seconds=120.0)


def test_blocks_that_come_back_from_the_host_travel(llama_folder: Path) -> None:
    """Prompts that were evicted to the host in both workers come again: what is brought back is used and sent."""
    alone = Alone(llama_folder)
    prompts = [[(place * 13 + token * 7) % 290 + 3 for token in range(100)] for place in range(4)]
    want = [alone.answer(prompt) for prompt in prompts]

    async def scenario(engine: AsyncEngine, pair: Pair) -> None:
        for turn in range(2):
            for prompt, right in zip(prompts, want, strict=True):
                assert await answer(engine, prompt) == right
                await moved(pair)
            restored = [one.counts.blocks_restored for one in (pair.prefill, pair.decode)]
            assert all(restored) if turn else not any(restored)
        assert pair.counts.done == 8 and not pair.counts.failed
        assert pair.prefill.counts.computed_tokens < 6 * 100, "prompts were computed again"

    small = {"kv_blocks": 18, "max_model_len": 160, "kv_offload": 1 << 20, "speculate": "off"}
    run_pair(llama_folder, scenario, prefill=small, decode=small)


def test_a_deployment_admits_and_refuses_as_a_whole(llama_folder: Path) -> None:
    async def scenario(engine: AsyncEngine, pair: Pair) -> None:
        queue = engine.admission.max_queue
        assert engine.admission.max_samples == 3 + queue, "the worker that writes has three places"
        pair.change_role("prefill", Role.BOTH)
        assert engine.admission.max_samples == 3 + 2 + queue
        pair.change_role("prefill", Role.PREFILL)
        engine.admission.max_queue = 1
        engine.admission.adapt(engine.intake.settings)
        streams = [engine.submit([PROMPT[:20]], LONG) for _ in range(4)]
        with pytest.raises(BusyError) as refused:
            engine.submit([PROMPT[:20]], LONG)
        assert refused.value.retry_after >= 1
        for stream in streams:
            assert sum([piece.event.finish_reason is not None async for piece in stream]) == 1

    run_pair(llama_folder, scenario, prefill={"max_requests": 2}, decode={"max_requests": 3})


def test_a_fetch_leaves_the_time_to_compute_before_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parcels, "time", SimpleNamespace(monotonic=lambda: 100.0))

    def request(due: float | None) -> Request:
        return Request(1, (1, 2), SamplingParams(deadline=due), arrival=100.0)

    assert patience(request(None), 2.0, 5.0) == 2.0
    assert patience(request(60.0), 2.0, 5.0) == 2.0
    assert patience(request(6.0), 2.0, 5.0) == 1.0
    assert patience(request(4.0), 2.0, 5.0) == 2.0, "computing all comes too late: only the fetch can keep it"


def test_a_conversation_returns_to_the_worker_that_has_it(llama_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its prompt, and the answer that was written there."""
    alone = Alone(llama_folder)
    monkeypatch.setattr(Speed, "learn", lambda *report: None)  # both are as fast, whatever else this machine does

    async def scenario(engine: AsyncEngine, pair: Pair) -> None:
        pair.apart = False
        for name in pair.members:
            pair.change_role(name, Role.BOTH)
            pair.members[name].speed = Speed(100, 0.01)
        written = (await answer(engine, PROMPT))[0][0]
        (home,) = [one for one in pair.members.values() if one.counts.computed_tokens]
        turn = [*PROMPT, *written, 7, 8, 9]
        assert await answer(engine, turn) == alone.answer(turn)
        assert home.counts.cached_tokens == 80 and home.counts.computed_tokens < 2 * len(PROMPT)
        assert sum(one.counts.prompt_tokens for one in pair.members.values()) == home.counts.prompt_tokens

    run_pair(llama_folder, scenario, prefill={"speculate": "off"}, decode={"speculate": "off"})


def test_roles_change_while_requests_run(llama_folder: Path) -> None:
    """Nothing is lost: what a worker has it ends. A request comes every 0.03 s, and every 0.05 s roles change."""
    alone = Alone(llama_folder)
    prompts = [[(place * 13 + token * 7) % 290 + 3 for token in range(40 + place)] for place in range(12)]
    want = [alone.answer(prompt, LONG) for prompt in prompts]
    turn = 0

    async def one(engine: AsyncEngine, place: int) -> None:
        await asyncio.sleep(0.03 * place)
        await until(lambda: 0.05 * turn >= 0.03 * place, "the roles did not change")  # on a machine that stops too
        assert await answer(engine, prompts[place], LONG) == want[place]

    async def scenario(engine: AsyncEngine, pair: Pair) -> None:
        nonlocal turn
        running = [asyncio.ensure_future(one(engine, place)) for place in range(len(prompts))]
        roles = [
            (Role.BOTH, Role.BOTH),
            (Role.DECODE, Role.PREFILL),
            (Role.BOTH, Role.DECODE),
            (Role.PREFILL, Role.DECODE),
        ]
        while not all(one.done() for one in running):
            first, second = roles[turn % len(roles)]
            for name, role in (("prefill", Role.BOTH), ("decode", second), ("prefill", first)):
                pair.change_role(name, role)
            turn += 1
            await asyncio.sleep(0.05)
        await asyncio.gather(*running)
        assert turn > len(roles) and not pair.counts.failed and not pair.resumed

    run_pair(llama_folder, scenario)
