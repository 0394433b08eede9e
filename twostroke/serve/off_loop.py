"""Work that grows with the size of a request, in threads: the event loop stays free for streams and health checks.

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

from twostroke.serve.body_shape import check_shape
from twostroke.serve.fields import Payload, validate
from twostroke.serve.transport.http import Exchange

T = TypeVar("T")
P = TypeVar("P", bound=Payload)

INLINE_BODY = 64 << 10  # bytes: smaller bodies with few elements are read on the event loop
INLINE_COMMAS = 512
INLINE = 16_384  # characters, or bytes of a body, that are worked on on the event loop
SWITCH_SECONDS = 0.001  # a thread that runs Python code gives up the interpreter this soon when another one waits


class Threads:
    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="request")
        self._parsing = ThreadPoolExecutor(1, thread_name_prefix="parse")  # one large body at a time
        self._trimming: asyncio.Future[Any] | None = None

    async def read(self, payload: type[P], exchange: Exchange) -> P:
        """The body of a request, checked."""
        body = await exchange.body()
        if len(body) <= INLINE_BODY and body.count(b",") <= INLINE_COMMAS:
            return validate(payload, body)
        exchange.weight = max(len(body), INLINE + 1)
        return await asyncio.get_running_loop().run_in_executor(self._parsing, validate_large, payload, body)

    async def call(self, size: int, function: Callable[..., T], *arguments: Any) -> T:
        """Calls the function at once if `size` is small, else in a thread."""
        if size <= INLINE:
            return function(*arguments)
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

    def trim(self) -> None:
        """Gives memory that a large body needed back to the system, where the C library keeps it."""
        if self._trimming is None or self._trimming.done():
            self._trimming = asyncio.get_running_loop().run_in_executor(self._parsing, trim_memory)


def validate_large(payload: type[P], body: bytes) -> P:
    check_shape(body)
    return validate(payload, body)


def trim_memory() -> None:
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, others do not
        if trim is not None:
            trim(0)
