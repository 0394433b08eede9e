from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serve.server import Server
from twostroke.weights.catalog import DEFAULT, fetch

TOOLS_MODEL = "qwen2.5-coder-0.5b"
EMBEDDER = "all-minilm-l6-v2"


def serving(model: str) -> Iterator[Server]:
    """A real server with a real model of the catalog, as a user starts it."""
    fetch(model)
    running = Server(model, threads=2).wait()
    yield running
    assert running.stop() == 0


@pytest.fixture(scope="session")
def chat_server() -> Iterator[Server]:
    """The default model, which has no form for tools of its own."""
    yield from serving(DEFAULT)


@pytest.fixture(scope="session")
def tool_server() -> Iterator[Server]:
    """A model that was trained to call tools."""
    yield from serving(TOOLS_MODEL)


@pytest.fixture(scope="session")
def embedding_server() -> Iterator[Server]:
    yield from serving(EMBEDDER)
