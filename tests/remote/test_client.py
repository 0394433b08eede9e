"""Every `EngineClient` keeps the same promises: in a child process, on a thread, and behind a clock of its own."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from tests import tiny
from tests.remote.engines import CLIENTS, GREEDY, SETTINGS, answer, run
from tests.remote.test_segment import opened
from tests.waiting import until
from twostroke.config import make_config
from twostroke.engine.build import build_engine
from twostroke.engine.intake import COUNTER_BITS, RequestIds
from twostroke.engine.llm import LLM
from twostroke.errors import ConfigError, ModelError
from twostroke.remote import client as module
from twostroke.remote import loop, process, stream
from twostroke.remote.async_engine import ENGINE_GONE, AsyncEngine
from twostroke.remote.client import EngineError
from twostroke.remote.messages import Opened
from twostroke.sampling import Grammar, SamplingParams

both = pytest.mark.parametrize("client", list(CLIENTS))
HOURS = 10_000.0  # seconds
AHEAD = f"import time, twostroke.remote.loop as l; l.clock = lambda: time.monotonic() + {HOURS}; "
BEHIND = AHEAD.replace(" + ", " - ")


@pytest.fixture(scope="module")
def long_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.tiny_llama(tmp_path_factory.mktemp("long"), max_position_embeddings=8192)


@both
def test_the_same_tokens_as_in_process(llama_folder: Path, client: str) -> None:
    """One engine in `LLM`, one behind the client: stops, samples, logprobs and timelines agree."""
    llm = LLM(llama_folder, **SETTINGS)
    wanted = SamplingParams(max_tokens=30, seed=9, n=3, logprobs=2, prompt_logprobs=1, stop=["e"])
    here = llm.generate("The quick brown fox", wanted)[0]

    async def scenario(engine: AsyncEngine) -> None:
        stream = engine.submit([here.prompt_token_ids], wanted)
        pieces = [piece async for piece in stream]
        assert sum(piece.event.finish_reason is not None for piece in pieces) == 3
        for ours, theirs in zip(stream.answers, here.samples, strict=True):
            sample = ours.sample
            assert sample.token_ids == theirs.token_ids and sample.text == theirs.text
            assert sample.logprobs == theirs.logprobs and sample.finish_reason == theirs.finish_reason
            timeline = sample.timeline
            assert timeline.queue + timeline.prefill + timeline.decode == pytest.approx(timeline.e2e)
            assert timeline.output_tokens == len(sample.token_ids)
            assert (timeline.chunks, timeline.prompt_tokens) == (theirs.timeline.chunks, theirs.timeline.prompt_tokens)
        scores = [stream.prompt_logprobs[0].get(position) for position in range(len(here.prompt_token_ids))]
        assert scores == here.prompt_logprobs
        await until(lambda: not engine.in_flight, "what a stop string ended here has not ended there")
        assert engine.admission.samples == engine.admission.blocks == 0

    run(llama_folder, scenario, client=client)


NOTE_ROOT = """
import pathlib, twostroke.remote.loop as l
def noting(port, hello, start=l.start, file=pathlib.Path({file!r})):
    engine, ready = start(port, hello)
    file.write_bytes(engine.core.scheduler.tables.hasher.root(b"tenant"))
    return engine, ready
