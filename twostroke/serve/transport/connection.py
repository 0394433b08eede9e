"""One TCP connection: uvicorn's HTTP/1.1 protocol with limits on connections, headers and clients that do not read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from twostroke.serve.transport.errors import ApiError, openai_error
from twostroke.serve.transport.http import WRITE_NOW, dump
from twostroke.serve.transport.lingering_close import LingeringTransport

MAX_CONNECTIONS = 1024
MAX_HEADER_BYTES = 32 << 10
HEADER_SECONDS = 20.0  # for the head of a request to arrive
STALL_SECONDS = 60.0  # a client may leave its answer unread for this long
LATE_SECONDS = 0.5  # a timer that fires later than this shows that this process was stopped, not the client
MAX_REFUSED = 256  # connections over the limit that get time to read the refusal


def raw_answer(status: bytes, error: ApiError) -> bytes:
    """A whole HTTP answer as bytes, for connections without a request that ASGI could answer."""
    body = dump(openai_error(error))
    retry = b"" if error.retry_after is None else b"retry-after: %d\r\n" % error.retry_after
    lines = b"content-type: application/json\r\n%bconnection: close\r\ncontent-length: %d\r\n" % (retry, len(body))
    return b"HTTP/1.1 %b\r\n%b\r\n%b" % (status, lines, body)


FULL = raw_answer(
    b"503 Service Unavailable",
    ApiError(503, "Too many connections: try again.", code="connections", retry_after=5),
)
BAD_HTTP = raw_answer(
    b"400 Bad Request",
    ApiError(
        400,
        f"What was sent is no HTTP/1.1 request, or its head is over {MAX_HEADER_BYTES >> 10} KiB.",
        code="invalid_http",
    ),
)
REFUSED: set[asyncio.Protocol] = set()  # connections over the limit that are still open


class Timer:
    """Calls a function after some seconds unless it is stopped. When it fires late, this process itself was stopped
    (SIGSTOP, suspend) and the client may be innocent: the time then starts again."""

    def __init__(self) -> None:
        self._handle: asyncio.TimerHandle | None = None

    def start(self, seconds: float, action: Callable[[], None]) -> None:
        if self._handle is not None:
            return
        loop = asyncio.get_running_loop()
        due = loop.time() + seconds

        def fire() -> None:
            if loop.time() - due < LATE_SECONDS:
                action()
                return
            self.stop()
            self.start(seconds, action)

        self._handle = loop.call_at(due, fire)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None


class Connection(H11Protocol):
    """Adds the limits that uvicorn does not have, in the methods of asyncio's protocol interface."""

    def __init__(self, *arguments: Any, **named: Any):
        super().__init__(*arguments, **named)
        self._inner_app, self.app = self.app, self._with_write_now
        self.head_timer = Timer()  # runs while the head of a request is incomplete
        self.stall_timer = Timer()  # runs while the client leaves its answer unread

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if len(self.connections) >= MAX_CONNECTIONS:
            self._refuse(transport)
            return
        super().connection_made(LingeringTransport(transport, self._has_unread_input))  # type: ignore[arg-type]
        self.head_timer.start(HEADER_SECONDS, transport.abort)

    def _refuse(self, transport: asyncio.Transport) -> None:
        linger = len(REFUSED) < MAX_REFUSED
        if linger:
            REFUSED.add(self)
        self.transport = LingeringTransport(transport, lambda: linger)  # type: ignore[assignment]
        self.transport.write(FULL)
        self.transport.close()

    def _has_unread_input(self) -> bool:
        """Whether the client is in the middle of a request, or has sent something that is no HTTP."""
        return self.conn.their_state in (h11.SEND_BODY, h11.ERROR)

    async def _with_write_now(self, scope: Any, receive: Any, send: Any) -> None:
        scope["extensions"] = {WRITE_NOW: partial(self._write_now, self.cycle)}
        await self._inner_app(scope, receive, send)

    def _write_now(self, cycle: RequestResponseCycle, make: Callable[[], bytes]) -> bool:
        """Makes and writes a part of a streamed answer at once, where ASGI's `send` would need a task switch for every
        token. False: nothing was made, because the client does not keep up (`send` waits for it) or is gone."""
        if self.flow.write_paused or cycle.disconnected:
            return False
        data = make()
        if data:
            self.transport.write(self.conn.send(h11.Data(data=data)))
        return True

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        super().data_received(data)
        answering = self.cycle is not None and not self.cycle.response_complete
        if answering or (self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]):
            self.head_timer.stop()  # the head is complete, or none has begun: uvicorn times idle connections itself
        else:
            self.head_timer.start(HEADER_SECONDS, self.transport.abort)

    def send_400_response(self, msg: str) -> None:
        """Answers what is no HTTP, or has too long a head, with the usual error body if an answer can still be sent."""
        if self.conn.our_state is h11.IDLE:
            self.transport.write(BAD_HTTP)
        self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_stall_timer()

    def _start_stall_timer(self) -> None:
        """Closes the connection of a client that reads nothing at all for STALL_SECONDS."""
        left = self.transport.get_write_buffer_size()

        def check() -> None:
            self.stall_timer.stop()
            if self.transport.get_write_buffer_size() < left:
                self._start_stall_timer()
            else:
                self.transport.abort()

        self.stall_timer.start(STALL_SECONDS, check)

    def resume_writing(self) -> None:
        super().resume_writing()
        self.stall_timer.stop()

    def connection_lost(self, exc: Exception | None) -> None:
        self.head_timer.stop()
        self.stall_timer.stop()
        REFUSED.discard(self)
        if self.flow is not None:
            super().connection_lost(exc)
