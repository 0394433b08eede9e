"""The engine in a child process, and what happens when it hangs, dies or does not start."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.remote.engines import GREEDY, SETTINGS, answer, healthy, run
from tests.waiting import until
from twostroke.engine.llm import LLM
from twostroke.errors import ConfigError, ModelError
from twostroke.remote import async_engine, process
from twostroke.remote.async_engine import AsyncEngine
from twostroke.remote.client import EngineError
from twostroke.remote.loop import warm_up
from twostroke.remote.process import Patience, ProcessEngine
from twostroke.sampling import SamplingParams
from twostroke.types import Request

IMPATIENT = Patience(step=4.0)
STUCK = """
import sys, time
sys.path.append(sys.argv[3])
from twostroke.engine import core
from twostroke.remote import child_main
plain = core.Core.step
def step(self):
    if any(len(r.tokens) == 7 for r in self.scheduler.running.values()):
        time.sleep(1000)
    return plain(self)
core.Core.step = step
child_main.main(*sys.argv[1:3])
"""
SLOW_TO_CHANGE = """
import sys, time
sys.path.append(sys.argv[3])
from twostroke.remote import child_main, loop
plain = loop.change
def change(*given):
    time.sleep(0.5)
    return plain(*given)
loop.change = change
child_main.main(*sys.argv[1:3])
"""
POISON = STUCK.replace("time.sleep(1000)", "raise MemoryError('not caught by the core')")


def test_a_stuck_step_is_seen_and_ended(llama_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process beats, but its step does not end."""
    monkeypatch.setattr(process, "BOOT", STUCK)

    async def scenario(engine: AsyncEngine) -> None:
        assert await answer(engine, [5] * 20)
        stream = engine.submit([[5, 6, 7]], SamplingParams(max_tokens=100, ignore_eos=True))
        pieces = [piece async for piece in stream]
        assert pieces[-1].event.error == async_engine.ENGINE_GONE
        assert "did not end" in engine.client.why
        with pytest.raises(EngineError):
            engine.submit([[5]], GREEDY)
        await healthy(engine)
        assert engine.client.restarts == 1
        assert await answer(engine, [5] * 20)

    run(llama_folder, scenario, IMPATIENT)


def test_a_crash_ends_every_stream_once_and_the_next_is_served(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "BOOT", POISON)

    async def scenario(engine: AsyncEngine) -> None:
        right = await answer(engine, [9] * 20)
        streams = [engine.submit([[9] * 20], SamplingParams(max_tokens=300, ignore_eos=True)) for _ in range(3)]
        streams.append(engine.submit([[5, 6, 7]], SamplingParams(max_tokens=100, ignore_eos=True)))
        for stream in streams:
            ends = [piece.event for piece in [piece async for piece in stream] if piece.event.finish_reason]
            assert len(ends) == 1 and ends[0].error == async_engine.ENGINE_GONE
        assert engine.admission.samples == engine.admission.blocks == engine.in_flight == 0
        await healthy(engine)
        assert await answer(engine, [9] * 20) == right

    run(llama_folder, scenario)


def test_changed_settings_hold_from_the_first_moment_of_a_new_process(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also before the new process has said that it uses them: it reads them before any request."""
    monkeypatch.setattr(process, "BOOT", SLOW_TO_CHANGE)

    async def scenario(engine: AsyncEngine) -> None:
        await engine.change({"max_requests": 2})
        assert isinstance(engine.client, ProcessEngine) and engine.client.child is not None
        engine.client.child.process.kill()
        await until(lambda: engine.client.restarts, "its death was not seen")
        await healthy(engine)
        assert engine.intake.settings.max_requests == 2
        assert engine.client.ready is not None and engine.client.ready.settings.max_requests == 4
        assert await answer(engine, [5] * 20)

    run(llama_folder, scenario, max_requests=4)


def test_a_warm_up_changes_no_limit_and_teaches_nothing_of_first_times(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = LLM(llama_folder, **SETTINGS).engine
    submit, asked = engine.core.submit, list[Request]()
    monkeypatch.setattr(engine.core, "submit", lambda request: asked.append(request) or submit(request))
    pace = engine.core.scheduler.pace
    pace.min_chunk, pace.max_gap = 128, 7.0  # as they are on a GPU
    pace.prompt_rate.add(1e9)
    tokens, seconds = warm_up(engine)
    assert tokens > 0 and seconds > 0
    assert [request.params.logprobs for request in asked] == [1, None, None], "the host chooses tokens too"
    found = engine.core.scheduler.pace
    assert (found.min_chunk, found.max_gap, found.flops) == (128, 7.0, pace.flops)
    assert found.prompt_rate.mean is not None and found.prompt_rate.mean < 1.0


def test_the_silence_of_a_process_that_slept_itself_is_not_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after SIGSTOP: until it has looked again, and for as long as the engine may be silent after that."""
    now = [100.0]
    monkeypatch.setattr(process, "time", SimpleNamespace(monotonic=lambda: now[0]))
    client = ProcessEngine(Path("nowhere"), {}, Patience(late=3.0, dead=10.0))
    killed: list[str] = []
    client.child = SimpleNamespace(kill=killed.append)  # type: ignore[assignment]

    async def watched(seconds: float) -> None:
        now[0] += seconds
        await asyncio.sleep(0)

    async def scenario() -> None:
        sleep = asyncio.sleep
        monkeypatch.setattr(process, "asyncio", SimpleNamespace(sleep=lambda seconds: sleep(0)))
        client._up, client._heard, client._moved, client._looked = True, now[0], now[0], now[0]
        watching = asyncio.ensure_future(client._watch())
        await watched(0.5)
        now[0] += 60.0
        assert client.healthy, "what it sent meanwhile is not read yet"
        await watched(0.0)
        assert client.healthy and not killed
        for _ in range(5):
            await watched(0.5)
        assert client.healthy
        await watched(1.0)
        assert "no sign of life for 4 s" in (client.trouble() or "") and not killed
        for _ in range(7):
            await watched(1.0)
        assert killed == ["it gave no sign of life for 10 s"]
        watching.cancel()

    asyncio.run(scenario())


class IgnoringListener:
    """A listener that does nothing when the engine is lost."""

    def on_lost(self, why: str) -> None:
        pass


def test_restarts_that_fail_wait_longer_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a long life too: that says nothing about later processes that do not start."""

    async def scenario() -> list[float]:
        client, waits = ProcessEngine(Path("nowhere"), {}), []  # type: ignore[var-annotated]
        client.listener = IgnoringListener()  # type: ignore[assignment]

        async def restart(seconds: float) -> None:
            waits.append(seconds)

        monkeypatch.setattr(client, "_restart", restart)
        client._up, client._born = True, time.monotonic() - 1000.0
        for _ in range(4):
            client._lost("it died", "it died")
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
        client = ProcessEngine(Path("nowhere"), {}, Patience(backoff=0.0))
        client.listener = IgnoringListener()  # type: ignore[assignment]
        client._lost("it died", "it died")
        while client._tasks:
            await asyncio.gather(*client._tasks, return_exceptions=True)
        assert client.child is not None and len(tries) == 3

    asyncio.run(scenario())


def test_what_keeps_the_engine_from_starting_is_raised_here(llama_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no request"):
        run(llama_folder, healthy, kv_memory=1)
    with pytest.raises(ModelError):
        run(tmp_path, healthy)
