"""What a model brings along: tokens for filling in the middle (`suffix` of /v1/completions), and its own sampling."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import tokenizers

from tests import tiny
from tests.serve.server import Server
from twostroke.text.infill import MARKS

LONGEST = 128  # tokens of a request


def made_folder(folder: Path) -> Path:
    tiny.tiny_llama(folder, num_hidden_layers=1, vocab_size=tiny.VOCAB + 8)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(list(MARKS[0]))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.25, "top_p": 0.75}))
    return folder


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = made_folder(tmp_path_factory.mktemp("made"))
    running = Server(folder, "-s", f"max_model_len={LONGEST}", keys=()).wait()
    with running.client() as client:
        yield client
    assert running.stop() == 0


def fill(client: httpx.Client, **body: object) -> httpx.Response:
    return client.post("/v1/completions", json={"max_tokens": 2, "ignore_eos": True, **body})


def test_the_prompt_is_prefix_suffix_and_marks(client: httpx.Client) -> None:
    answer = fill(client, prompt=[5, 6, 7], suffix="a").json()
    assert answer["usage"]["prompt_tokens"] == 3 + 1 + 3 and answer["choices"][0]["finish_reason"] == "length"


def test_a_prefix_may_be_empty(client: httpx.Client) -> None:
    """An editor's cursor at the beginning of a file."""
    answer = fill(client, prompt="", suffix="a")
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens"] == 1 + 3


def test_prefix_and_suffix_together_must_fit(client: httpx.Client) -> None:
    """Each of them fits alone."""
    answer = fill(client, prompt=[5] * 100, suffix="1 2 3 4 5 6 7 8 9 " * 4)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == "prompt" and f"must fit {LONGEST}" in error["message"]
    assert fill(client, prompt=[5, 6], suffix="a").status_code == 200


def test_special_tokens_beside_the_marks_are_a_hint(client: httpx.Client) -> None:
    asked = fill(client, prompt=[5], suffix="a", add_special_tokens=True)
    assert asked.headers["x-twostroke-ignored"] == "add_special_tokens"
    assert "x-twostroke-ignored" not in fill(client, prompt=[5], suffix="a", add_special_tokens=False).headers


@pytest.mark.parametrize(
    ("given", "shown"),
    [({}, (0.25, 0.75)), ({"top_p": 0.5}, (0.25, 0.5)), ({"temperature": 2.0}, (2.0, 1.0))],
)  # fmt: skip
def test_a_response_shows_the_sampling_that_was_used(client: httpx.Client, given: dict, shown: tuple) -> None:
    answer = client.post("/v1/responses", json={"input": "hi", "max_output_tokens": 2, **given}).json()
    assert (answer["temperature"], answer["top_p"]) == shown
