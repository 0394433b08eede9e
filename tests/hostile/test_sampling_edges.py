"""Values of sampling fields at the edge of what numbers can hold."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import numpy as np
import pytest

from tests import tiny
from tests.choices import next_choice
from tests.serve.server import Server
from twostroke import SamplingParams
from twostroke.run.sample import choose_one
from twostroke.types import Request, RequestState

TEMPERATURES = [5e-324, 1e-300, 1e-46, 1e-38, 1e-37, 1e-12, 1e-9]  # 1e-46 is 0 and 1e-38 is subnormal in float32


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    running = Server(tiny.tiny_llama(tmp_path_factory.mktemp("edges"))).wait()
    with running.client() as client:
        yield client
    assert running.stop() == 0


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("more", [{}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"logit_bias": {"7": 1.0}}])
def test_a_tiny_temperature_is_greedy(client: httpx.Client, temperature: float, more: dict) -> None:
    def text(value: float) -> str:
        body = {"prompt": "Once upon", "max_tokens": 12, "temperature": value, "seed": 3, "ignore_eos": True, **more}
        answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    assert text(temperature) == text(0.0)


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_equal_logits_are_still_equally_likely(temperature: float) -> None:
    """At any temperature above 0 the noise decides between equals."""
    row = np.full(16, -3.0, np.float32)
    row[[4, 9]] = 30.0
    found = set()
    for seed in range(40):
        state = RequestState(Request(1, (5,), SamplingParams(temperature=temperature), seed=seed))
        found.add(choose_one(row, next_choice(state)))
    assert found == {4, 9}


@pytest.mark.parametrize("names", [["5", "05", "005"], ["05"], ["00"], ["٥"], ["+5"], [" 5"], ["5.0"], ["-0"]])
def test_a_token_has_one_name_in_logit_bias(client: httpx.Client, names: list[str]) -> None:
    body = {"prompt": "x", "max_tokens": 1, "logit_bias": dict.fromkeys(names, 1.0)}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == "logit_bias"
    good = {"prompt": "x", "max_tokens": 1, "logit_bias": {"5": 1.0, "0": -1.0}}
    assert client.post("/v1/completions", json=good).status_code == 200
