"""The HTTP listener: uvicorn with caps on connections, headers, idle time and readers that do not read."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Generator
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from twostroke.errors import ConfigError
from twostroke.serve.errors import ApiError
from twostroke.serve.http import STRAIGHT, dump
from twostroke.serve.linger import Lingering
from twostroke.serve.protocol.problems import openai_error

MAX_CONNECTIONS = 1024
MAX_HEADER_BYTES = 32 << 10
HEADER_SECONDS = 20.0  # for the first request of a connection to arrive
IDLE_SECONDS = 75  # between two requests on one connection
STALL_SECONDS = 60.0  # that a client may let its answer wait unread
LATE_SECONDS = 0.5  # after which an alarm that rings says more of this process than of the client
SEND_BUFFER = 256 << 10  # bytes the kernel may hold for one slow reader
MAX_LINGERING = 256  # connections over the cap that may take a moment to read why


def answer(status: bytes, error: ApiError) -> bytes:
    """A whole answer as it goes over the wire, where there is no request yet that ASGI could answer."""
    body = dump(openai_error(error))
    retry = b"" if error.retry_after is None else b"retry-after: %d\r\n" % error.retry_after
    lines = b"content-type: application/json\r\n%bconnection: close\r\ncontent-length: %d\r\n" % (retry, len(body))
    return b"HTTP/1.1 %b\r\n%b\r\n%b" % (status, lines, body)


FULL = answer(
    b"503 Service Unavailable",
    ApiError(503, "Too many connections: try again.", code="connections", retry_after=5),
)
BAD_HTTP = answer(
    b"400 Bad Request",
    ApiError(
        400,
        f"What was sent is no HTTP/1.1 request, or its head is over {MAX_HEADER_BYTES >> 10} KiB.",
        code="invalid_http",
    ),
)


TURNED_AWAY: set[asyncio.Protocol] = set()  # connections that are being told that there are too many


class Alarm:
    """Does something unless it is stopped in time. An alarm that comes late itself says that this process slept, not
    that the client did, who may not have been able to do anything meanwhile either: it begins anew."""

    def __init__(self) -> None:
        self._handle: asyncio.TimerHandle | None = None

    def start(self, seconds: float, action: Callable[[], None]) -> None:
        if self._handle is not None:
            return
        loop = asyncio.get_running_loop()
        due = loop.time() + seconds

        def ring() -> None:
            if loop.time() - due < LATE_SECONDS:
                action()
                return
            self.stop()
            self.start(seconds, action)

        self._handle = loop.call_at(due, ring)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None


class Chunks:
    """Writes parts of a streamed answer as HTTP/1.1 chunks. The head and the end of it are h11's."""

    __slots__ = ("_write", "cycle", "flow")

    def __init__(self, cycle: RequestResponseCycle):
        self.cycle, self.flow = cycle, cycle.flow
        self._write = cycle.transport.write

    @property
    def has_room(self) -> bool:
        return not (self.flow.write_paused or self.cycle.disconnected)

    def write(self, data: bytes) -> None:
        self._write(b"%x\r\n%b\r\n" % (len(data), data))


class Connection(H11Protocol):
    """One client. What uvicorn leaves open is bounded here, at the edges of asyncio's own protocol interface."""

    def __init__(self, *arguments: Any, **named: Any):
        super().__init__(*arguments, **named)
        self.answer, self.app = self.app, self._answer
        self.head = Alarm()  # set while a request's head is awaited
        self.stall = Alarm()  # set while an answer waits to be read

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if len(self.connections) >= MAX_CONNECTIONS:
            self._turn_away(transport)
            return
        super().connection_made(Lingering(transport, self._unread))  # type: ignore[arg-type]
        self.head.start(HEADER_SECONDS, transport.abort)

    def _turn_away(self, transport: asyncio.Transport) -> None:
        linger = len(TURNED_AWAY) < MAX_LINGERING
        if linger:
            TURNED_AWAY.add(self)
        self.transport = Lingering(transport, lambda: linger)  # type: ignore[assignment]
        self.transport.write(FULL)
        self.transport.close()

    def _unread(self) -> bool:
        """Whether the client is in the middle of a request, or of what never was one."""
        return self.conn.their_state in (h11.SEND_BODY, h11.ERROR)

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["http_version"] == "1.1" and scope["method"] != "HEAD":
            scope["extensions"] = {STRAIGHT: Chunks(self.cycle)}
        await self.answer(scope, receive, send)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        super().data_received(data)
        answering = self.cycle is not None and not self.cycle.response_complete
        if answering or (self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]):
            self.head.stop()  # it is whole, or none has begun: between requests uvicorn has a timer of its own
        else:
            self.head.start(HEADER_SECONDS, self.transport.abort)

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP, or has too long a head: in the shape of all errors, if an answer can still be given."""
        if self.conn.our_state is h11.IDLE:
            self.transport.write(BAD_HTTP)
        self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reader()

    def _await_reader(self) -> None:
        """Until enough of what was written is read; a client that takes nothing in all that time is cut off."""
        left = self.transport.get_write_buffer_size()

        def look() -> None:
            self.stall.stop()
            if self.transport.get_write_buffer_size() < left:
                self._await_reader()
            else:
                self.transport.abort()

        self.stall.start(STALL_SECONDS, look)

    def resume_writing(self) -> None:
        super().resume_writing()
        self.stall.stop()

    def connection_lost(self, exc: Exception | None) -> None:
        self.head.stop()
        self.stall.stop()
        TURNED_AWAY.discard(self)
        if self.flow is not None:
            super().connection_lost(exc)


class Listener(uvicorn.Server):
    """uvicorn without signal handlers of its own: when to drain and when to go is decided in main.py. It wakes once a
    second to write the date that answers carry, where uvicorn's own loop looks ten times whether it should go."""

    def __init__(self, config: uvicorn.Config):
        super().__init__(config)
        self._leaving = asyncio.Event()

    async def main_loop(self) -> None:
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._leaving.wait(), 1.0)

    def leave(self) -> None:
        self.should_exit = True
        self._leaving.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def make_listener(app: Any) -> Listener:
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # what strangers send is no news
    config = uvicorn.Config(
        app, http=Connection, ws="none", lifespan="off", log_config=None, access_log=False, server_header=False,
        proxy_headers=False, timeout_keep_alive=IDLE_SECONDS, h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        backlog=MAX_CONNECTIONS,
    )  # fmt: skip
    return Listener(config)


def bind(host: str, port: int) -> socket.socket:
    """Bound before the model loads: a port that is taken should not cost a minute to find out."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, proto)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        sock.bind(address)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"--host {host} --port {port} cannot be listened on ({error}): give another port (0 takes a free one), "
            "or an address of this machine."
        ) from None
    sock.setblocking(False)
    return sock
