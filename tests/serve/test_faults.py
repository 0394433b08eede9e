"""Clients that go away, engines that stop, signals: every end is clean and nothing stays behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.holding import holding
from tests.serve.server import PATIENT, Server, alive, children, command_line, events, wait_until
from twostroke.cli.serve import serve
from twostroke.cli.server_options import Given
from twostroke.errors import ConfigError, ModelError

# Late after two seconds, dead after ten; four pass before a new engine is started, in which time we look at what a
# server without one says.
IMPATIENT = (
    "import twostroke.remote.process as p; p.Patience.__init__.__defaults__ = (2.0, 10.0, 20.0, 600.0, 4.0, 4.0)"
)
# Every step takes 5 ms at least, so that an answer lasts as long as it has tokens, however fast the machine is: seconds
# in which the test may be kept waiting for a core.
UNHURRIED = """
import twostroke.remote.process as p
SLOW = (
    "import time, twostroke.remote.loop as l; l.step = l.EngineLoop._step; "
    "l.EngineLoop._step = lambda self: time.sleep(0.005) or l.step(self); "
)
p.BOOT = p.BOOT.replace("from twostroke", SLOW + "from twostroke")
"""
LONG = {
    "prompt": "Once upon a time", "max_tokens": 6000, "temperature": 0, "ignore_eos": True, "speculate": False,
}  # fmt: skip
SHORT = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def mortal(long_folder: Path) -> Iterator[Server]:
    """A server whose engine is stopped and killed."""
    running = Server(long_folder, code=IMPATIENT + UNHURRIED).wait()
    yield running
    running.stop()


class Streaming(threading.Thread):
    """A client in the background. A stream that is refused, because the engine is late for a moment, is asked for
    again."""

    def __init__(self, server: Server, body: dict):
        super().__init__(daemon=True)
        self.server, self.body = server, body
        self.text = ""
        self.status = 0
        self.start()

    def run(self) -> None:
        with contextlib.suppress(httpx.TransportError), self.server.client() as client:
            self._ask(client)
            while self.status == 503 and self.body.get("stream"):
                time.sleep(0.05)
                self._ask(client)

    def _ask(self, client: httpx.Client) -> None:
        self.text = ""
        with client.stream("POST", "/v1/completions", json=self.body) as response:
            self.status = response.status_code
            for part in response.iter_text():
                self.text += part

    def wait_for_tokens(self, count: int = 3) -> Streaming:
        wait_until(lambda: self.text.count("data: {") >= count, "no tokens came")
        return self

    def documents(self) -> list[dict]:
        self.join(PATIENT)
        assert not self.is_alive(), "the stream did not end"
        return [json.loads(line) for line in events(self.text) if line != "[DONE]"]


# ---- clients that go away ------------------------------------------------------------------------------------------


async def drop_many(server: Server, count: int, at_once: int) -> int:
    """Connections closed at random moments: while queued, in prefill, in decode. How many of them were closed after
    the first token and before the last."""
    rng = random.Random(0)
    gate = asyncio.Semaphore(at_once)

    async def one(number: int) -> bool:
        in_decode = rng.random() < 0.5
        body = {
            "prompt": "The quick brown fox " * rng.randint(1, 12) + str(number % 7),
            "max_tokens": 400 if in_decode else rng.randint(5, 150),
            "stream": in_decode or rng.random() < 0.4,
            "ignore_eos": in_decode,
            "n": rng.choice([1, 1, 3]),
        }
        async with gate, server.async_client() as client:
            if in_decode:
                return await drop_after(client, body, rng.choice([1, 2, 10, 60]))
            await drop_within(client, body, rng.choice([0.002, 0.02, 0.1, 0.3]))
            return False

    return sum(await asyncio.gather(*(one(number) for number in range(count))))


async def drop_within(client: httpx.AsyncClient, body: dict, seconds: float) -> None:
    with contextlib.suppress(TimeoutError, httpx.TransportError):
        async with asyncio.timeout(seconds), client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code in (200, 429)
            async for _ in response.aiter_bytes():
                pass


async def drop_after(client: httpx.AsyncClient, body: dict, tokens: int) -> bool:
    """Closes the connection after so many events with text. Whether there were so many, and more to come."""
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code in (200, 429)
        async for line in response.aiter_lines():
            tokens -= line.startswith("data: {")
            if tokens <= 0:
                return '"finish_reason":"' not in line
    return False


@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_random_disconnects_leave_nothing_behind(server: Server, client: httpx.Client, count: int) -> None:
    right = client.post("/v1/completions", json=SHORT).json()["choices"][0]["text"]
    in_decode = asyncio.run(drop_many(server, count, 24))
    assert in_decode >= 0.3 * count, f"only {in_decode} of {count} were closed in decode"
    server.assert_no_blocks_held()
    assert client.post("/v1/completions", json=SHORT).json()["choices"][0]["text"] == right
    assert server.health()["restarts"] == 0


def test_a_disconnect_frees_its_blocks_at_once(server: Server, client: httpx.Client) -> None:
    before = server.quiet()["steps"]
    with client.stream("POST", "/v1/completions", json={**LONG, "n": 4, "stream": True}) as response:
        pieces = response.iter_bytes()
        next(pieces)
        assert server.health()["in_flight"] == 4
    assert server.quiet()["steps"] - before < LONG["max_tokens"], "the engine went on without a reader"
    server.assert_no_blocks_held()


# ---- an engine that stops ------------------------------------------------------------------------------------------


def test_a_killed_engine_ends_its_streams_and_comes_back(mortal: Server) -> None:
    right = right_answer(mortal)
    streaming = Streaming(mortal, {**LONG, "stream": True}).wait_for_tokens()
    waiting = [Streaming(mortal, LONG)]

    def arrived() -> bool:
        if not waiting[-1].is_alive():  # it was refused: the engine was late for a moment
            waiting.append(Streaming(mortal, LONG))
        return mortal.health()["in_flight"] == 2

    wait_until(arrived, "the second request did not arrive")
    os.kill(mortal.engine_pid(), signal.SIGKILL)
    last = streaming.documents()[-1]
    assert last["error"]["type"] == "server_error" and last["error"]["code"] == "engine_unavailable"
    waiting[-1].join(PATIENT)
    assert waiting[-1].status == 503
    check_unavailable(mortal)
    wait_until(lambda: mortal.health()["status"] == "ok", "the engine was not restarted")
    assert mortal.health()["restarts"] == 1
    assert right_answer(mortal) == right


def test_a_stopped_engine_turns_health_and_recovers(mortal: Server) -> None:
    """SIGSTOP for less than the patience: nothing is lost."""
    streaming = Streaming(mortal, {**LONG, "max_tokens": 600, "stream": True}).wait_for_tokens()
    engine = mortal.engine_pid()
    os.kill(engine, signal.SIGSTOP)
    wait_until(lambda: mortal.health()["status"] != "ok", "health stayed good while nothing moved")
    check_unavailable(mortal)
    os.kill(engine, signal.SIGCONT)
    wait_until(lambda: mortal.health()["status"] == "ok", "health stayed bad")
    assert streaming.documents()[-1]["choices"][0]["finish_reason"] == "length"
    assert mortal.engine_pid() == engine


def test_an_engine_that_stays_stopped_is_replaced(mortal: Server) -> None:
    streaming = Streaming(mortal, {**LONG, "stream": True}).wait_for_tokens()
    engine = mortal.engine_pid()
    os.kill(engine, signal.SIGSTOP)
    last = streaming.documents()[-1]
    assert last["error"]["code"] == "engine_unavailable"
    wait_until(lambda: mortal.health()["status"] == "ok", "the engine was not replaced")
    assert not alive(engine)
    mortal.assert_no_blocks_held()


def test_nothing_outlives_a_killed_server(mortal: Server) -> None:
    """Runs last in this file's order of servers: nothing can be asked of it afterwards."""
    with mortal.client() as client:
        asked = {**SHORT, "regex": "[a-z]+"}
        wait_until(lambda: client.post("/v1/completions", json=asked).status_code == 200, "no engine answers")
    family = children(mortal.process.pid)
    assert len(family) == 3, "the engine, the process that renders templates and the one that tries grammars"
    Streaming(mortal, {**LONG, "stream": True}).wait_for_tokens()
    mortal.process.kill()
    wait_until(lambda: not any(alive(pid) for pid in family), "a process outlived its server")


