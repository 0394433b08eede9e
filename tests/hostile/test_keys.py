"""User keys and admin keys: what concerns all keys is the admin's, and answers show only what their caller may know."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests import tiny
from tests.serve.server import HEADERS, KEY, OTHER_KEY, Server, wait_until
from twostroke.metrics.registry import Metrics
from twostroke.metrics.timeline import Timeline
from twostroke.remote.async_engine import AsyncEngine
from twostroke.remote.ended import EndedRequests, by_arrival
from twostroke.sampling import SamplingParams
from twostroke.serve.api.admin import arrival_document
from twostroke.serve.app import App
from twostroke.serve.service import Service
from twostroke.serve.transport.auth import Keys
from twostroke.types import Request

USER = {"authorization": f"Bearer {OTHER_KEY}"}
OPERATOR = ("/twostroke/settings", "/twostroke/steps", "/twostroke/arrivals", "/twostroke/diagnosis")
SHORT = {"prompt": "Once upon a time", "max_tokens": 4, "temperature": 0}
QUICK = "import twostroke.remote.process as p; p.Patience.__init__.__defaults__ = (3.0, 10.0, 20.0, 600.0, 0.1, 0.5)"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.tiny_llama(tmp_path_factory.mktemp("keys"))


@pytest.fixture(scope="module")
def two_kinds(folder: Path) -> Iterator[Server]:
    running = Server(folder, code=QUICK).wait()
    yield running
    running.stop()


@pytest.fixture
def user(two_kinds: Server) -> Iterator[httpx.Client]:
    with two_kinds.client(headers=USER) as client:
        yield client


def refused(answer: httpx.Response, code: str) -> dict:
    assert answer.status_code == 403, answer.text
    error = answer.json()["error"]
    assert error["code"] == code and error["type"] == "permission_error"
    return error


def test_what_concerns_all_keys_needs_an_admin_key(two_kinds: Server, user: httpx.Client) -> None:
    for path in (*OPERATOR, "/twostroke/anything"):
        assert "admin key" in refused(user.get(path), "admin_key_needed")["message"]
    refused(user.post(OPERATOR[0], json={"max_requests": 1}), "admin_key_needed")
    with two_kinds.client() as admin:
        for path in OPERATOR:
            assert admin.get(path).status_code == 200
        assert admin.post(OPERATOR[0], json={"prefix_cache": True}).status_code == 200
    for path in ("/v1/models", "/health", "/metrics", "/openapi.json"):
        assert user.get(path).status_code == 200


def test_an_urgent_priority_is_the_admins(two_kinds: Server, user: httpx.Client) -> None:
    for priority in (-1, -(2**31)):
        error = refused(user.post("/v1/completions", json=SHORT | {"priority": priority}), "admin_key_needed")
        assert error["param"] == "priority"
    for priority in (0, 7):
        assert user.post("/v1/completions", json=SHORT | {"priority": priority}).status_code == 200
    with two_kinds.client() as admin:
        assert admin.post("/v1/completions", json=SHORT | {"priority": -5}).status_code == 200


def test_without_an_admin_key_nothing_opens_the_operators_routes(folder: Path) -> None:
    """And the refusal says how to have one. The dashboard then asks for a user key and leaves those routes alone."""

    def ask(path: str, headers: dict) -> httpx.Response:
        return asked(folder, Keys([KEY, OTHER_KEY]), path, headers, "127.0.0.1")

    assert "--admin-key" in refused(ask("/twostroke/settings", HEADERS), "no_admin_key")["message"]
    assert b'data-key="user"' in ask("/", {}).content


def test_without_keys_this_machine_is_the_admin(folder: Path) -> None:
    """503, because no model is loaded: it got past the key."""
    assert asked(folder, Keys([]), "/twostroke/settings", {}, "127.0.0.1").status_code == 503
    far = asked(folder, Keys([]), "/twostroke/settings", {}, "192.0.2.7")
    assert "own machine" in refused(far, "no_admin_key")["message"]


def asked(folder: Path, keys: Keys, path: str, headers: dict, peer: str) -> httpx.Response:
    async def whole() -> httpx.Response:
        service = Service(AsyncEngine(folder, {}), "tiny", keys, Metrics("tiny"))
        transport = httpx.ASGITransport(App(service), client=(peer, 4000))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.get(path, headers=headers)

    return asyncio.run(whole())


def test_arrivals_do_not_tell_a_prompt_from_candidates() -> None:
    """A reader knows the exact tokens of 5,000 candidates. The length of the victim's prompt fits hundreds of them, and
    the victim's parts have neither the contents nor the lengths that the same prompt has under the reader's key."""
    rng = random.Random(4)
    record = EndedRequests()
    candidates = [[rng.randrange(50_000) for _ in range(rng.randint(40, 90))] for _ in range(5_000)]
    victim = candidates[1234]
    for number in (1, 2):  # twice: parts that only one request has are joined
        add(record, number, victim, b"victim")
    parts = json.loads(json.dumps(arrival_document(by_arrival(record.latest())[0], 0.0, None)))
    theirs = [length for _, length in parts["parts"]]
    assert sum(theirs) == parts["prompt_tokens"] == -(-len(victim) // 16) * 16
    same_size = [one for one in candidates if -(-len(one) // 16) * 16 == parts["prompt_tokens"]]
    assert len(same_size) > 500
    right = 0
    for salt in range(40):
        reader = EndedRequests()
        add(reader, 1, victim, b"victim")
        add(reader, 2, victim, b"reader %d" % salt)
        mine, other = (one.segments for one in reader.latest())
        assert not {part.content for part in mine} & {part.content for part in other}
        right += [part.length for part in other] == [part.length for part in mine]
    assert right < 10, f"under another key the prompt was cut at the same places {right} times of 40"


def add(record: EndedRequests, number: int, tokens: list[int], salt: bytes) -> None:
    timeline = Timeline(float(number), end=1.0, prompt_tokens=len(tokens))
    record.add(Request(number, tuple(tokens), SamplingParams()), timeline, salt, "stop")


def test_an_engine_that_cannot_start_shows_no_paths(tmp_path: Path, folder: Path) -> None:
    """The log has the reason with its paths; clients get a sentence."""
    model = tmp_path / "model"
    shutil.copytree(folder, model)
    server = Server(model, code=QUICK).wait()
    try:
        (model / "config.json").write_text("{")
        os.kill(server.engine_pid(), signal.SIGKILL)
        wait_until(lambda: "could not start" in str(server.health()["reason"]), "the engine was started again")
        with server.client(headers=USER) as client:
            seen = [client.get("/health"), client.post("/v1/completions", json=SHORT), client.get("/health/ready")]
        with server.client() as admin:
            seen += [admin.get("/twostroke/steps"), admin.post("/twostroke/settings", json={"max_requests": 1})]
        for answer in seen:
            assert answer.status_code == 503, answer.text
            assert str(tmp_path) not in answer.text and "config.json" not in answer.text, answer.text
        wait_until(lambda: any(str(model) in line and "gone" in line for line in server.lines), "the log has no reason")
    finally:
        server.stop()
