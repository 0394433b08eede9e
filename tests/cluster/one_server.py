"""One engine behind one server: what a deployment's answers are compared with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.serve.server import Server

PROMPT = "The quick brown fox jumps over the lazy dog, and the dog does not mind it at all today. " * 2
BODY = {"prompt": PROMPT, "max_tokens": 60, "temperature": 0, "ignore_eos": True}
SPLIT = ("--prefill", "1", "--decode", "1", "--route", "apart", "-s", "speculate=off", "-s", "max_model_len=512")


@pytest.fixture(scope="session")
def one_engine(llama_folder: Path) -> Iterator[httpx.Client]:
    running = Server(llama_folder, *SPLIT[6:]).wait()
    with running.client() as client:
        yield client
    running.stop()


@pytest.fixture(scope="session")
def expected(one_engine: httpx.Client) -> dict:
    return one_engine.post("/v1/completions", json=BODY).raise_for_status().json()
