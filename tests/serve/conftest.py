from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests import tiny
from tests.serve.server import Server


@pytest.fixture(scope="session")
def long_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Room for answers that take a while."""
    return tiny.tiny_llama(tmp_path_factory.mktemp("long"), max_position_embeddings=8192)


@pytest.fixture(scope="session")
def server(long_folder: Path) -> Iterator[Server]:
    """One server for all tests that leave it as they found it."""
    running = Server(long_folder, "--max-queue", "64").wait()
    yield running
    assert running.stop() == 0


@pytest.fixture
def client(server: Server) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client
