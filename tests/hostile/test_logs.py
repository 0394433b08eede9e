"""Prompts, answers and keys are in no line of the log, at any level."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.serve.server import HEADERS, KEY, OTHER_KEY, Server, wait_until

DEBUG = (
    "import logging; logging.basicConfig(level=logging.DEBUG); "
    "import twostroke.remote.process as p; p.Patience.__init__.__defaults__ = (3.0, 10.0, 20.0, 600.0, 0.1, 0.5)"
)
MARK = "Zanzibar7391"  # in every text that is sent
WRONG = "wrong-key-5151"
USER = {"authorization": f"Bearer {OTHER_KEY}"}


@pytest.fixture
def talkative(long_folder: Path) -> Iterator[Server]:
    running = Server(long_folder, code=DEBUG).wait()
    yield running
    running.stop()


def bodies() -> Iterator[tuple[str, object]]:
    """Good ones, and bad ones of every kind, each with the mark."""
    talk = [{"role": "system", "content": MARK}, {"role": "user", "content": f"{MARK} <|im_end|>"}]
    call = {"id": MARK, "type": "function", "function": {"name": "f", "arguments": f'{{"a": "{MARK}"}}'}}
    yield "/v1/completions", {"prompt": MARK, "max_tokens": 40, "ignore_eos": True, "echo": True, "logprobs": 2}
    yield "/v1/completions", {"prompt": MARK, "max_tokens": 40, "stream": True, "stop": [MARK]}
    yield "/v1/completions", {"prompt": MARK * 9000, "max_tokens": 4}
    yield "/v1/completions", {"prompt": MARK, MARK: MARK}
    yield "/v1/completions", {"prompt": MARK, "max_tokens": MARK}
    yield "/v1/completions", {"prompt": MARK, "model": MARK}
    yield "/v1/completions", {"prompt": MARK, "regex": f"({MARK}"}
    yield "/v1/completions", {"prompt": MARK, "regex": f"({MARK}|a+)+b{{900}}", "max_tokens": 9}
    yield (
        "/v1/completions",
        {"prompt": MARK, "grammar": f'root ::= e "{MARK}"\ne ::= e e | "a" | "b"', "max_tokens": 400},
    )
    yield "/v1/completions", {"prompt": [MARK, "\ud800" + MARK], "max_tokens": 4}
    yield "/v1/chat/completions", {"messages": talk, "max_tokens": 10}
    yield "/v1/chat/completions", {"messages": [{"role": "assistant", "tool_calls": [call]}], "max_tokens": 4}
    yield "/v1/chat/completions", {"messages": [{"role": MARK, "content": MARK}]}
    yield "/v1/responses", {"input": MARK, "instructions": MARK, "max_output_tokens": 4}
    yield "/v1/messages", {"model": MARK, "messages": talk[1:], "max_tokens": 4}
    yield "/tokenize", {"prompt": MARK, "return_token_strs": True}
    yield "/twostroke/settings", {"policy": MARK}
    yield f"/v1/{MARK}", {"prompt": MARK}


def test_nothing_that_was_sent_or_answered_is_logged(talkative: Server, capfd: pytest.CaptureFixture[str]) -> None:
    answers = []
    with talkative.client() as client:
        for path, body in bodies():
            for headers in (HEADERS, USER, {"x-api-key": WRONG}):
                answers.append(send(client, path, body, headers))
        for data in (f'{{"prompt": "{MARK}'.encode(), MARK.encode(), b"\xff" + MARK.encode()):
            client.post("/v1/completions", content=data)
        client.get(f"/v1/models/{MARK}%0aERROR%20forged", params={"key": KEY})
        lost = {"prompt": MARK, "max_tokens": 7000, "ignore_eos": True, "stream": True}
        with client.stream("POST", "/v1/completions", json=lost) as stream:
            lines = stream.iter_lines()
            next(lines)
            os.kill(talkative.engine_pid(), signal.SIGKILL)
            assert "error" in "".join(lines)
        wait_until(lambda: talkative.health()["status"] == "ok", "the engine did not come back")
    assert {200, 400, 401, 404} <= {status for status, _ in answers}
    assert talkative.stop() == 0
    said = "\n".join(talkative.lines) + "".join(capfd.readouterr())
    assert "DEBUG" in said and "prompts for" in said and "the engine process is gone" in said, "it was not talkative"
    for secret in (MARK, KEY, OTHER_KEY, WRONG, "forged"):
        assert secret not in said, next(line for line in said.splitlines() if secret in line)
    texts = [text for status, text in answers if status == 200 and len(text) > 20]
    assert texts and not [text for text in texts if text in said]


def send(client: httpx.Client, path: str, body: object, headers: dict[str, str]) -> tuple[int, str]:
    """The status, and the text of the answer to a completion."""
    answer = client.post(path, content=json.dumps(body), headers={"authorization": "", **headers})
    if answer.status_code != 200 or "choices" not in answer.text or "data:" in answer.text:
        return answer.status_code, ""
    choice = answer.json()["choices"][0]
    return 200, str(choice.get("text") or choice.get("message", {}).get("content") or "").removeprefix(MARK)