def right_answer(server: Server) -> str:
    """Of an engine that may have been late a moment ago."""
    answers: list[httpx.Response] = []
    with server.client() as client:

        def answered() -> bool:
            answers.append(client.post("/v1/completions", json=SHORT))
            assert answers[-1].status_code in (200, 503), answers[-1].text
            return answers[-1].status_code == 200

        wait_until(answered, "no engine answers")
    return answers[-1].json()["choices"][0]["text"]


def check_unavailable(server: Server) -> None:
    """Live but not ready, and requests are refused at once with a time to come back."""
    with server.client() as client:
        assert client.get("/health/live").status_code == 200
        assert client.get("/health/ready").status_code == 503
        assert client.get("/health").status_code == 503
        refused = client.post("/v1/completions", json=SHORT)
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1


# ---- signals -------------------------------------------------------------------------------------------------------


def test_sigterm_drains(long_folder: Path, tmp_path: Path) -> None:
    """The answer does not go on before it was seen what a server says that drains."""
    (hold := tmp_path / "hold").touch()
    code = f"import twostroke.remote.process as p; p.BOOT = {holding(hold, tokens=300)!r} + p.BOOT"
    server = Server(long_folder, "--drain-timeout", "300", code=code).wait()
    streaming = Streaming(server, {**LONG, "max_tokens": 600, "stream": True}).wait_for_tokens()
    server.signal()
    with server.client() as client:
        wait_until(lambda: client.get("/health/ready").status_code == 503, "still ready after SIGTERM")
        refused = client.post("/v1/completions", json=SHORT)
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "shutting_down"
    hold.unlink()
    documents = streaming.documents()
    assert documents[-1]["choices"][0]["finish_reason"] == "length"
    assert documents[-1]["timings"]["output_tokens"] == 600
    assert server.stop() == 0


