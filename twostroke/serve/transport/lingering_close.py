"""A close after which the client can still read the answer.

When a socket is closed while bytes from the client are unread or on their way, the kernel sends a reset, and the reset
can destroy an answer that the client has not read yet. So the server closes only its own direction first. It discards
what the client still sends, until the client closes too or LINGER_SECONDS have passed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

LINGER_SECONDS = 2.0


class LingeringTransport:
    """A transport that closes this way when `unread` says that the client has more to send."""

    def __init__(self, transport: asyncio.Transport, unread: Callable[[], bool]):
        self._transport = transport
        self.write = transport.write  # called for every token: no detour through __getattr__
        self._unread = unread
        self._lingers = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        return self._lingers or self._transport.is_closing()

    def close(self) -> None:
        if self._transport.is_closing() or not self._unread():
            self._transport.close()
        elif not self._lingers:
            self._lingers = True
            self._transport.write_eof()
            self._transport.resume_reading()
            asyncio.get_running_loop().call_later(LINGER_SECONDS, self._transport.close)
