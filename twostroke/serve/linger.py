"""Closing a connection so that the client gets to read the answer.

A socket that is closed while bytes of its client lie unread, or still come, answers them with a reset, and a reset may
destroy the answer before the client has read it. So what is closed early is closed on our side only; what the client
still sends is thrown away until it has seen our end and closes too, or for a moment at most.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

LINGER_SECONDS = 2.0


class Lingering:
    """A transport whose `close` lingers if `unread` says that the client has more to send."""

    def __init__(self, transport: asyncio.Transport, unread: Callable[[], bool]):
        self._transport = transport
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
