"""Connections at their limits: a refused client can read the reason, even while it still sends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket

import pytest

from tests.serve.server import HEADERS, PATIENT, Server
from twostroke.serve.transport.connection import LATE_SECONDS, Timer

KEY_LINE = f"authorization: {HEADERS['authorization']}\r\n"


def connect(server: Server) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    sock = socket.create_connection((host, int(port)))
    sock.settimeout(PATIENT)
    return sock


def read_answer(sock: socket.socket) -> tuple[int, dict]:
    """Status and document of an answer with a length."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += sock.recv(65536) or pytest.fail(f"the connection ended after {data!r}")
    head, _, body = data.partition(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    while len(body) < length:
        body += sock.recv(65536) or pytest.fail("the connection ended in the body")
    return int(head.split(b" ", 2)[1]), json.loads(body)


@pytest.mark.parametrize(
    ("head", "status"),
    [
        ("POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: 8000000\r\n", 413),
        ("POST /nowhere HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: 8000000\r\n", 404),
        ("this is no HTTP\r\n", 400),
        ("GET /v1/models HTTP/1.1\r\nx-long: " + "y" * 50_000 + "\r\n", 431),
    ],
)
def test_who_is_refused_while_it_sends_can_read_why(server: Server, head: str, status: int) -> None:
    with connect(server) as sock:
        with contextlib.suppress(BrokenPipeError):
            sock.sendall((head + KEY_LINE + "\r\n").encode())
            for _ in range(20):
                sock.sendall(b"x" * 100_000)
        got, document = read_answer(sock)
        assert got == status
        assert document["error"]["message"] and set(document["error"]) == {"message", "type", "param", "code"}


def test_a_streamed_answer_is_chunks_for_1_1_and_plain_for_1_0(server: Server) -> None:
    body = json.dumps({"prompt": "Once", "max_tokens": 5, "temperature": 0, "stream": True}).encode()
    texts = []
    for version in ("1.1", "1.0"):
        with connect(server) as sock:
            head = f"POST /v1/completions HTTP/{version}\r\nhost: localhost\r\nconnection: close\r\n{KEY_LINE}"
            sock.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            data = b""
            while part := sock.recv(65536):
                data += part
        head_sent, _, rest = data.partition(b"\r\n\r\n")
        assert (b"chunked" in head_sent.lower()) == (version == "1.1")
        if version == "1.1":
            rest = unchunked(rest)
        events = [json.loads(line[6:]) for line in rest.split(b"\n\n") if line.startswith(b"data: {")]
        assert rest.endswith(b"data: [DONE]\n\n")
        texts.append("".join(event["choices"][0]["text"] for event in events))
    assert texts[0] == texts[1] != ""


def unchunked(data: bytes) -> bytes:
    whole = b""
    while True:
        size, _, data = data.partition(b"\r\n")
        length = int(size, 16)
        if not length:
            return whole
        assert data[length : length + 2] == b"\r\n"
        whole, data = whole + data[:length], data[length + 2 :]


def test_an_alarm_is_for_the_client_who_sleeps_not_for_us() -> None:
    """A process that was stopped and continues must not close connections that it could not serve meanwhile."""

    async def scene() -> list[str]:
        now, rang = [0.0], []
        asyncio.get_running_loop().time = lambda: now[0]  # type: ignore[method-assign]

        async def pass_time(seconds: float) -> list[str]:
            now[0] += seconds
            for _ in range(3):  # what is due is called
                await asyncio.sleep(0)
            return rang

        alarm, stopped = Timer(), Timer()
        alarm.start(5.0, lambda: rang.append("after our sleep"))
        stopped.start(5.0, lambda: rang.append("never"))
        assert not await pass_time(4.9)
        assert not await pass_time(LATE_SECONDS + 1)  # as after SIGSTOP, or a lid that was closed
        stopped.stop()
        assert not await pass_time(4.9)
        return await pass_time(0.2)

    assert asyncio.run(scene()) == ["after our sleep"]
