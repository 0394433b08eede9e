"""The operator's routes: settings that change while the server runs, its last steps and requests."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.serve.server import Server, wait_until
from twostroke.cost.simulation.trace import Arrival, PromptPart
from twostroke.hardware import machine_name

ADMIN = ("/twostroke/settings", "/twostroke/steps", "/twostroke/arrivals")


@pytest.fixture(scope="module")
def admin(long_folder: Path) -> Iterator[Server]:
    running = Server(long_folder, "-s", "max_requests=8", "-s", "max_model_len=2048", "--max-queue", "9").wait()
    yield running
    assert running.stop() == 0


def complete(client: httpx.Client, prompt: str, tokens: int = 8, **more: object) -> dict:
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **more}
    return client.post("/v1/completions", json=body).raise_for_status().json()


def test_only_with_a_key(admin: Server) -> None:
    with admin.client(headers={}) as client:
        for path in ADMIN:
            assert client.get(path).status_code == 401
        assert client.post(ADMIN[0], json={"max_requests": 1}).status_code == 401
    with admin.client() as client:
        assert client.get(ADMIN[0]).json()["settings"]["max_requests"]["value"] == 8


def test_every_setting_has_a_reason(admin: Server) -> None:
    with admin.client() as client:
        document = client.get("/twostroke/settings").json()
    settings = document["settings"]
    assert {name for name, one in settings.items() if one["live"]} == {
        "max_batch_tokens", "max_requests", "batching", "chunked_prefill", "max_gap", "policy", "prefix_cache",
        "speculate",
    }  # fmt: skip
    assert all(one["reason"] for one in settings.values())
    assert settings["max_requests"]["reason"] == settings["max_queue"]["reason"] == "given at the start"
    assert settings["kv_dtype"] == {"value": "int8", "reason": settings["kv_dtype"]["reason"], "live": False}
    assert document["machine"] == machine_name() != ""
    assert document["rows"] == 8 and document["layout"]["block_tokens"] == 16
    assert len(document["arch"]["layers"]) == sum(len(group["layers"]) for group in document["layout"]["groups"])


def test_live_settings_change_and_survive_the_engine(admin: Server) -> None:
    with admin.client() as client:
        right = complete(client, "Once upon a time there was", 30)["choices"]
        changes = {"max_requests": 3, "max_batch_tokens": 64, "policy": "shortest", "prefix_cache": False}
        settings = client.post("/twostroke/settings", json=changes).raise_for_status().json()["settings"]
        for name, value in changes.items():
            assert settings[name] == {"value": value, "reason": "changed while running", "live": True}
        assert complete(client, "Once upon a time there was", 30)["choices"] == right
        assert (
            complete(client, "Once upon a time there was", 30)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        )
        last = client.get("/twostroke/steps").json()["last"]
        complete(client, "word " * 100)
        steps = client.get("/twostroke/steps", params={"since": last}).json()["steps"]
        assert max(step["prefill_tokens"] for step in steps) == 64
        os.kill(admin.engine_pid(), signal.SIGKILL)
        wait_until(lambda: client.get("/health").json().get("restarts") == 1, "it was not started again")
        wait_until(lambda: client.get("/health").status_code == 200, "it was not started again")
        kept = client.get("/twostroke/settings").json()
        assert {name: kept["settings"][name]["value"] for name in changes} == changes
        assert kept["restarts"] == 1 and kept["rows"] == 8
        back = {"max_requests": 8, "max_batch_tokens": 512, "policy": "fcfs", "prefix_cache": True}
        assert client.post("/twostroke/settings", json=back).status_code == 200
        assert complete(client, "Once upon a time there was", 30)["choices"] == right


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"kv_dtype": "int8"}, "kv_dtype", "start the server again with --set kv_dtype="),
        ({"max_queue": 3}, "max_queue", "start the server again with --max-queue"),
        ({"max_request": 3}, "max_request", "Did you mean 'max_requests'?"),
        ({"zzz": 3}, "zzz", "GET /openapi.json lists the fields"),
        ({"max_requests": 9}, "max_requests", "can have: start again with max_requests=9"),
        ({"max_requests": 0}, "max_requests", ""),
        ({"max_requests": None}, "max_requests", ""),
        ({"max_batch_tokens": 4}, "max_batch_tokens", "max_requests"),
        ({"policy": "sometimes"}, "policy", "must be one of"),
        ({"chunked_prefill": False, "max_gap": 0.1}, "chunked_prefill", "max_gap"),
        ({}, None, "names no setting"),
    ],
)
def test_what_cannot_change_is_refused_by_name(admin: Server, body: dict, param: str | None, says: str) -> None:
    with admin.client() as client:
        before = client.get("/twostroke/settings").json()
        refused = client.post("/twostroke/settings", json=body)
        assert refused.status_code == 400, refused.text
        error = refused.json()["error"]
        assert error["param"] == param and says in error["message"]
        assert client.get("/twostroke/settings").json() == before


def test_steps_account_for_every_token(admin: Server) -> None:
    with admin.client() as client:
        last = client.get("/twostroke/steps").json()["last"]
        answer = complete(client, "a long walk home " * 20, 12, n=2, speculate=False)
        document = client.get("/twostroke/steps", params={"since": last}).json()
        steps = document["steps"]
        assert [step["number"] for step in steps] == sorted({step["number"] for step in steps})
        assert document["last"] == steps[-1]["number"] > last
        for step in steps:
            lanes = step["lanes"]
            assert step["prefill_tokens"] == sum(lane["tokens"] for lane in lanes if lane["stage"] == "prefill")
            assert step["decode_tokens"] == sum(lane["tokens"] for lane in lanes if lane["stage"] == "decode")
            blocks = step["blocks"]
            assert blocks["free"] + blocks["held"] + blocks["cached"] == blocks["total"]
            assert step["seconds"] > 0 and step["flops"] > 0 and step["bytes"] > 0
            assert abs(document["now"] - step["time"]) < 60
        usage = answer["usage"]
        assert sum(step["decode_tokens"] for step in steps) == usage["completion_tokens"] - 2
        assert any(step["blocks"]["shared"] for step in steps)  # two samples of one prompt
        assert len({lane["request"] for step in steps for lane in step["lanes"]}) == 2
        newest = client.get("/twostroke/steps", params={"since": last, "limit": 3}).json()["steps"]
        assert newest == steps[-3:]
        assert client.get("/twostroke/steps", params={"since": document["last"]}).json()["steps"] == []
        for bad in ("since=-1", "limit=0", "limit=9999", "since=x", "what=1", "since=" + "9" * 40):
            refused = client.get(f"/twostroke/steps?{bad}")
            assert refused.status_code == 400 and refused.json()["error"]["param"] == bad.split("=")[0]


def test_arrivals_can_be_replayed(admin: Server) -> None:
    rules = "You are a careful assistant who answers in one line and never guesses. " * 6
    with admin.client() as client:
        complete(client, rules + "Where is the library?", 5)
        complete(client, "Tuesday. " + rules + "How far is the moon?", 7)
        found = client.get("/twostroke/arrivals", params={"limit": 2})
        first, second = found.json()["arrivals"]
        assert "library" not in found.text and "careful" not in found.text
    for one, output in ((first, 5), (second, 7)):
        row = Arrival(one["time"], tuple(PromptPart(*part) for part in one["parts"]), one["output_tokens"])
        assert row.prompt == one["prompt_tokens"] and row.output == output and one["finish_reason"] == "length"
        assert one["queue_s"] + one["prefill_s"] + one["decode_s"] == pytest.approx(one["e2e_s"])
    shared = {content for content, _ in first["parts"]} & {content for content, _ in second["parts"]}
    common = sum(length for content, length in second["parts"] if content in shared)
    assert common > 0.5 * second["prompt_tokens"]  # found although it stands elsewhere
    assert first["time"] < second["time"]
