"""Clients that send or read a few bytes a second: they are cut off in bounded time, and other clients do not notice."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from tests.measured import measured
from tests.serve.server import KEY, OTHER_KEY, Server, wait_until
from tests.serve.test_listen import KEY_LINE
from tests.serve.test_load import memory

pytestmark = pytest.mark.slow  # seconds for each case

# The limits in seconds are 20, 30 and 60 outside of this test.
LIMITS = (
    "import twostroke.serve.transport.connection as c, twostroke.serve.transport.http as h; "
    "import twostroke.serve.transport.listen as l, twostroke.remote.stream as s; "
    "c.HEADER_SECONDS = 4.0; h.BODY_SECONDS = 5.0; c.STALL_SECONDS = 4.0; l.SEND_BUFFER = 4096; s.MAX_UNREAD = 500"
)
MAX_GAP = 0.25  # seconds
MANY = 40  # slow clients at once
BOUND = 25.0  # seconds after which none of them has its connection
GREEDY = {"prompt": "Once upon a time", "max_tokens": 200, "temperature": 0, "ignore_eos": True, "stream": True}
LONG = {"prompt": "Once", "max_tokens": 4000, "ignore_eos": True, "stream": True, "logprobs": 5}
OTHER = {"authorization": f"Bearer {OTHER_KEY}"}


@pytest.fixture(scope="module")
def server(long_folder: Path) -> Iterator[Server]:
    running = Server(
        long_folder, "-s", "kv_blocks=16384", "-s", f"max_gap={MAX_GAP}", "-s", "max_requests=48", code=LIMITS
    ).wait()
    yield running
    assert running.stop() == 0


def request(body: bytes) -> bytes:
    lines = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n{KEY_LINE}content-length: {len(body)}\r\n\r\n"
    return lines.encode() + body


class SlowClient(threading.Thread):
    """Sends at once what is given, then does a little every tenth of a second, until it is stopped."""

    def __init__(self, server: Server, first: bytes, then: Callable[[socket.socket], None]):
        super().__init__(daemon=True)
        host, port = server.url.removeprefix("http://").split(":")
        self.sock = socket.socket()
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.sock.connect((host, int(port)))
        self.sock.sendall(first)
        self.sock.setblocking(False)
        self.then = then
        self.stopped = threading.Event()
        self.start()

    def run(self) -> None:
        while not self.stopped.wait(0.1):
            with suppress(OSError):  # the server has closed it
                self.then(self.sock)
        self.sock.close()


def connections(server: Server) -> int:
    """Sockets of the server. What a client sees says little: the kernel may still send it the rest of its answer."""
    found = 0
    for entry in Path(f"/proc/{server.process.pid}/fd").iterdir():
        with suppress(OSError):
            found += os.readlink(entry).startswith("socket:")
    return found


def send_a_byte(sock: socket.socket) -> None:
    sock.send(b"x")


def read_nothing(sock: socket.socket) -> None:
    """The client does not read."""


def read_a_little(sock: socket.socket) -> None:
    """3,000 bytes a second: less than what STALL_BYTES asks for within these limits."""
    sock.recv(300)


KINDS: dict[str, tuple[bytes, Callable[[socket.socket], None]]] = {
    "slow heads": (b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nx-slow: ", send_a_byte),
    "slow heads with a key": (request(b"")[:-4] + b"\r\nx-slow: ", send_a_byte),
    "slow bodies": (request(b" " * 4_000_000)[:-3_999_999], send_a_byte),
    "readers that stop": (request(json.dumps(LONG).encode()), read_nothing),
    "readers of a little": (request(json.dumps(LONG).encode()), read_a_little),
}


@contextmanager
def slow_clients(server: Server, kind: str) -> Iterator[list[SlowClient]]:
    first, then = KINDS[kind]
    with ExitStack() as stack:
        clients = []
        for _ in range(MANY):
            clients.append(SlowClient(server, first, then))
            stack.callback(clients[-1].stopped.set)
        yield clients


def ask(client: httpx.Client) -> tuple[str, list[float]]:
    """Another key's stream: its text, and the seconds between its events."""
    parts, pauses, before = [], [], None
    with client.stream("POST", "/v1/completions", json=GREEDY) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            now = time.monotonic()
            pauses += [] if before is None else [now - before]
            before = now
            parts.append(json.loads(line[6:])["choices"][0]["text"])
    return "".join(parts), pauses


@measured
@pytest.mark.parametrize("kind", KINDS)
def test_slow_clients_are_cut_off_and_harm_no_other(server: Server, kind: str) -> None:
    """The other key keeps its one connection, which is counted each time."""
    server.quiet()
    with server.client(headers=OTHER) as client:
        right, _ = ask(client)
        before, sockets = memory(server.process.pid), connections(server)
        measure(server, kind, client, right, before, sockets)
    server.assert_no_blocks_held()


def measure(server: Server, kind: str, client: httpx.Client, right: str, before: float, sockets: int) -> None:
    """right: the other key's text. before: megabytes of the server. sockets: those that it has without them."""
    pauses: list[float] = []
    most = before
    with slow_clients(server, kind):
        began = time.monotonic()
        wait_until(lambda: connections(server) > sockets + MANY // 2, "they are not connected")
        while (left := connections(server) - sockets) > 0 and time.monotonic() < began + BOUND:
            text, more = ask(client)
            pauses += more
            most = max(most, memory(server.process.pid))
            assert text == right
        took, grown, p99 = time.monotonic() - began, most - before, sorted(pauses)[int(0.99 * len(pauses))]
        print(f"\n{kind}: closed within {took:.1f} s; gaps of another key {p99:.3f} s at p99; {grown:.0f} MB")
        assert left <= 0, f"{left} of {MANY} still have their connection after {BOUND} s"
        assert p99 < 2 * MAX_GAP and grown < 50


CROWDED = LIMITS + "; import twostroke.serve.transport.places as p; p.MAX_CONNECTIONS = 20; h.BODY_SECONDS = 60.0"


def test_slow_bodies_of_one_key_leave_places_for_another(long_folder: Path) -> None:
    """One key has more unfinished requests than there are places: another key is answered."""
    server = Server(long_folder, code=CROWDED, keys=(KEY, OTHER_KEY)).wait()
    try:
        with slow_clients(server, "slow bodies"):
            for _ in range(5):
                time.sleep(0.2)
                with server.client(headers=OTHER) as client:
                    answer = client.post("/v1/completions", json=GREEDY | {"stream": False, "max_tokens": 4})
                    assert answer.status_code == 200, answer.text
    finally:
        server.stop()
