"""What a server prints when it starts, and the first requests to a small one without keys."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests import tiny
from tests.serve.server import Server, children, command_line, wait_until

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


@pytest.fixture(scope="module")
def open_door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Listens everywhere, knows no keys, and has KV blocks for a few requests only."""
    folder = tiny.tiny_llama(tmp_path_factory.mktemp("open"))
    running = Server(folder, "--host", "0.0.0.0", "-s", "kv_blocks=24", "-s", "max_requests=8", keys=()).wait()
    yield running
    assert running.stop() == 0


def test_the_first_structured_answer_waits_for_nothing(open_door: Server) -> None:
    """The first test of this server: the process that tries grammars was started with it, and is asked what is new."""

    def helpers() -> set[int]:
        return {pid for pid in children(open_door.process.pid) if b"grammar.check" in command_line(pid)}

    wait_until(helpers, "what grammars need was not started with the server")
    before = helpers()
    with open_door.client() as client:
        for title in "abcd":  # each schema is new to the server
            form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA | {"title": title}}}
            body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 12, "response_format": form}
            client.post("/v1/chat/completions", json=body).raise_for_status()
    assert helpers() == before and len(before) == 1


def test_the_start_is_explained(open_door: Server, server: Server) -> None:
    lines = "\n".join(open_door.lines)
    stages = re.search(r"ready after ([\d.]+) s: (.*)", lines)
    assert stages is not None
    parts = dict(re.fullmatch(r"(.+) ([\d.]+) s", part).groups() for part in stages[2].split(", "))  # type: ignore[union-attr]
    assert {"processes and imports", "load", "size KV", "warm up"} <= parts.keys()
    assert sum(map(float, parts.values())) == pytest.approx(float(stages[1]), abs=0.1)
    with server.client() as client:
        settings = client.get("/twostroke/settings").json()["settings"]
    derived = {name: one for name, one in settings.items() if f"  {name} = " in "\n".join(server.lines)}
    assert {"kv_blocks", "kv_dtype", "max_batch_tokens", "seed"} <= derived.keys()
    for name, one in derived.items():
        assert f"  {name} = {one['value']}: {one['reason']}" in server.lines


def test_an_open_door_is_warned_of(open_door: Server, server: Server) -> None:
    warning = "WARNING: every client that reaches"
    assert [line for line in open_door.lines if f"{warning} 0.0.0.0" in line and "--api-key" in line]
    assert [line for line in server.lines if warning in line] == []


def test_kv_memory_that_is_too_small_delays_and_never_fails(open_door: Server) -> None:
    """Eight answers of 13 blocks each in 24: where two meet one gives its own back, and all are as they were alone."""
    with open_door.client() as client:

        def ask(number: int) -> dict:
            body = {"prompt": f"The quick {number}", "max_tokens": 190, "ignore_eos": True, "temperature": 0}
            answer = client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            return answer.json()

        alone = [ask(number) for number in range(8)]
        with ThreadPoolExecutor(8) as callers:
            together = list(callers.map(ask, range(8)))
        for one, other in zip(alone, together, strict=True):
            assert other["choices"][0]["text"] == one["choices"][0]["text"]
            assert other["choices"][0]["finish_reason"] == "length"
            timings = other["timings"]
            phases = timings["queue_s"] + timings["prefill_s"] + timings["decode_s"]
            assert phases == pytest.approx(timings["e2e_s"])
        assert sum(other["timings"]["preemptions"] for other in together) > 0
        preempted = re.search(r"^vllm:num_preemptions_total\S* ([\d.]+)$", client.get("/metrics").text, re.MULTILINE)
        assert preempted is not None
        assert float(preempted[1]) == sum(one["timings"]["preemptions"] for one in alone + together)
    open_door.assert_no_blocks_held()
