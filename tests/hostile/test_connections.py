"""Raw HTTP by RFC 9112, and connections that only take places."""

from __future__ import annotations

import contextlib
import json
import resource
import socket
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.measured import measured
from tests.serve.server import Server, wait_until
from tests.serve.test_listen import KEY_LINE, connect, read_answer
from twostroke.serve.transport.strict_buffer import MAX_CHUNKS

CROWDED = (
    "import twostroke.serve.transport.places as p, twostroke.serve.transport.http as h; "
    "p.MAX_CONNECTIONS = 20; p.RESERVE = 4; h.BODY_SECONDS = 600.0"
)
LIVE = b"GET /health/live HTTP/1.1\r\nhost: probe\r\n\r\n"
MODELS = f"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n{KEY_LINE}\r\n".encode()
UNFINISHED = (
    f"POST /tokenize HTTP/1.1\r\nhost: localhost\r\n{KEY_LINE}expect: 100-continue\r\ncontent-length: 9\r\n\r\n"
).encode()


@pytest.fixture(scope="module")
def crowded(long_folder: Path) -> Iterator[Server]:
    """A server with 20 places, of which one key may have all, and a reserve of 4."""
    running = Server(long_folder, "-s", "key_share=1", code=CROWDED).wait()
    yield running
    assert running.stop() == 0


def ask(server: Server, data: bytes) -> tuple[int, dict]:
    with connect(server) as sock:
        sock.sendall(data)
        return read_answer(sock)


def is_closed(sock: socket.socket) -> bool:
    """Whether the server has closed it, seen without waiting."""
    sock.setblocking(False)
    try:
        return sock.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


# ---- places --------------------------------------------------------------------------------------------------------


def test_idle_connections_lose_their_places(crowded: Server) -> None:
    """First those that never sent a request with a valid key, then those that have been idle longest."""
    with contextlib.ExitStack() as stack:
        used = stack.enter_context(connect(crowded))
        used.sendall(MODELS)
        assert read_answer(used)[0] == 200
        idle = [stack.enter_context(connect(crowded)) for _ in range(40)]
        for sock in idle[::2]:
            sock.sendall(LIVE)
            with contextlib.suppress(OSError):
                sock.recv(65536)
        assert ask(crowded, LIVE)[0] == 200
        assert ask(crowded, MODELS)[0] == 200
        wait_until(lambda: sum(map(is_closed, idle)) >= 21, "more than 20 connections are held")
        used.setblocking(True)
        used.sendall(MODELS)
        assert read_answer(used)[0] == 200, "a client with a valid key lost its place to connections without one"


def test_probes_are_answered_when_every_place_is_busy(crowded: Server) -> None:
    with contextlib.ExitStack() as stack:
        busy: list[socket.socket] = []
        while ask(crowded, MODELS)[0] == 200:
            assert len(busy) < 20, "more than 20 places"
            busy.append(stack.enter_context(connect(crowded)))
            busy[-1].sendall(UNFINISHED)
            assert b"100 Continue" in busy[-1].recv(1000)
        silent = [stack.enter_context(connect(crowded)) for _ in range(10)]  # more than the reserve has
        for path in (b"/health/live", b"/health/ready"):
            assert ask(crowded, LIVE.replace(b"/health/live", path))[0] == 200
        status, document = ask(crowded, MODELS)
        assert status == 503 and document["error"]["code"] == "connections"
        assert sum(map(is_closed, silent)) >= 6
        assert not any(map(is_closed, busy))
    wait_until(lambda: ask(crowded, MODELS)[0] == 200, "the places did not come back")