l.start = noting
"""


@both
def test_engines_with_one_key_agree_on_the_names_of_blocks(
    llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, client: str
) -> None:
    """All names are made from the root: `build_engine` here and an engine behind a client have the same one."""
    code = NOTE_ROOT.format(file=str(tmp_path / "root"))
    monkeypatch.setattr(process, "BOOT", code + process.BOOT)
    monkeypatch.setattr(loop, "start", loop.start)
    exec(code)  # for the engine on a thread; undone with the line above

    async def nothing(engine: AsyncEngine) -> None:
        return

    roots = []
    for key in (bytes(range(32)), bytes(range(32)), bytes(32), None, None):
        run(llama_folder, nothing, client=client, block_key=key)
        roots.append((tmp_path / "root").read_bytes())
    here = build_engine(llama_folder, make_config(**SETTINGS), block_key=bytes(range(32)))
    assert roots[0] == roots[1] == here.core.scheduler.tables.hasher.root(b"tenant")
    assert len(set(roots)) == 4


@both
def test_a_slow_reader_is_given_up(llama_folder: Path, monkeypatch: pytest.MonkeyPatch, client: str) -> None:
    monkeypatch.setattr(stream, "MAX_UNREAD", 20)

    async def scenario(engine: AsyncEngine) -> None:
        unread = engine.submit([[5, 6, 7]], SamplingParams(max_tokens=400, ignore_eos=True))
        await until(lambda: not engine.in_flight, "the slow reader was not given up")
        pieces = await unread.take()
        assert sum(len(piece.event.token_ids) for piece in pieces) < 60
        assert pieces[-1].event.finish_reason == "error" and pieces[-1].event.error == stream.SLOW_READER
        assert await unread.take() == []

    run(llama_folder, scenario, client=client)


@both
def test_a_closed_stream_ends_in_the_engine(long_folder: Path, client: str) -> None:
    """So long that it has not ended when it is closed, even if this process was kept waiting for a second."""

    async def scenario(engine: AsyncEngine) -> None:
        left = engine.submit([[5, 6, 7]], SamplingParams(max_tokens=8000, ignore_eos=True, n=2))
        await left.take()
        left.close()
        pieces = [piece async for piece in left]
        assert sorted(piece.choice for piece in pieces if piece.event.finish_reason == "abort") == [0, 1]
        assert engine.in_flight == engine.admission.samples == 0
        await until(lambda: not engine.counts.running, "the engine goes on")
        assert engine.counts.blocks_free + engine.counts.blocks_cached == engine.counts.blocks_total

    run(long_folder, scenario, client=client, speculate="off")


@both
def test_questions_are_answered_between_steps(llama_folder: Path, client: str) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        assert await answer(engine, [5] * 20)
        steps = await engine.steps(0, 100)
        assert len(steps) == engine.counts.steps == 12
        assert await engine.steps(0, 3) == await engine.steps(steps[-4].number, 100) == steps[-3:]
        with pytest.raises(ConfigError):
            await engine.change({"max_requests": 0})
        assert engine.changed == {}
        await engine.change({"max_requests": 1})
        assert engine.intake.settings.max_requests == 1 and engine.changed == {"max_requests": 1}

    run(llama_folder, scenario, client=client, speculate="off")


@both
def test_a_grammar_is_compiled_beside_the_steps(llama_folder: Path, client: str) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        params = SamplingParams(max_tokens=30, grammar=Grammar("regex", "(yes|no)"), n=2)
        await engine.prepare(params)
        given = engine.submit([[5, 6, 7]], params)
        async for _ in given:
            pass
        assert {one.sample.text for one in given.answers} <= {"yes", "no"}

    run(llama_folder, scenario, client=client)


@both
def test_what_keeps_the_engine_from_starting_is_raised_here(llama_folder: Path, tmp_path: Path, client: str) -> None:
    async def nothing(engine: AsyncEngine) -> None:
        return

    with pytest.raises(ConfigError, match="holds no request"):
        run(llama_folder, nothing, client=client, kv_memory=1)
    with pytest.raises(ModelError):
        run(tmp_path, nothing, client=client)


def test_a_thread_that_fails_is_reported_and_ends_every_stream(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def report(self: loop.EngineLoop, events: list) -> None:
        if self.steps > 2:
            raise MemoryError("out of it")
        plain(self, events)

    plain = loop.EngineLoop._report
    monkeypatch.setattr(loop.EngineLoop, "_report", report)

    async def scenario(engine: AsyncEngine) -> None:
        pieces = [piece async for piece in engine.submit([[5, 6, 7]], GREEDY)]
        assert pieces[-1].event.error == ENGINE_GONE
        assert "the log has the reason" in (engine.client.trouble() or "") and not engine.client.healthy
        assert "out of it" in caplog.text
        with pytest.raises(EngineError):
            engine.submit([[5]], GREEDY)
        with pytest.raises(EngineError):
            await engine.steps(0, 1)

    run(llama_folder, scenario, client="thread")


@pytest.mark.parametrize(("shift", "hours"), [(AHEAD, HOURS), (BEHIND, -HOURS)], ids=["ahead", "behind"])
def test_an_engine_whose_clock_differs_by_hours(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch, shift: str, hours: float
) -> None:
    """The engine's times arrive on the front end's clock, and the front end's arrival on the engine's. They are late by
    the time that Ready was on its way, however long that is on this machine."""
    monkeypatch.setattr(process, "BOOT", shift + process.BOOT)

    async def scenario(engine: AsyncEngine) -> None:
        began = time.monotonic()
        late = engine.client._offset + hours  # type: ignore[attr-defined]
        assert 0 <= late < 60
        params = SamplingParams(temperature=0, max_tokens=12, n=2, logprobs=1)
        given = engine.submit([[5] * 20], params, arrival=began - 0.5)
        async for _ in given:
            pass
        steps = await engine.steps(0, 100)
        now = time.monotonic()
        for one in given.answers:
            timeline = one.sample.timeline
            assert timeline.scheduled is not None and timeline.end is not None
            moments = [timeline.arrival, began, timeline.scheduled, *timeline.token_times]
            assert moments == sorted(moments) and timeline.token_times[-1] <= timeline.end <= now + late
            assert 0.5 <= timeline.queue < 0.5 + (now - began) + late
            assert timeline.queue + timeline.prefill + timeline.decode == pytest.approx(timeline.e2e)
        assert steps and all(began <= step.launched - late <= now for step in steps)

    run(llama_folder, scenario)


@both
def test_one_machine_has_one_clock(llama_folder: Path, client: str) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        assert engine.client._offset == 0.0  # type: ignore[attr-defined]

    run(llama_folder, scenario, client=client)


def test_a_question_without_an_answer_is_given_up(llama_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ANSWER_SECONDS", 0.2)
    monkeypatch.setattr(loop.EngineLoop, "_take", lambda self, message: [])

    async def scenario(engine: AsyncEngine) -> None:
        with pytest.raises(EngineError, match="did not answer"):
            await engine.steps(0, 1)

    run(llama_folder, scenario, client="thread")


# ---- ids -----------------------------------------------------------------------------------------------------------


def test_ids_of_two_front_ends_never_meet() -> None:
    ours, theirs = RequestIds(), RequestIds()
    taken = [{first + i for _ in range(1000) for first in [ids.take(3)] for i in range(3)} for ids in (ours, theirs)]
    assert all(len(ids) == 3000 and max(ids) < 2**53 for ids in taken)
    assert not taken[0] & taken[1]


def test_ids_in_a_row_do_not_cross_into_another_prefix() -> None:
    ids = RequestIds(5)
    assert ids.take(1) == 5 << COUNTER_BITS
    ids.count = (1 << COUNTER_BITS) - 2
    last = ids.take(2)
    assert last + 1 == (6 << COUNTER_BITS) - 1
    first = ids.take(3)
    assert first >> COUNTER_BITS == ids.prefix and first & ((1 << COUNTER_BITS) - 1) == 0 and ids.count == 3


def test_seeds_do_not_depend_on_the_front_end(llama_folder: Path) -> None:
    """A server that was given a seed repeats its answers, although its ids differ each time."""
    params = SamplingParams(max_tokens=8, temperature=1.0)
    found = []

    async def scenario(engine: AsyncEngine) -> None:
        found.append([await answer(engine, [9, 8, 7], params) for _ in range(2)])

    for _ in range(2):
        run(llama_folder, scenario, client="thread")
    assert found[0] == found[1] and found[0][0] != found[0][1]


@both
@pytest.mark.parametrize("late", [False, True])
def test_blocks_of_a_look_up_that_was_given_up_are_freed(llama_folder: Path, client: str, late: bool) -> None:
    """late: given up when the answer is there, before the caller has got it."""

    async def scenario(engine: AsyncEngine) -> None:
        tokens, sent = list(range(3, 43)), []
        async for _ in engine.submit([tokens], SamplingParams(max_tokens=1)):
            pass
        blocks = engine.client
        send = blocks._send
        blocks._send = lambda message: (sent.append(message), send(message))
        waiting = asyncio.ensure_future(blocks.look_up(tokens, b"", 0))
        await asyncio.sleep(0)
        while late and not any(future.done() for future in blocks._questions.values()):
            await asyncio.sleep(0)
        waiting.cancel()
        await until(lambda: any(isinstance(one, Opened) for one in sent), "the engine keeps the copied blocks")

    run(llama_folder, scenario, client=client)


def test_blocks_that_were_copied_out_are_closed_with_the_engine(llama_folder: Path) -> None:
    """Although the front end has never opened them."""
    before, found = opened(), []

    async def scenario(engine: AsyncEngine) -> None:
        tokens = list(range(3, 43))
        assert await answer(engine, tokens)
        found.append(await engine.client.look_up(tokens, b"", 0))  # type: ignore[attr-defined]
        assert len(opened()) > len(before)

    run(llama_folder, scenario, client="thread")
    assert found[0].payload is not None and opened() == before
