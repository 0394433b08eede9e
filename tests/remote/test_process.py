"""The engine behind its process boundary: the words on the wire, and what happens when either side fails."""

from __future__ import annotations

import asyncio
import struct
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twostroke.config import make_config, resolve
from twostroke.engine.llm import LLM
from twostroke.errors import ConfigError, InputError, ModelError
from twostroke.hardware import Hardware
from twostroke.metrics.counts import Counts
from twostroke.metrics.steplog import Blocks, Piece, Step
from twostroke.metrics.timeline import Facts
from twostroke.remote import aio, process, wire
from twostroke.remote.admission import Admission, BusyError
from twostroke.remote.aio import AsyncEngine
from twostroke.remote.frames import MAX_MESSAGE, Frames, WireError
from twostroke.remote.process import EngineError, Patience, Supervisor
from twostroke.remote.worker import warm_up
from twostroke.sampling import Grammar, SamplingParams
from twostroke.types import Event, FinishReason, Request, TokenLogprobs
from twostroke.weights.checkpoint import open_checkpoint
from twostroke.weights.describe import load_arch

SETTINGS = {"threads": 1, "seed": 3}
IMPATIENT = Patience(step=4.0)
GREEDY = SamplingParams(temperature=0, max_tokens=12)
STUCK = """
import sys, time
sys.path.append(sys.argv[3])
from twostroke.engine import core
from twostroke.remote import worker
plain = core.Core.step
def step(self):
    if any(len(r.tokens) == 7 for r in self.scheduler.running.values()):
        time.sleep(1000)
    return plain(self)
core.Core.step = step
worker.main(*sys.argv[1:3])
"""
POISON = STUCK.replace("time.sleep(1000)", "raise MemoryError('not caught by the core')")


# ---- the wire ------------------------------------------------------------------------------------------------------

ids = st.integers(0, 2**31 - 1)
scores = st.builds(
    TokenLogprobs, ids, st.floats(allow_nan=False), st.lists(st.tuples(ids, st.floats(allow_nan=False))).map(tuple)
)
facts = st.builds(Facts, *[st.none() | st.floats(0, 1e9)] * 2, *[ids] * 4)
news = st.builds(
    Event, ids, st.lists(ids).map(tuple), st.none() | st.sampled_from(FinishReason), st.lists(scores).map(tuple),
    st.dictionaries(ids, scores, max_size=3), st.none() | st.text(min_size=1), st.none() | facts,
)  # fmt: skip
params = st.builds(
    SamplingParams, max_tokens=st.none() | st.integers(1, 2**31), temperature=st.floats(0, 100), n=st.integers(1, 128),
    seed=st.none() | st.integers(-(2**63), 2**64 - 1), stop=st.lists(st.text(min_size=1, max_size=9), max_size=3),
    logit_bias=st.dictionaries(ids, st.floats(-100, 100), max_size=3), logprobs=st.none() | st.integers(0, 128),
    grammar=st.none() | st.just(Grammar("regex", "a+")),
)  # fmt: skip
requests = st.builds(
    Request, ids, st.lists(ids).map(tuple), params, st.integers(-(2**63), 2**64 - 1), st.floats(0, 1e9), ids,
    st.frozensets(ids), st.binary(max_size=40), ids, ids,
)  # fmt: skip


def through(data: bytes, cuts: list[int]) -> list:
    """The messages of these bytes, however they are cut."""
    frames, messages, last = Frames(), [], 0
    for cut in [*sorted(c % (len(data) + 1) for c in cuts), len(data)]:
        messages += frames.feed(data[last:cut])
        last = cut
    return messages


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(ids, ids)), st.lists(news, max_size=4), st.lists(st.integers(0, 2**16), max_size=5))
def test_reports_arrive_as_they_were_sent(tokens: list[tuple[int, int]], events: list[Event], cuts: list[int]) -> None:
    report = wire.Report(12.5, tuple(tokens), tuple(events), Counts(*range(len(Counts._fields))), 3.5)
    (message, again) = through(wire.pack_report(report) * 2, cuts)
    assert wire.read_from_child(message) == wire.read_from_child(again) == report


def test_a_report_that_is_cut_short_is_a_wire_error() -> None:
    report = wire.Report(12.5, ((1, 2), (3, 4)), (), Counts(), 3.5)
    kind, body = through(wire.pack_report(report), [])[0]
    for length in range(len(body)):
        with pytest.raises(WireError):
            wire.read_from_child([kind, body[:length]])


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(requests, st.integers(1, 128)), max_size=3), st.lists(ids).map(tuple))
def test_orders_arrive_as_they_were_sent(asked: list[tuple[Request, int]], aborts: tuple[int, ...]) -> None:
    orders = wire.Orders(tuple(asked), aborts)
    assert wire.read_orders(through(wire.pack_orders(orders), [7])[0]) == orders


