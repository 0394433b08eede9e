"""More than it can take: floods, slow readers, neighbours of every kind, and hours of it (marked slow)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.serve.server import KEY, PATIENT, Server, events, wait_until
from tests.serve.test_listen import KEY_LINE, connect, read_answer

LIMITS = (
    "import twostroke.serve.transport.listen as l, twostroke.serve.transport.connection as c; "
    "import twostroke.serve.transport.lingering_close as g, twostroke.remote.stream as a; "
    "import twostroke.serve.transport.places as p, twostroke.serve.transport.http as h; "
    "l.SEND_BUFFER = 4096; c.STALL_SECONDS = 5.0; p.MAX_CONNECTIONS = 100; h.BODY_SECONDS = 600.0; "
    "g.LINGER_SECONDS = 60.0; a.MAX_UNREAD = 500"
)
HASTY = "import twostroke.serve.transport.connection as c; c.HEADER_SECONDS = 3.0"


@pytest.fixture(scope="module")
def small(long_folder: Path) -> Iterator[Server]:
    """Four samples run, four may wait."""
    settings = ("-s", "max_requests=4", "-s", "max_model_len=4096", "-s", "key_share=1")
    running = Server(long_folder, "--max-queue", "4", *settings, code=LIMITS).wait()
    yield running
    assert running.stop() == 0


@pytest.fixture(scope="module")
def hasty(long_folder: Path) -> Iterator[Server]:
    running = Server(long_folder, code=HASTY).wait()
    yield running
    assert running.stop() == 0


async def flood(server: Server, count: int) -> tuple[list[httpx.Response], list[float]]:
    """Answers to a flood that comes while the server is full, and the gaps of the streams that fill it all the time."""
    inside = {"prompt": "Once upon a time", "max_tokens": 4000, "temperature": 0, "ignore_eos": True, "stream": True}
    outside = {"prompt": "The quick brown fox " * 20, "max_tokens": 300, "ignore_eos": True}
    gaps: list[float] = []

    async def stream(client: httpx.AsyncClient) -> None:
        before = None
        async with client.stream("POST", "/v1/completions", json=inside) as response:
            assert response.status_code == 200
            async for _ in response.aiter_raw():
                now = time.monotonic()
                gaps.append(now - before if before else 0.0)
                before = now

    async with server.async_client() as client, asyncio.timeout(PATIENT):
        running = [asyncio.create_task(stream(client)) for _ in range(8)]
        while (await client.get("/health")).json()["in_flight"] < 8:
            await asyncio.sleep(0.01)
        asked = []
        for _ in range(count):
            asked.append(asyncio.create_task(client.post("/v1/completions", json=outside)))
            await asyncio.sleep(0.005)
        answers = await asyncio.gather(*asked)
        for task in running:
            task.cancel()
        ends = await asyncio.gather(*running, return_exceptions=True)
        assert all(end is None or isinstance(end, asyncio.CancelledError) for end in ends), ends
    return answers, gaps


def refused_in_flood(server: Server) -> tuple[list[float], list[float]]:
    """Ten times what fits. The server's milliseconds for each refusal, and the gaps of the streams inside."""
    answers, gaps = asyncio.run(flood(server, 80))
    server.assert_no_blocks_held()
    refused = [answer for answer in answers if answer.status_code == 429]
    assert len(refused) >= 40 and all(answer.status_code in (200, 429) for answer in answers)
    assert all(1 <= int(answer.headers["retry-after"]) <= 120 for answer in refused)
    return [float(answer.headers["server-timing"].partition("dur=")[2]) for answer in refused], gaps


def test_a_flood_is_refused_and_ends_no_stream(small: Server) -> None:
    """Most are refused with a time to come back, those inside go on."""
    refused_in_flood(small)


@pytest.mark.slow
@pytest.mark.alone
def test_a_flood_is_refused_quickly(small: Server) -> None:
    """Those inside keep their pace. Others on the machine may spoil this measurement: one of three must show it."""
    seen = []
    for _ in range(3):
        took, gaps = refused_in_flood(small)
        seen.append((statistics.quantiles(took, n=20)[-1], max(gaps)))
        if seen[-1][0] < 10.0 and seen[-1][1] < 2.0:  # milliseconds at p95, seconds
            return
    pytest.fail(f"refused within (ms at p95), longest gap of a stream (s): {seen}")


def test_a_crowd_that_comes_at_once(small: Server) -> None:
    answers = asyncio.run(burst(small, 80))
    refused = [answer for answer in answers if answer.status_code == 429]
    assert len(refused) >= 40 and all(answer.status_code in (200, 429) for answer in answers)
    small.assert_no_blocks_held()


