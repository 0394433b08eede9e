"""One HTTP exchange over ASGI: a request body that is read within limits, and an answer, whole or streamed."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from contextlib import asynccontextmanager
from typing import Any

from twostroke.remote.admission import KEY_FULL
from twostroke.schedule.keys import most_of
from twostroke.serve.transport.auth import Caller
from twostroke.serve.transport.errors import ApiError, busy

AsgiMessage = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[AsgiMessage]]
Send = Callable[[AsgiMessage], Awaitable[None]]
WriteNow = Callable[[Callable[[], bytes]], bool]
Accepted = Callable[[int, float], bool]  # (key, its share): whether one more connection of this key may be busy

# ASGI extensions of this server's connections
WRITE_NOW = "twostroke.write_now"  # where `Exchange.write_now` comes from
ACCEPTED = "twostroke.accepted"  # where `Exchange.accepted` comes from
RESERVED = "twostroke.reserved"  # the connection is beyond the limit: only probes are answered on it

MAX_BODY = 4 << 20  # bytes of one request
MAX_BODIES = 256 << 20  # bytes of all bodies that are being read or turned into prompts
BODY_SECONDS = 30.0  # for a whole body to arrive
JSON_TYPE = b"application/json"
IGNORED_HEADER = "x-twostroke-ignored"  # lists the hints of a request
MAX_IGNORED = 4096  # characters of that header
REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}\Z")
ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)
ESCAPING = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


class GoneError(Exception):
    """The client has closed the connection."""


class BodyMemory:
    """Counts the bytes of all request bodies that are being read or turned into prompts. One API key may have a share
    of what other keys leave free."""

    def __init__(self) -> None:
        self.held = Counter[int]()  # by key
        self.share = 1.0

    def add(self, key: int, count: int) -> None:
        self.held[key] += count
        total = self.held.total()
        if total > MAX_BODIES:
            raise ApiError(503, "Too many large requests at once: try again.", retry_after=1, reason="bodies")
        if key and self.held[key] > most_of(self.share, MAX_BODIES, total - self.held[key]):
            raise busy(1, KEY_FULL)

    def release(self, key: int, count: int) -> None:
        self.held[key] -= count
        if not self.held[key]:
            del self.held[key]


class Exchange:
    """One request and its answer."""

    def __init__(self, scope: AsgiMessage, receive: Receive, send: Send, arrival: float, memory: BodyMemory):
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.query: bytes = scope["query_string"]
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.peer: str = (scope.get("client") or ("",))[0]  # the address of the client
        self.arrival = arrival
        self.caller = Caller("", b"")
        self.weight = 0  # bytes of a large body or answer: what grows with them is done in threads; 0 for small ones
        self.extra_headers: dict[str, str] = {"x-request-id": request_id(self.headers)}  # of any answer, errors too
        self.ignored: set[str] = set()  # hints of the request that change nothing about the answer
        self.started = False  # the head of the answer was sent
        extensions = scope.get("extensions", {})
        self.write_now: WriteNow | None = extensions.get(WRITE_NOW)
        self.accepted: Accepted = extensions.get(ACCEPTED, lambda key, share: True)
        self.reserved: bool = extensions.get(RESERVED, False)
        self.http_version: str = scope["http_version"]
        self._receive = receive
        self._send = send
        self._memory = memory
        self._held = 0  # bytes of the body

    def check_framing(self) -> None:
        """Refuses a request of which it is unclear where it ends: another server on its way may have read two."""
        chunked = b"transfer-encoding" in self.headers
        if chunked and (b"content-length" in self.headers or self.http_version == "1.0"):
            self.extra_headers["connection"] = "close"
            raise ApiError(400, "Send Content-Length or Transfer-Encoding, not both.", code="invalid_http")

    def release_body(self) -> None:
        """The body is not needed any more."""
        self._memory.release(self.caller.number, self._held)
        self._held = 0

    async def body(self) -> bytes:
        """The whole body. A body over the limit is refused before it is held."""
        check_content_type(self.headers)
        if self.headers.get(b"content-encoding", b"identity") != b"identity":
            why = "content-encoding: compressed bodies are not read: send plain JSON."
            raise ApiError(415, why, param="content-encoding", code="unsupported_encoding")
        length = self.headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > MAX_BODY:
            raise too_large()
        data = bytearray()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while True:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise GoneError
                    part = message.get("body", b"")
                    self._held += len(part)
                    self._memory.add(self.caller.number, len(part))
                    data += part
                    if len(data) > MAX_BODY:
                        raise too_large()
                    if not message.get("more_body"):
                        return bytes(data)
        except TimeoutError:
            raise ApiError(408, f"The body did not arrive within {BODY_SECONDS:.0f} s.", reason="timeout") from None

    async def respond(
        self, status: int, document: Any, headers: dict[str, str] | None = None, kind: str = "application/json"
    ) -> None:
        data = document if isinstance(document, bytes) else dump(document)
        lines = {"content-type": kind, "content-length": str(len(data)), **(headers or {})}
        await self._start(status, lines)
        await self._send({"type": "http.response.body", "body": b"" if self.method == "HEAD" else data})

    async def begin_stream(self) -> None:
        """The head of server-sent events. The last header asks proxies not to buffer them."""
        kind = "text/event-stream; charset=utf-8"
        await self._start(200, {"content-type": kind, "cache-control": "no-cache", "x-accel-buffering": "no"})

    async def write(self, data: bytes) -> None:
        if data:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end_stream(self) -> None:
        await self._send({"type": "http.response.body", "body": b""})

    async def _start(self, status: int, lines: dict[str, str]) -> None:
        lines = lines | self.extra_headers
        if self.ignored:
            lines[IGNORED_HEADER] = ", ".join(sorted(self.ignored))[:MAX_IGNORED]
        headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in lines.items()]
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    @asynccontextmanager
    async def watched(self, gone: Callable[[], None]) -> AsyncIterator[None]:
        """Calls `gone` as soon as the client closes the connection, and at the end in any case."""
        task = asyncio.get_running_loop().create_task(self._wait_for_disconnect(gone))
        try:
            yield
        finally:
            task.cancel()
            gone()

    async def _wait_for_disconnect(self, gone: Callable[[], None]) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            continue
        gone()


def request_id(headers: Mapping[bytes, bytes]) -> str:
    """The client's own id of its request, if it is plain; else a new one."""
    given = headers.get(b"x-request-id", b"")
    return given.decode() if REQUEST_ID.match(given) else f"req_{secrets.token_hex(12)}"