def test_a_second_signal_ends_at_once(long_folder: Path) -> None:
    server = Server(long_folder, "--drain-timeout", "300", code=UNHURRIED).wait()
    Streaming(server, {**LONG, "stream": True}).wait_for_tokens()
    server.signal()
    wait_until(lambda: "second Ctrl-C" in server.lines[-1], "it never said that it stops")
    assert server.lines[-1].startswith("stopping: 1 request in flight may take 300 s more")
    assert server.stop() == 0
    assert server.lines[-1] == "stopped" and "ERROR" not in "".join(server.lines)


def test_a_server_that_cannot_start_says_only_why(long_folder: Path) -> None:
    server = Server(long_folder, "-s", f"draft_model={long_folder}")
    assert server.process.wait(PATIENT) == 2
    server.stop()
    assert "stopped" not in server.lines and "must be smaller" in " ".join(server.lines)


def test_sigterm_while_it_loads(long_folder: Path) -> None:
    server = Server(long_folder)
    wait_until(
        lambda: any(b"remote.child_main" in command_line(pid) for pid in children(server.process.pid)),
        "the engine process was never started",
    )
    assert server.stop() == 0


def test_what_keeps_it_from_starting_is_one_sentence(tmp_path: Path, long_folder: Path) -> None:
    with pytest.raises(ModelError, match="no such file or folder: check the path"):
        command(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="holds no key"):
        command(tmp_path, keys=Path(os.devnull))
    with pytest.raises(ConfigError, match="Did you mean"):
        command(tmp_path, settings=["max_request=3"])
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(ConfigError, match=r"cannot be listened on .*another port"),
    ):
        command(long_folder, port=taken.getsockname()[1])


def command(model: Path, port: int = 0, keys: Path | None = None, settings: list[str] | None = None) -> None:
    """`twostroke serve` up to the moment it would serve."""
    serve.__wrapped__(str(model), settings, given=Given(port=port, api_key_file=keys, drain_timeout=1.0))