async def burst(server: Server, count: int) -> list[httpx.Response]:
    body = {"prompt": "Once", "max_tokens": 1000, "ignore_eos": True, "speculate": False}  # most come before one ends
    async with server.async_client() as client:
        return await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(count)))


def test_what_can_never_fit_is_a_bad_request(small: Server) -> None:
    with small.client() as client:
        response = client.post("/v1/completions", json={"prompt": "Once", "n": 9, "max_tokens": 4})
        assert response.status_code == 400 and response.json()["error"]["param"] == "n"


def test_a_reader_that_does_not_read_is_ended(small: Server) -> None:
    """Its buffers stay bounded, its blocks come back, others do not notice."""
    body = json.dumps({"prompt": "Once", "max_tokens": 4000, "ignore_eos": True, "stream": True, "logprobs": 5})
    lines = ["POST /v1/completions HTTP/1.1", "host: localhost", f"x-api-key: {KEY}"]
    lines += [f"content-length: {len(body)}", "", body]
    host, port = small.url.removeprefix("http://").split(":")
    before = small.quiet()["steps"]
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect((host, int(port)))
        sock.sendall("\r\n".join(lines).encode())
        wait_until(lambda: small.health()["steps"] > before, "it never began")
        with small.client() as client:
            assert client.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 5}).status_code == 200
        assert small.quiet()["steps"] - before < 4000, "it goes on without a reader"
    small.assert_no_blocks_held()


def test_connections_are_bounded(small: Server) -> None:
    small.quiet()
    sending: list[socket.socket] = []
    while not is_full(small):
        assert len(sending) <= 100
        sending.append(connect(small))
        lines = f"host: localhost\r\n{KEY_LINE}expect: 100-continue\r\ncontent-length: 9\r\n"
        sending[-1].sendall(f"POST /tokenize HTTP/1.1\r\n{lines}\r\n".encode())
        assert b"100 Continue" in sending[-1].recv(1000)  # its body is waited for
    assert len(sending) > 90
    for _ in range(20):  # clients with much to send can read the refusal too
        with connect(small) as sock, contextlib.suppress(BrokenPipeError):
            sock.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 300000\r\n\r\n" + b"x" * 300_000
            )
            assert read_answer(sock)[0] == 503
    for sock in sending:
        sock.close()
    wait_until(lambda: not is_full(small), "closed connections were not given back")


def test_a_head_that_never_ends_is_cut_off(hasty: Server) -> None:
    host, port = hasty.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as fresh, socket.create_connection((host, int(port))) as used:
        used.sendall(b"GET /health/live HTTP/1.1\r\nhost: localhost\r\n\r\n")
        answer = b""
        while not answer.endswith(b"}"):
            part = used.recv(4096)
            assert part, "it was closed before it was answered"
            answer += part
        for sock in (fresh, used):
            sock.settimeout(PATIENT)
            sock.sendall(b"GET /health/live HTTP/1.1\r\nhost")
        for sock in (fresh, used):
            with contextlib.suppress(ConnectionResetError):
                assert sock.recv(100) == b""


def test_an_early_refusal_does_not_end_the_connection(hasty: Server) -> None:
    """Answered before its body came; what comes then is no head that takes too long."""
    with connect(hasty) as sock:
        for pause in (4.0, 0.0):  # longer than a head may take
            sock.sendall(f"POST /nowhere HTTP/1.1\r\nhost: localhost\r\n{KEY_LINE}content-length: 5\r\n\r\n".encode())
            assert read_answer(sock)[0] == 404
            sock.sendall(b"hello")
            time.sleep(pause)


def is_full(server: Server) -> bool:
    with server.client() as client:
        assert client.get("/health/live").status_code == 200
        response = client.get("/v1/models")
        assert response.status_code == 200 or (response.status_code == 503 and response.headers["retry-after"] == "5")
        return response.status_code == 503


