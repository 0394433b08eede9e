"""The interactive chat: what it says of an answer that was cut short, and of what looks like markup."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from rich.console import Console

from twostroke.cli import chat
from twostroke.cli.chat import Chat
from twostroke.engine.answer import StreamEvent
from twostroke.errors import InputError
from twostroke.metrics.timeline import Timeline
from twostroke.sampling import SamplingParams


class Scripted:
    """Answers as configured: whole, cut short by Ctrl-C, or not at all."""

    def __init__(self, *scenes: str):
        self.scenes = list(scenes)

    def stream(self, messages: object, params: object) -> Iterator[StreamEvent]:
        scene = self.scenes.pop(0)
        if scene == "refused":
            raise InputError("messages: the template says [/INST]")
        return self.play(scene)

    def play(self, scene: str) -> Iterator[StreamEvent]:
        if scene == "thoughtful":
            yield StreamEvent("", (7,), None, 0, reasoning="[b]Hm.")
        yield StreamEvent("Hello", (1,), None, 0)
        if scene == "cut":
            raise KeyboardInterrupt
        whole = Timeline(0.0, scheduled=1.0, token_times=[2.0, 3.0], end=3.0)
        yield StreamEvent(" there", (2,), None, 0, timeline=whole)


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is broken into lines, whatever terminal the tests run in."""
    monkeypatch.setattr(chat, "errors", Console(stderr=True, highlight=False, width=120))


def test_an_answer_cut_short_is_not_followed_by_the_figures_of_another(capsys: pytest.CaptureFixture[str]) -> None:
    talk = Chat(Scripted("whole", "cut"), SamplingParams(), None, stats=True)  # type: ignore[arg-type]
    assert talk.answer("Hi") == "Hello there"
    assert "prefill" in capsys.readouterr().err
    assert talk.answer("Hi") == "Hello"
    assert "prefill" not in capsys.readouterr().err
    assert talk.last is not None, "/stats still knows the last whole one"


def test_reasoning_is_apart_from_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    talk = Chat(Scripted("thoughtful"), SamplingParams(), None)  # type: ignore[arg-type]
    assert talk.answer("Hi") == "Hello there"
    said = capsys.readouterr()
    assert said.out == "Hello there\n" and said.err == "[b]Hm.\n\n"
    assert talk.history[-1] == {"role": "assistant", "content": "Hello there"}


def test_what_looks_like_markup_is_said_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    talk = Chat(Scripted("refused"), SamplingParams(), None)  # type: ignore[arg-type]
    talk._turn("/[/x]")
    assert "unknown command /[/x]" in capsys.readouterr().err
    talk._turn("Hi")
    assert "[/INST]" in capsys.readouterr().err
