"""The HTTP listener: uvicorn with caps on connections, headers, idle time and readers that do not read."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Generator
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from twostroke.errors import ConfigError

MAX_CONNECTIONS = 1024
MAX_HEADER_BYTES = 32 << 10
HEADER_SECONDS = 20.0  # for the first request of a connection to arrive
IDLE_SECONDS = 75  # between two requests on one connection
STALL_SECONDS = 60.0  # that a client may let its answer wait unread
SEND_BUFFER = 256 << 10  # bytes the kernel may hold for one slow reader
FULL_BODY = b'{"error":{"message":"Too many connections.","type":"server_error","param":null,"code":"connections"}}'
FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 5\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%b" % (len(FULL_BODY), FULL_BODY)
)


class Alarm:
    """Cuts a connection off unless it is stopped in time."""

    def __init__(self) -> None:
        self._handle: asyncio.TimerHandle | None = None

    def start(self, seconds: float, transport: asyncio.Transport) -> None:
        if self._handle is None:
            self._handle = asyncio.get_running_loop().call_later(seconds, transport.abort)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None


class Connection(H11Protocol):
    """One client. What uvicorn leaves open is bounded here, at the edges of asyncio's own protocol interface."""

    def __init__(self, *arguments: Any, **named: Any):
        super().__init__(*arguments, **named)
        self.head = Alarm()  # set while a request's head is awaited
        self.stall = Alarm()  # set while an answer waits to be read

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if len(self.connections) >= MAX_CONNECTIONS:
            self.transport = transport
            transport.write(FULL)
            transport.close()
            return
        super().connection_made(transport)
        self.head.start(HEADER_SECONDS, transport)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self.head.stop()  # it is whole
        else:  # it has begun; between requests uvicorn has a timer of its own
            self.head.start(HEADER_SECONDS, self.transport)

    def pause_writing(self) -> None:
        super().pause_writing()
        self.stall.start(STALL_SECONDS, self.transport)

    def resume_writing(self) -> None:
        super().resume_writing()
        self.stall.stop()

    def connection_lost(self, exc: Exception | None) -> None:
        self.head.stop()
        self.stall.stop()
        if self.flow is not None:
            super().connection_lost(exc)


class Listener(uvicorn.Server):
    """uvicorn without signal handlers of its own: when to drain and when to go is decided in main.py."""

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
        raise ConfigError(f"--host {host} --port {port}: cannot be listened on: {error}.") from None
    sock.setblocking(False)
    return sock