def test_a_second_signal_is_fast(small: Server) -> None:
    """The last test with this server: it is gone afterwards. Four answers run and four wait, so that there is
    something to wait for; the server does not wait."""
    body = {"prompt": "Once", "max_tokens": 4000, "ignore_eos": True, "n": 4}
    whole: list[httpx.Response] = []

    def doomed() -> None:
        with contextlib.suppress(httpx.TransportError), small.client() as client:
            whole.append(client.post("/v1/completions", json=body))

    threads = [threading.Thread(target=doomed, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    wait_until(lambda: small.health()["in_flight"] == 8, "it never began")
    small.signal()
    wait_until(lambda: any("in flight" in line for line in small.lines), "nothing was said of the drain")
    assert small.process.poll() is None
    small.signal()
    assert small.process.wait(PATIENT) == 0
    for thread in threads:
        thread.join(PATIENT)
    assert not [answer for answer in whole if answer.status_code == 200], "it waited for an answer"


def test_tokens_do_not_depend_on_neighbours(server: Server) -> None:
    """The same request alone and among 31 fuzzed ones."""
    body = {"prompt": "The quick brown fox jumps", "max_tokens": 40, "seed": 5, "temperature": 0.9, "logprobs": 2}

    def neighbour(rng: random.Random) -> dict:
        return {
            "prompt": [rng.randrange(3, 300) for _ in range(rng.randint(1, 90))], "max_tokens": rng.randint(1, 60),
            "temperature": rng.choice([0, 0.5, 2.0, 100.0]), "top_p": rng.choice([0.01, 0.9, 1.0]),
            "top_k": rng.choice([0, 1, 7]), "logit_bias": {str(rng.randrange(300)): rng.choice([-100, 100])},
            "presence_penalty": rng.choice([-2.0, 2.0]), "repetition_penalty": rng.choice([0.01, 1.0, 100.0]),
            "n": rng.choice([1, 2]), "logprobs": rng.choice([0, 5]), "stop": rng.choice(["e", [" ", "the"]]),
            "min_tokens": rng.choice([0, 1]), "echo": rng.random() < 0.3,
        }  # fmt: skip

    async def among(seed: int) -> dict:
        rng = random.Random(seed)
        async with server.async_client() as client:
            others = [client.post("/v1/completions", json=neighbour(rng)) for _ in range(31)]
            answers = await asyncio.gather(client.post("/v1/completions", json=body), *others)
        assert all(answer.status_code == 200 for answer in answers), [answer.text for answer in answers]
        return answers[0].json()["choices"][0]

    with server.client() as client:
        alone = client.post("/v1/completions", json=body).json()["choices"][0]
    for seed in range(2):
        crowded = asyncio.run(among(seed))
        assert crowded["text"] == alone["text"]
        assert crowded["logprobs"]["token_logprobs"] == alone["logprobs"]["token_logprobs"]


# ---- for long ------------------------------------------------------------------------------------------------------


async def soak(server: Server, count: int, at_once: int, seed: int) -> dict[str, int]:
    """Short requests with random aborts. Every stream that is read to its end has exactly one end."""
    rng = random.Random(seed)
    gate = asyncio.Semaphore(at_once)
    ends = {"whole": 0, "aborted": 0}

    async def one(client: httpx.AsyncClient) -> None:
        body = {
            "prompt": "The quick brown fox " * rng.randint(1, 6) + str(rng.randrange(50)),
            "max_tokens": rng.randint(1, 24), "stream": True, "n": rng.choice([1, 1, 1, 2]),
        }  # fmt: skip
        async with gate:
            if rng.random() < 0.2:
                try:
                    async with asyncio.timeout(rng.random() * 0.05):
                        await client.post("/v1/completions", json=body)
                except (TimeoutError, httpx.TransportError):
                    ends["aborted"] += 1
                return
            answer = await client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            documents = [json.loads(line) for line in events(answer.text)[:-1]]
            finished = [c["index"] for d in documents for c in d["choices"] if c["finish_reason"]]
            assert sorted(finished) == list(range(body["n"])), "an end was lost or doubled"
            ends["whole"] += 1

    async with server.async_client(limits=httpx.Limits(max_keepalive_connections=at_once)) as client:
        await asyncio.gather(*(one(client) for _ in range(count)))
    return ends


def memory(pid: int) -> float:
    """Resident megabytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no such process")


@pytest.mark.parametrize("count", [100, pytest.param(10_000, marks=pytest.mark.slow)])
def test_soak(server: Server, count: int) -> None:
    asyncio.run(soak(server, min(count, 500), 32, 1))
    before = memory(server.process.pid) + memory(server.engine_pid())
    for part in range(max(1, count // 1000)):
        asyncio.run(soak(server, min(count, 1000), 32, part))
    server.assert_no_blocks_held()
    after = memory(server.process.pid) + memory(server.engine_pid())
    assert after - before < 50, f"{after - before:.0f} MB more than after the warm-up"
    assert server.health()["restarts"] == 0
