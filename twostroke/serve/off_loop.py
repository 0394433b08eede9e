"""Work that grows with the size of a request or of an answer, in threads: the event loop stays free for streams and
health checks, and API keys take turns.

A thread only helps where the interpreter lock is free meanwhile. Python code gives it up every few milliseconds, and
the tokenizer does so in its native code. A JSON parser does not: `body_shape` bounds what it is given.
"""

from __future__ import annotations

import asyncio
import ctypes
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from twostroke.remote.turns import FairTurns
from twostroke.serve.body_shape import check_shape
from twostroke.serve.fates import ignored
from twostroke.serve.fields import Payload, validate
from twostroke.serve.transport.http import Exchange

T = TypeVar("T")
P = TypeVar("P", bound=Payload)

INLINE_BODY = 64 << 10  # bytes: smaller bodies with few elements are read on the event loop
INLINE_COMMAS = 512
INLINE = 16_384  # characters, or bytes of a body, that are worked on on the event loop
LARGE = 1 << 20  # the size of a document that is always written in a thread
SWITCH_SECONDS = 0.001  # a thread that runs Python code gives up the interpreter this soon when another one waits


class FairThreads:
    """A few threads, for which the callers' keys take turns."""

    def __init__(self, count: int, name: str):
        self._threads = ThreadPoolExecutor(count, thread_name_prefix=name)
        self._turns = FairTurns(count)

    async def run(self, key: int, function: Callable[..., T], *arguments: Any) -> T:
        async with self._turns.turn(key):
            return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)


class Threads:
    def __init__(self) -> None:
        self._work = FairThreads(2, "request")
        self._parsing = FairThreads(1, "parse")  # one large body at a time
        self._rendering = FairThreads(1, "render")  # waits for the process that renders
        self._trimming: asyncio.Future[None] | None = None

    async def read(self, payload: type[P], exchange: Exchange) -> P:
        """The body of a request, checked."""
        body = await exchange.body()
        if len(body) <= INLINE_BODY and body.count(b",") <= INLINE_COMMAS:
            found, hints = validate_with_hints(payload, body)
        else:
            exchange.weight = max(len(body), INLINE + 1)
            found, hints = await self._parsing.run(exchange.caller.number, validate_large, payload, body)
        exchange.ignored |= hints
        return found

    async def call(self, exchange: Exchange, size: int, function: Callable[..., T], *arguments: Any) -> T:
        """Calls the function at once if `size` is small, else in a thread."""
        if size <= INLINE:
            return function(*arguments)
        return await self._work.run(exchange.caller.number, function, *arguments)

    async def render(self, exchange: Exchange, function: Callable[[], T]) -> T:
        return await self._rendering.run(exchange.caller.number, function)

    def trim(self) -> None:
        """Gives memory that a large body or answer needed back to the system, where the C library keeps it."""
        if self._trimming is None or self._trimming.done():
            self._trimming = asyncio.ensure_future(self._parsing.run(0, trim_memory))


def validate_with_hints(payload: type[P], body: bytes) -> tuple[P, set[str]]:
    found = validate(payload, body)
    return found, set(ignored(found))


def validate_large(payload: type[P], body: bytes) -> tuple[P, set[str]]:
    check_shape(body)
    return validate_with_hints(payload, body)


def trim_memory() -> None:
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, others do not
        if trim is not None:
            trim(0)
