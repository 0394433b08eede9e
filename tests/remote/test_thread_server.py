"""The server's own tests over an engine on a thread: the server needs nothing that only a child process has.

Requests of every API with the official clients, raw HTTP with every refusal, and live settings run as in tests/serve;
only the server that they ask differs.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import tiny
from tests.serve.server import Server, children, command_line
from tests.serve.test_clients import *  # noqa: F403
from tests.serve.test_http import *  # noqa: F403

THREAD = (
    "import twostroke.remote.async_engine as a\n"
    "from twostroke.remote.thread import ThreadEngine\n"
    "a.ProcessEngine = lambda path, settings, patience: ThreadEngine(path, settings)\n"
    "import twostroke.serve.transport.lingering_close as g; g.LINGER_SECONDS = 60.0\n"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder: Path = tiny.tiny_llama(tmp_path_factory.mktemp("thread"), max_position_embeddings=8192)
    running = Server(folder, "--max-queue", "64", code=THREAD).wait()
    yield running
    running.assert_no_blocks_held()
    assert running.stop() == 0


@pytest.fixture
def client(server: Server) -> Iterator[object]:
    with server.client() as client:
        yield client


def test_no_child_process_runs_an_engine(server: Server) -> None:
    assert server.health()["status"] == "ok"
    assert not any(b"remote.child_main" in command_line(pid) for pid in children(server.process.pid))
