"""Ctrl-C ends a call between two steps, and the engine goes on to work."""

from __future__ import annotations

import signal
import threading

import pytest

from twostroke import LLM, SamplingParams
from twostroke.engine.interrupt import interrupt_deferred

LONG = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)
SHORT = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)


@pytest.fixture
def handler():
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("signals are only delivered to the main thread")
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield signal.default_int_handler
    signal.signal(signal.SIGINT, previous)


@pytest.fixture(scope="module")
def llm(llama_folder):
    return LLM(llama_folder, seed=3)


@pytest.mark.parametrize("call", ["generate", "stream"])
def test_a_step_is_finished_before_the_call_ends(llm, handler, monkeypatch, call):
    expected = llm.generate([5, 6, 7], SHORT)[0].token_ids
    core, begun, done = llm.engine.core, [], []
    step = core.step

    def interrupted():
        begun.append(1)
        if len(begun) == 3:
            signal.raise_signal(signal.SIGINT)
        events = step()
        done.append(1)
        return events

    monkeypatch.setattr(core, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(getattr(llm, call)([5, 6, 7], LONG))
    monkeypatch.undo()
    assert len(begun) == len(done) == 3
    assert signal.getsignal(signal.SIGINT) is handler
    assert core.idle, "what the call asked for was ended"
    assert llm.generate([5, 6, 7], SHORT)[0].token_ids == expected


def test_a_handler_that_does_not_raise_is_called_and_the_block_goes_on(handler):
    calls: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: calls.append(number))
    with interrupt_deferred() as interrupt:
        for expected in (1, 2):
            signal.raise_signal(signal.SIGINT)
            assert len(calls) == expected - 1
            interrupt.deliver()
            assert len(calls) == expected
        signal.raise_signal(signal.SIGINT)
    assert len(calls) == 3


def test_an_ignored_signal_stays_ignored(handler):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with interrupt_deferred() as interrupt:
        signal.raise_signal(signal.SIGINT)
        interrupt.deliver()
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