@settings(deadline=None, max_examples=100)
@given(st.binary(max_size=60))
def test_nonsense_is_a_wire_error(data: bytes) -> None:
    try:
        for message in Frames().feed(struct.pack("<I", len(data)) + data):
            for read in (wire.read_from_child, wire.read_from_parent, wire.read_hello):
                with pytest.raises(WireError):
                    read(message)
    except WireError:
        pass


def test_a_length_over_the_limit_is_refused_before_it_is_read() -> None:
    with pytest.raises(WireError, match="over the limit"):
        list(Frames().feed(struct.pack("<I", MAX_MESSAGE + 1)))


def test_settings_arrive_as_they_were_sent(llama_folder: Path) -> None:
    arch = load_arch(open_checkpoint(llama_folder))
    resolved = resolve(make_config(**SETTINGS), arch, Hardware("cpu", 2, 1 << 30), 1000)
    ready = wire.Ready(resolved, {"load": 1.0}, 0.5, "a machine")
    assert wire.read_from_child(through(wire.pack_ready(ready), [])[0]) == ready
    for changed in (wire.Changed(7, resolved, ""), wire.Changed(8, None, "no")):
        assert wire.read_from_child(through(wire.pack_changed(changed), [])[0]) == changed


def test_questions_and_steps_arrive_as_they_were_sent() -> None:
    for question in (wire.Change(1, {"max_gap": 0.5, "policy": "fcfs"}), wire.Recall(2, 3, 4)):
        assert wire.read_from_parent(through(wire.pack_question(question), [5])[0]) == question
    step = Step(9, 1.5, 0.01, (Piece(1, 0, 16, True), Piece(2, 40, 1)), 2, Blocks(5, 4, 3, 2, 1), 2, 1)
    steps = wire.Steps(3, (step, step._replace(pieces=())))
    assert wire.read_from_child(through(wire.pack_steps(steps), [])[0]) == steps
    with pytest.raises(WireError):
        wire.read_step([9, 1.5, 0.01, [[1, 2, 3, 4, 5]], 2, [1, 2, 3, 4], 0, 0])


# ---- admission -----------------------------------------------------------------------------------------------------


def test_admission_is_by_cost(llama_folder: Path) -> None:
    arch = load_arch(open_checkpoint(llama_folder))
    config = make_config(max_requests=4, kv_blocks=128, **SETTINGS)
    now = [0.0]
    admission = Admission(resolve(config, arch, Hardware("cpu", 2, 1 << 30), 1000), 4, lambda: now[0])
    assert admission.max_samples == 8 and admission.max_blocks == 256
    with pytest.raises(InputError, match="n: 9 samples"):
        admission.take(9, 9)
    with pytest.raises(InputError, match="KV blocks"):
        admission.take(2, 257)
    admission.take(2, 200)
    with pytest.raises(BusyError):
        admission.take(1, 57)
    admission.take(1, 56)
    with pytest.raises(BusyError):
        admission.check()
    for _ in range(2):
        now[0] += 10.0
        admission.release(100)
    with pytest.raises(BusyError) as busy:
        admission.take(1, 256)
    assert busy.value.retry_after == 6  # 56 blocks too many, at 100 in 10 s


# ---- two processes -------------------------------------------------------------------------------------------------


def run(folder: Path, scenario, patience: Patience | None = None, **settings_: object) -> None:
    async def whole() -> None:
        engine = AsyncEngine(folder, SETTINGS | settings_, patience=patience)
        try:
            await asyncio.wait_for(engine.start(), 240)
            await asyncio.wait_for(scenario(engine), 240)
        finally:
            child = engine.supervisor.child
            await engine.stop()
            assert child is None or child.process.poll() is not None, "the child outlived its parent's wish"

    asyncio.run(whole())


async def healthy(engine: AsyncEngine) -> None:
    while not engine.supervisor.healthy:
        await asyncio.sleep(0.02)


async def answer(engine: AsyncEngine, tokens: list[int], params: SamplingParams = GREEDY) -> list[int]:
    await engine.prepare(params)
    return [token async for piece in engine.submit([tokens], params) for token in piece.event.token_ids]


def test_the_same_tokens_as_in_process(llama_folder: Path) -> None:
    """One engine in this process, one behind the wire: stops, samples, logprobs and timelines agree."""
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
        scores = [stream.prompt_logprobs[0].get(position) for position in range(len(here.prompt_token_ids))]
        assert scores == here.prompt_logprobs
        while engine.in_flight:  # what a stop string ended here ends there a moment later
            await asyncio.sleep(0.01)
        assert engine.admission.samples == engine.admission.blocks == 0

    run(llama_folder, scenario)