def check_content_type(headers: Mapping[bytes, bytes]) -> None:
    """JSON is read only where it is called JSON: a web page can send a body as text or as a form without being asked.
    Without a content-type the body is read as JSON."""
    kind = headers.get(b"content-type", JSON_TYPE).partition(b";")[0].strip().lower()
    if kind != JSON_TYPE:
        why = f"content-type: {kind.decode('latin-1')[:100]} is not read here: send 'Content-Type: application/json'"
        raise ApiError(415, f"{why} (curl: -H).", param="content-type", code="unsupported_content_type")


def too_large() -> ApiError:
    return ApiError(413, f"The body is over {MAX_BODY >> 20} MiB.", code="body_too_large", reason="too_large")


def dump(document: Any) -> bytes:
    """Compact JSON. A lone surrogate has no UTF-8 form, so such a document is written with escapes."""
    try:
        return ENCODER.encode(document).encode()
    except UnicodeEncodeError:
        return ESCAPING.encode(document).encode()


def dump_large(document: Any) -> bytes:
    """The same for a thread. `dump` holds the interpreter lock to the end; this is Python code, which gives it up."""
    try:
        return "".join(ENCODER.iterencode(document)).encode()
    except UnicodeEncodeError:
        return "".join(ESCAPING.iterencode(document)).encode()