@pytest.fixture
def many_files() -> Iterator[None]:
    """This process may hold both thousand connections and more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4096:
        pytest.skip("the system allows this test too few open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def limit_files(soft: int, hard: int) -> str:
    return f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))"


@measured
@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("kind", ["idle", "busy"])
def test_the_real_number_of_connections(long_folder: Path, many_files: None, kind: str) -> None:
    """1,024 places under the usual limit of 1,024 open files: more connections than that, and probes are answered."""
    code = limit_files(1024, 4096) + "; import twostroke.serve.transport.http as h; h.BODY_SECONDS = 600.0"
    server = Server(long_folder, code=code, keys=()).wait()
    try:
        with contextlib.ExitStack() as stack:
            held = [stack.enter_context(connect(server)) for _ in range(1024 + (200 if kind == "idle" else 0))]
            for sock in held:
                sock.sendall(UNFINISHED if kind == "busy" else LIVE)
                with contextlib.suppress(OSError):
                    sock.recv(65536)
            silent = [stack.enter_context(connect(server)) for _ in range(100)]
            took = []
            for _ in range(200):
                began = time.perf_counter()
                assert ask(server, LIVE)[0] == 200
                took.append(time.perf_counter() - began)
            assert statistics.quantiles(took, n=100)[-1] < 0.25, max(took)
            assert ask(server, MODELS)[0] == (503 if kind == "busy" else 200)
            assert len(silent) == 100
        wait_until(lambda: ask(server, MODELS)[0] == 200, "the places did not come back")
        assert not [line for line in server.lines if "Too many open files" in line]
    finally:
        assert server.stop() == 0


@measured
def test_few_open_files_mean_fewer_places(long_folder: Path) -> None:
    """A server that may open 256 files has 24 places, and says so; 300 connections do not keep a probe waiting."""
    server = Server(long_folder, code=limit_files(256, 256), keys=()).wait()
    try:
        assert any("24 connections at most" in line for line in server.lines), server.lines
        with contextlib.ExitStack() as stack:
            for _ in range(300):
                stack.enter_context(connect(server)).sendall(LIVE)
            began = time.monotonic()
            assert ask(server, LIVE)[0] == 200 and ask(server, MODELS)[0] == 200
            assert time.monotonic() - began < 5.0
        assert not [line for line in server.lines if "Too many open files" in line]
    finally:
        assert server.stop() == 0


# ---- the RFC -------------------------------------------------------------------------------------------------------


def refused_and_closed(server: Server, data: bytes) -> tuple[int, dict]:
    with connect(server) as sock:
        sock.sendall(data)
        answer = read_answer(sock)
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(100) == b"", "the connection was kept open"
        return answer


@pytest.mark.parametrize("order", [0, 1])
def test_two_lengths_are_refused(server: Server, order: int) -> None:
    """RFC 9112, 6.1: request smuggling."""
    lengths = ["content-length: 5", "transfer-encoding: chunked"][:: 1 - 2 * order]
    lines = ["POST /tokenize HTTP/1.1", "host: localhost", KEY_LINE.strip(), *lengths, "", "0", "", ""]
    status, document = refused_and_closed(server, "\r\n".join(lines).encode() + MODELS)
    assert status == 400 and "Transfer-Encoding" in document["error"]["message"]


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("lines", [1, 400])
def test_a_long_head_is_431(server: Server, whole: bool, lines: int) -> None:
    """However it arrives: a head that comes in one piece counts too."""
    more = "".join(f"x-{i}: {'y' * (40_000 // lines)}\r\n" for i in range(lines))
    head = f"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n{KEY_LINE}{more}"
    status, document = refused_and_closed(server, (head + ("\r\n" if whole else "")).encode())
    assert status == 431 and "32 KiB" in document["error"]["message"]


@pytest.mark.parametrize(
    "data",
    [
        b"GET /health/live HTTP/1.1\nhost: localhost\n\n",
        b"GET /health/live HTTP/1.1\nhost: localhost\r\n\r\n",
        b"GET /health/live HTTP/1.1\r\nhost: localhost\nx: y\r\n\r\n",
        b"GET /health/live HTTP/1.1\r\nhost: localhost\r\n\n",
        b"\nGET /health/live HTTP/1.1\r\nhost: localhost\r\n\r\n",
    ],
)
def test_a_bare_line_feed_is_refused(server: Server, data: bytes) -> None:
    assert refused_and_closed(server, data)[0] == 400


def test_a_bare_line_feed_in_a_second_request_is_refused(server: Server) -> None:
    with connect(server) as sock:
        sock.sendall(LIVE + b"GET /health/live HTTP/1.1\nhost: localhost\n\n")
        data = b""
        while part := sock.recv(65536):
            data += part
    assert data.startswith(b"HTTP/1.1 200 ") and b"HTTP/1.1 400 " in data


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_half_closed_client_gets_its_answer(server: Server, stream: bool, version: str) -> None:
    body = json.dumps({"prompt": "Once", "max_tokens": 200, "ignore_eos": True, "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/{version}\r\nhost: localhost\r\n{KEY_LINE}content-length: {len(body)}\r\n\r\n"
    with connect(server) as sock:
        sock.sendall(head.encode() + body)
        sock.shutdown(socket.SHUT_WR)
        data = b""
        while part := sock.recv(65536):
            data += part
    assert b" 200 " in data and (b"[DONE]" if stream else b'"completion_tokens":200') in data


def test_pipelined_requests_of_a_half_closed_client_are_answered(server: Server) -> None:
    with connect(server) as sock:
        sock.sendall(MODELS + MODELS)
        sock.shutdown(socket.SHUT_WR)
        data = b""
        while part := sock.recv(65536):
            data += part
    assert data.count(b"HTTP/1.1 200 ") == 2


@measured
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_is_gone_is_not_taken_for_half_closed(server: Server, stream: bool) -> None:
    """Its request ends at once, though nothing is written for it yet."""
    server.quiet()
    wanted = {"prompt": "Once", "max_tokens": 7000, "n": 4, "ignore_eos": True, "stream": stream}
    body = json.dumps(wanted).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n{KEY_LINE}content-length: {len(body)}\r\n\r\n"
    with connect(server) as sock:
        sock.sendall(head.encode() + body)
        wait_until(lambda: server.health()["in_flight"] == 4, "it never began")
    began = time.monotonic()
    wait_until(lambda: server.health()["in_flight"] == 0, "it went on")
    assert time.monotonic() - began < 5.0


# ---- chunks --------------------------------------------------------------------------------------------------------

CHUNKED = f"POST /tokenize HTTP/1.1\r\nhost: localhost\r\n{KEY_LINE}transfer-encoding: chunked\r\n\r\n".encode()


def in_chunks(body: bytes, size: int) -> bytes:
    parts = [body[start : start + size] for start in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


@pytest.mark.parametrize("size", [1, 7, 1000, 100_000])
def test_bodies_in_chunks_are_read(server: Server, size: int) -> None:
    body = json.dumps({"prompt": "x " * (600 if size < 100 else 30_000)}).encode()
    status, document = ask(server, CHUNKED + in_chunks(body, size))
    assert status == 200 and document["count"] > 100


def test_requests_of_all_kinds_in_one_write(server: Server) -> None:
    """A body with a length, one in chunks, and one without, in any order, and then the end."""
    body = json.dumps({"prompt": "x " * 3000}).encode()
    known = CHUNKED.replace(b"transfer-encoding: chunked", b"content-length: %d" % len(body)) + body
    with connect(server) as sock:
        sock.sendall(known + CHUNKED + in_chunks(body, 9) + MODELS + known + CHUNKED + in_chunks(body, 5000))
        sock.shutdown(socket.SHUT_WR)
        data = b""
        while part := sock.recv(65536):
            data += part
    assert data.count(b"HTTP/1.1 200 ") == 5


def probes_beside_tiny_chunks(server: Server) -> list[float]:
    """Seconds until each of them was answered. h11 takes as long for a chunk of one byte as for a large one."""
    with connect(server) as sock, connect(server) as probe:
        sock.sendall(CHUNKED)
        sock.setblocking(False)
        data, took = b"1\r\nx\r\n" * 100_000, []
        while len(took) < 100:
            with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
                sock.send(data)
            began = time.perf_counter()
            probe.sendall(LIVE)
            assert read_answer(probe)[0] == 200
            took.append(time.perf_counter() - began)
    return took


def test_a_body_in_tiny_chunks_does_not_stop_the_server(server: Server) -> None:
    """Probes are answered while it comes."""
    assert len(probes_beside_tiny_chunks(server)) == 100


@measured
@pytest.mark.slow
@pytest.mark.alone
def test_a_body_in_tiny_chunks_does_not_delay_others(server: Server) -> None:
    took = probes_beside_tiny_chunks(server)
    assert statistics.median(took) < 0.05 and max(took) < 0.5, (statistics.median(took), max(took))


def test_too_many_chunks_are_refused(server: Server) -> None:
    with connect(server) as sock:
        sock.sendall(CHUNKED + b"1\r\n \r\n" * (MAX_CHUNKS + 1))
        status, document = read_answer(sock)
        assert status == 400 and "chunks" in document["error"]["message"]