def test_a_slow_reader_is_given_up(llama_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aio, "MAX_UNREAD", 20)

    async def scenario(engine: AsyncEngine) -> None:
        stream = engine.submit([[5, 6, 7]], SamplingParams(max_tokens=400, ignore_eos=True))
        while engine.in_flight:
            await asyncio.sleep(0.02)
        pieces = await stream.take()
        assert sum(len(piece.event.token_ids) for piece in pieces) < 60
        assert pieces[-1].event.finish_reason == "error" and pieces[-1].event.error == aio.SLOW_READER
        assert await stream.take() == []

    run(llama_folder, scenario)


def test_a_stuck_step_is_seen_and_ended(llama_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process beats, but its step does not end."""
    monkeypatch.setattr(process, "BOOT", STUCK)

    async def scenario(engine: AsyncEngine) -> None:
        assert await answer(engine, [5] * 20)
        stream = engine.submit([[5, 6, 7]], SamplingParams(max_tokens=100, ignore_eos=True))
        pieces = [piece async for piece in stream]
        assert pieces[-1].event.error == aio.ENGINE_GONE
        assert "did not end" in engine.supervisor.why
        with pytest.raises(EngineError):
            engine.submit([[5]], GREEDY)
        await healthy(engine)
        assert engine.supervisor.restarts == 1
        assert await answer(engine, [5] * 20)

    run(llama_folder, scenario, IMPATIENT)


def test_a_crash_ends_everybody_once_and_the_next_is_served(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "BOOT", POISON)

    async def scenario(engine: AsyncEngine) -> None:
        right = await answer(engine, [9] * 20)
        streams = [engine.submit([[9] * 20], SamplingParams(max_tokens=300, ignore_eos=True)) for _ in range(3)]
        streams.append(engine.submit([[5, 6, 7]], SamplingParams(max_tokens=100, ignore_eos=True)))
        for stream in streams:
            ends = [piece.event for piece in [piece async for piece in stream] if piece.event.finish_reason]
            assert len(ends) == 1 and ends[0].error == aio.ENGINE_GONE
        assert engine.admission.samples == engine.admission.blocks == engine.in_flight == 0
        await healthy(engine)
        assert await answer(engine, [9] * 20) == right

    run(llama_folder, scenario)


def test_a_warm_up_changes_no_limit_and_teaches_nothing_of_first_times(llama_folder: Path) -> None:
    engine = LLM(llama_folder, **SETTINGS).engine
    pace = engine.core.scheduler.pace
    pace.min_chunk, pace.max_gap = 128, 7.0  # as they are on a GPU
    pace.prompt_rate.add(1e9)
    assert warm_up(engine) > 0
    found = engine.core.scheduler.pace
    assert (found.min_chunk, found.max_gap, found.flops) == (128, 7.0, pace.flops)
    assert found.prompt_rate.mean is not None and found.prompt_rate.mean < 1.0


class Deaf:
    """Owns an engine and does not care what becomes of it."""

    def on_lost(self, why: str) -> None:
        pass


def test_a_life_that_never_began_is_waited_for_ever_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a long life too: it says nothing of those who come after it and do not start."""

    async def scenario() -> list[float]:
        supervisor, waits = Supervisor(Path("nowhere"), {}, Deaf()), []  # type: ignore[arg-type,var-annotated]

        async def restart(seconds: float) -> None:
            waits.append(seconds)

        monkeypatch.setattr(supervisor, "_restart", restart)
        supervisor._up, supervisor._born = True, time.monotonic() - 1000.0
        for _ in range(4):
            supervisor._lost("it died")
            await asyncio.sleep(0)
        return waits

    assert asyncio.run(scenario()) == [0.5, 1.0, 2.0, 4.0]


def test_a_process_that_cannot_be_made_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[str] = []

    async def spawn(*arguments: object) -> object:
        tries.append("")
        if len(tries) < 3:
            raise BlockingIOError("no more processes")
        return arguments

    async def scenario() -> None:
        monkeypatch.setattr(process, "spawn", spawn)
        supervisor = Supervisor(Path("nowhere"), {}, Deaf(), Patience(backoff=0.0))  # type: ignore[arg-type]
        supervisor._lost("it died")
        while supervisor._tasks:
            await asyncio.gather(*supervisor._tasks, return_exceptions=True)
        assert supervisor.child is not None and len(tries) == 3

    asyncio.run(scenario())


def test_what_keeps_the_engine_from_starting_is_raised_here(llama_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no request"):
        run(llama_folder, healthy, kv_memory=1)
    with pytest.raises(ModelError):
        run(tmp_path, healthy)
