"""A child process with limits: what it exceeds ends the child, and the next message finds a new one."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ended_parent import assert_ends
from twostroke.confined import GRACE_SECONDS, WALL_FACTOR, AccidentError, Confined, LimitError

SECONDS = 0.3


@pytest.fixture(scope="module")
def child() -> Iterator[Confined]:
    made = Confined("tests.confined_child", lambda: {"name": "made once"}, seconds=SECONDS, memory=64 << 20)
    yield made
    made.close()


@pytest.mark.parametrize("value", [None, [1, 2.5, True, "ü", b"\xff"], {"a": {"b": []}}, "x" * 3_000_000, float("inf")])
def test_messages_arrive_as_they_are(child: Confined, value: Any) -> None:
    answer = child.ask({"value": value})
    assert answer["message"] == {"value": value} and answer["name"] == "made once"


@pytest.mark.parametrize(
    "message",
    [{"loop": 1}, {"sleep": 60}, {"allocate": 1 << 30}, {"signal": signal.SIGSEGV}, {"signal": signal.SIGABRT}],
)
def test_what_exceeds_a_limit_or_crashes_is_a_limit_error(child: Confined, message: dict[str, Any]) -> None:
    began = time.monotonic()
    with pytest.raises(LimitError):
        child.ask(message)
    assert time.monotonic() - began < 60
    assert child.ask({})["message"] == {}


def test_a_child_lives_on_between_messages(child: Confined) -> None:
    assert child.ask({})["pid"] == child.ask({"sleep": 0.01})["pid"] == child.pid


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP])
def test_a_child_that_was_ended_from_outside_is_replaced_and_asked_again(child: Confined, number: int) -> None:
    child.start()
    before, began = child.pid, time.monotonic()
    assert before is not None
    os.kill(before, number)
    assert child.ask({"value": 1})["message"] == {"value": 1}
    assert child.pid != before and not Path(f"/proc/{before}").exists()
    assert time.monotonic() - began < SECONDS * WALL_FACTOR + GRACE_SECONDS + 60


def test_a_message_during_which_every_child_is_killed_is_not_called_too_large(child: Confined) -> None:
    with pytest.raises(AccidentError, match=r"tests\.confined_child was killed or stopped twice"):
        child.ask({"signal": signal.SIGKILL})
    assert child.ask({})["message"] == {}


def test_a_child_that_does_not_start_is_named() -> None:
    with pytest.raises(RuntimeError, match="does not start"):
        Confined("twostroke.errors", seconds=1.0, memory=1 << 20).start()


def test_a_child_ends_with_its_parent() -> None:
    code = """
import os, signal
from twostroke.confined import Confined
child = Confined("tests.confined_child", seconds=5.0, memory=1 << 26)
child.start()
print(child.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert_ends(code)
