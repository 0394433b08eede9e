"""SIGSTOP of the server, of its engine, of both: after SIGCONT the answers go on and are the same, or each of them ends
with one clean error. Nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.hostile.held import Held, held
from tests.hostile.one_end import check_choices
from tests.serve.server import PATIENT, Server, events, wait_until

pytestmark = pytest.mark.slow  # seconds for each case

# Late after three seconds, dead after eight, cut off after five: a stop of ten seconds is beyond all of them.
HASTY = (
    "import twostroke.remote.process as p; p.Patience.__init__.__defaults__ = (3.0, 8.0, 20.0, 600.0, 0.1, 0.5)\n"
    "import twostroke.serve.transport.connection as c, twostroke.serve.transport.http as h\n"
    "c.HEADER_SECONDS = 5.0; c.STALL_SECONDS = 5.0; h.BODY_SECONDS = 5.0\n"
)
STOP = 10.0  # seconds
BODIES = [
    {"prompt": f"Once upon {number}", "max_tokens": 2500, "temperature": 0, "ignore_eos": True, "stream": True}
    for number in range(4)
]


@pytest.fixture(scope="module")
def server(long_folder: Path) -> Iterator[Server]:
    running = Server(long_folder, "-s", "kv_blocks=4096", code=HASTY).wait()
    yield running
    assert running.stop() == 0


@pytest.fixture(scope="module")
def right(server: Server) -> list[str]:
    return [text_of(answer) for answer in asyncio.run(ask_all(server, lambda: None))]


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200 and check_choices({}, events(answer.text)) == "whole", answer.text[-500:]
    return "".join(json.loads(line)["choices"][0]["text"] for line in events(answer.text)[:-1])


async def ask_all(server: Server, fault: Callable[[], None]) -> list[httpx.Response]:
    """The answers to all bodies; the fault comes when each of them has got its first tokens."""
    begun: list[int] = []

    async def ask(client: httpx.AsyncClient, body: dict) -> httpx.Response:
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            parts = []
            async for part in answer.aiter_text():
                parts.append(part)
                if len(parts) == 3:
                    begun.append(1)
            return httpx.Response(answer.status_code, text="".join(parts))

    async with server.async_client() as client, asyncio.timeout(PATIENT):
        asked = [asyncio.create_task(ask(client, body)) for body in BODIES]
        while len(begun) < len(BODIES):
            await asyncio.sleep(0.01)
        await asyncio.to_thread(fault)
        return await asyncio.gather(*asked)


def stop(*pids: int, seconds: float = STOP) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(seconds)
    for pid in reversed(pids):
        os.kill(pid, signal.SIGCONT)


def assert_as_before(server: Server, before: Held) -> None:
    server.assert_no_blocks_held()
    wait_until(lambda: held(server)[1:] == before[1:], f"descriptors, threads or processes are not as in {before}")


@pytest.mark.parametrize("who", ["server", "both"])
def test_a_stopped_server_goes_on(server: Server, right: list[str], who: str) -> None:
    """No answer is lost, and the engine is not taken for dead: what it sent meanwhile is still to be read."""
    before, engine, restarts = held(server), server.engine_pid(), server.health()["restarts"]
    pids = (server.process.pid,) if who == "server" else (server.process.pid, engine)
    answers = asyncio.run(ask_all(server, lambda: stop(*pids)))
    assert [text_of(answer) for answer in answers] == right
    assert server.engine_pid() == engine and server.health()["restarts"] == restarts
    assert_as_before(server, before)


def test_requests_that_come_while_the_server_is_stopped_are_answered(server: Server, right: list[str]) -> None:
    """They wait in the kernel's queue, heads and bodies too."""
    before = held(server)
    os.kill(server.process.pid, signal.SIGSTOP)

    async def ask() -> list[httpx.Response]:
        async with server.async_client() as client:
            asked = [asyncio.create_task(client.post("/v1/completions", json=body)) for body in BODIES * 5]
            await asyncio.sleep(STOP)
            os.kill(server.process.pid, signal.SIGCONT)
            return await asyncio.gather(*asked)

    assert [text_of(answer) for answer in asyncio.run(ask())] == right * 5
    assert_as_before(server, before)


def test_an_engine_that_is_stopped_for_a_moment_goes_on(server: Server, right: list[str]) -> None:
    """It was late, and not dead."""
    before, engine = held(server), server.engine_pid()
    answers = asyncio.run(ask_all(server, lambda: stop(engine, seconds=4.0)))
    assert [text_of(answer) for answer in answers] == right
    assert server.engine_pid() == engine
    assert_as_before(server, before)


def test_an_engine_that_stays_stopped_ends_each_answer_once(server: Server, right: list[str]) -> None:
    """With one error event; it is replaced, and the new one gives the same answers."""
    before, engine = held(server), server.engine_pid()
    answers = asyncio.run(ask_all(server, lambda: os.kill(engine, signal.SIGSTOP)))
    assert {check_choices({}, events(answer.text)) for answer in answers} == {"engine_unavailable"}
    wait_until(lambda: server.health()["status"] == "ok", "the engine was not replaced")
    assert [text_of(answer) for answer in asyncio.run(ask_all(server, lambda: None))] == right
    assert_as_before(server, before)
