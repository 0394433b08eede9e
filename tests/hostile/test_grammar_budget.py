"""A grammar that becomes slower with every token ends, and delays no other key's stream beyond `max_gap`."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from itertools import pairwise

import httpx
import pytest

from tests import tiny
from tests.measured import measured
from tests.serve.server import OTHER_KEY, Server, events, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.alone]  # seconds for each case

AMBIGUOUS = 'root ::= e\ne ::= e e | "a" | "b"'  # a text of n letters can be read in exponentially many ways
MAX_GAP = 0.25


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tiny.tiny_llama(tmp_path_factory.mktemp("budget"), max_position_embeddings=8192)
    running = Server(folder, "-s", f"max_gap={MAX_GAP}").wait()
    yield running
    assert running.stop() == 0


class Neighbour(threading.Thread):
    """Another key's stream, and the moments at which its text arrives."""

    def __init__(self, server: Server):
        super().__init__(daemon=True)
        self.client = server.client(headers={"authorization": f"Bearer {OTHER_KEY}"})
        self.moments: list[float] = []
        self.enough = False

    def run(self) -> None:
        body = {"prompt": "Once", "max_tokens": 8000, "ignore_eos": True, "stream": True, "seed": 1}
        with self.client, self.client.stream("POST", "/v1/completions", json=body) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    self.moments.append(time.monotonic())
                if self.enough:
                    return

    def longest_gap(self, began: float, ended: float) -> float:
        moments = [moment for moment in self.moments if began <= moment <= ended]
        assert len(moments) > 5, "the stream hardly moved"
        return max(later - earlier for earlier, later in pairwise(moments))


def attack(client: httpx.Client, n: int) -> str:
    """The error of a request with the slow grammar."""
    body = {"prompt": "x", "grammar": AMBIGUOUS, "n": n, "max_tokens": 2000, "min_tokens": 2000, "stream": True}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200
    last = json.loads([event for event in events(answer.text) if event != "[DONE]"][-1])
    assert last["error"]["code"] == "grammar_failed", last
    return str(last["error"]["message"])


@measured
@pytest.mark.parametrize("n", [1, 32])
def test_a_slow_grammar_ends_and_harms_no_neighbour(server: Server, n: int) -> None:
    neighbour = Neighbour(server)
    neighbour.start()
    wait_until(lambda: len(neighbour.moments) > 20, "the stream does not start")
    try:
        with server.client() as client:
            began = time.monotonic()
            assert "takes more time" in attack(client, n)
            ended = time.monotonic()
        assert neighbour.longest_gap(began, ended) < MAX_GAP
        assert ended - began < 30
    finally:
        neighbour.enough = True
        neighbour.join()
    server.assert_no_blocks_held()


def test_an_honest_grammar_of_many_samples_is_not_ended(server: Server) -> None:
    body = {"prompt": "x", "regex": "[a-z]+( [a-z]+){3,300}", "n": 32, "max_tokens": 100, "seed": 2}
    with server.client() as client:
        answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200
    assert {choice["finish_reason"] for choice in answer.json()["choices"]} <= {"stop", "length"}
