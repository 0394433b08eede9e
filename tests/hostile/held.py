"""What a server and its engine hold of the system: to see that nothing leaks."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import NamedTuple

from tests.serve.server import Server, children
from tests.serve.test_load import memory

numbers = itertools.count(1)  # a new grammar each time


class Held(NamedTuple):
    """Of the server, and of its engine."""

    megabytes: tuple[float, float]
    descriptors: tuple[int, int]
    threads: tuple[int, int]
    processes: int


def held(server: Server) -> Held:
    """Once nothing runs and every child process is there: those for templates and grammars start when needed. The
    connection that asks for them is counted: it is open until the server has been looked at."""
    server.quiet()
    body = {"messages": [{"role": "user", "content": "x"}], "regex": f"[a-z]{{{next(numbers)}}}", "max_tokens": 2}
    with server.client() as client:
        assert client.post("/v1/chat/completions", json=body).status_code in (200, 429)
        pids = server.process.pid, server.engine_pid()
        files, threads = ([len(list(Path(f"/proc/{pid}/{of}").iterdir())) for pid in pids] for of in ("fd", "task"))
        megabytes = [round(memory(pid), 1) for pid in pids]
    return Held(tuple(megabytes), tuple(files), tuple(threads), len(children(server.process.pid)))  # type: ignore[arg-type]
