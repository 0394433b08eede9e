"""One TCP connection: uvicorn's HTTP/1.1 protocol with limits on connections, headers and clients that do not read."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import h11
from h11._writers import ChunkedWriter
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from twostroke.serve.transport import places
from twostroke.serve.transport.errors import ApiError, full, openai_error
from twostroke.serve.transport.half_closed import HalfClosed, can_watch
from twostroke.serve.transport.http import ACCEPTED, RESERVED, WRITE_NOW, dump
from twostroke.serve.transport.lingering_close import LingeringTransport
from twostroke.serve.transport.strict_buffer import MAX_CHUNKS, MAX_HEADER_BYTES, StrictBuffer

HEADER_SECONDS = 20.0  # for the head of a request to arrive
STALL_SECONDS = 60.0  # in which a client that has much to read must read STALL_BYTES
STALL_BYTES = 16 << 10
SLICE = 1 << 10  # bytes of heads and chunks that are read in one turn of the event loop: some 5 ms at worst
LATE_SECONDS = 0.5  # a timer that fires later than this shows that this process was stopped, not the client


def raw_answer(status: bytes, error: ApiError) -> bytes:
    """A whole HTTP answer as bytes, for connections without a request that ASGI could answer."""
    body = dump(openai_error(error))
    retry = b"" if error.retry_after is None else b"retry-after: %d\r\n" % error.retry_after
    lines = b"content-type: application/json\r\n%bconnection: close\r\ncontent-length: %d\r\n" % (retry, len(body))
    return b"HTTP/1.1 %b\r\n%b\r\n%b" % (status, lines, body)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


FULL = raw_answer(b"503 Service Unavailable", full())
BAD_HTTP = raw_answer(
    b"400 Bad Request",
    ApiError(
        400,
        f"This is not an HTTP/1.1 request by RFC 9112, or its body has more than {MAX_CHUNKS} chunks.",
        code="invalid_http",
    ),
)
LONG_HEAD = raw_answer(
    b"431 Request Header Fields Too Large",
    ApiError(431, f"The head of the request is over {MAX_HEADER_BYTES >> 10} KiB.", code="head_too_large"),
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
        self.conn._receive_buffer = StrictBuffer()
        self._inner_app, self.app = self.app, self._with_extensions
        self.accepted = self.reserved = False  # the nouns of `places`
        self.key = 0
        self.since = 0.0
        self.unread = bytearray()  # received, and not yet given to h11
        self.feeding = False  # the rest of it will be, in later turns of the event loop
        self.eof_waits = False
        self.half_closed: HalfClosed | None = None  # after the client has closed its direction
        self.head_timer = Timer()  # runs while the head of a request is incomplete
        self.stall_timer = Timer()  # runs while the client leaves its answer unread

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if not self._take_place():
            self._refuse(transport)
            return
        self.since = self.loop.time()
        super().connection_made(LingeringTransport(transport, self._has_unread_input))  # type: ignore[arg-type]
        self.head_timer.start(HEADER_SECONDS, transport.abort)

    @property
    def busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _take_place(self) -> bool:
        """Whether there is a place for this connection. An idle one may lose its own for it."""
        connections: set[Connection] = self.connections  # type: ignore[assignment]
        if len(connections) < places.MAX_CONNECTIONS:
            return True
        idle = places.idle_one(connections)
        if idle is None:
            self.reserved = True
            if len(connections) < places.MAX_CONNECTIONS + places.RESERVE:
                return True
            idle = places.idle_one(connections, reserved=True)
        if idle is None:
            return False
        connections.discard(idle)
        idle.transport.abort()
        return True

    def _refuse(self, transport: asyncio.Transport) -> None:
        linger = len(REFUSED) < places.MAX_REFUSED
        if linger:
            REFUSED.add(self)
        self.transport = LingeringTransport(transport, lambda: linger)  # type: ignore[assignment]
        self.transport.write(FULL)
        self.transport.close()

    def _has_unread_input(self) -> bool:
        """Whether the client is in the middle of a request, or has sent something that is no HTTP."""
        return self.conn.their_state in (h11.SEND_BODY, h11.ERROR)

    async def _with_extensions(self, scope: Any, receive: Any, send: Any) -> None:
        scope["extensions"] = {
            WRITE_NOW: partial(self._write_now, self.cycle),
            ACCEPTED: self._accept,
            RESERVED: self.reserved,
        }
        await self._inner_app(scope, receive, send)

    def _accept(self, key: int, share: float) -> bool:
        """The request has a valid key. False: this key is busy on as many connections as it may be."""
        self.accepted, self.key = True, key
        return not places.over_share(self.connections, key, share)  # type: ignore[arg-type]

    def _write_now(self, cycle: RequestResponseCycle, make: Callable[[], bytes]) -> bool:
        """Makes and writes a part of a streamed answer at once, where ASGI's `send` would need a task switch for every
        token. False: nothing was made, because the client does not keep up (`send` waits for it) or is gone."""
        if self.flow.write_paused or cycle.disconnected:
            return False
        data = make()
        if data:
            self.transport.write(chunk(data) if self._in_chunks() else self.conn.send(h11.Data(data=data)))
        return True

    def _in_chunks(self) -> bool:
        """Whether the answer's body is under way in chunks: h11 would only frame what it is given."""
        return type(self.conn._writer) is ChunkedWriter and self.conn.our_state is h11.SEND_BODY

    def data_received(self, data: bytes) -> None:
        self.unread += data
        if not self.feeding:
            self._feed()

    def _feed(self) -> None:
        """Gives h11 what was received. Where many small parts may be in it, a little in each turn of the event loop."""
        self.feeding = False
        while self.unread:
            size = self._body_left() or SLICE
            part = bytes(self.unread[:size])
            del self.unread[:size]
            self._receive(part)
            if self.unread and not self._body_left():
                self.feeding = True
                self.transport.pause_reading()
                self.loop.call_soon(self._feed)
                return
        if self.eof_waits:
            self.eof_waits = False
            if not self.eof_received():
                self.transport.close()
        elif not self.flow.read_paused and not self.transport.is_closing():
            self.transport.resume_reading()

    def _body_left(self) -> int:
        """Bytes that are left of a body with a known length: h11 passes them on as they come. 0 for heads and chunks,
        which it reads part by part."""
        return getattr(self.conn._reader, "_remaining", 0)

    def _receive(self, data: bytes) -> None:
        if self.transport.is_closing():
            self.unread.clear()
            return
        super().data_received(data)
        if self.busy or (self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]):
            self.head_timer.stop()  # the head is complete, or none has begun: uvicorn times idle connections itself
        else:
            self.head_timer.start(HEADER_SECONDS, self.transport.abort)

    def send_400_response(self, msg: str) -> None:
        """Answers what is not HTTP, or has too long a head, with the usual error body if no answer has begun. uvicorn
        calls this while it handles the error of h11."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            too_long = getattr(sys.exception(), "error_status_hint", 400) == 431
            self.transport.write(LONG_HEAD if too_long else BAD_HTTP)
        self.transport.close()

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client has closed its direction. It still gets the answers to the requests that it sent completely."""
        if self.feeding:
            self.eof_waits = True  # until all that came before has been read
            return True
        complete = self.busy and not self.cycle.more_body
        if not complete or not can_watch(self.transport):
            return False
        if self.half_closed is None:
            self.half_closed = HalfClosed(self.transport, self._probe())
        return True

    def _probe(self) -> bytes:
        """Bytes that a client ignores, and to which the system of a client that is gone answers with a reset: an
        interim answer before the head of the answer, a comment in a stream of events."""
        if self.flow.write_paused:
            return b""  # it has enough to read
        if self.conn.our_state is h11.SEND_BODY:
            return self.conn.send(h11.Data(data=b":\n\n")) or b""
        known = self.conn.their_http_version
        return b"HTTP/1.1 100 Continue\r\n\r\n" if known == b"1.1" else b""

    def on_response_complete(self) -> None:
        self.since = self.loop.time()
        super().on_response_complete()
        if self.reserved or (self.half_closed is not None and not self.busy):
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_stall_timer()

    def _start_stall_timer(self) -> None:
        """Closes the connection of a client that reads nothing, or next to nothing, for STALL_SECONDS."""
        left = self.transport.get_write_buffer_size()

        def check() -> None:
            self.stall_timer.stop()
            if left - self.transport.get_write_buffer_size() >= STALL_BYTES:
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
        if self.half_closed is not None:
            self.half_closed.stop()
        REFUSED.discard(self)
        if self.flow is not None:
            super().connection_lost(exc)
