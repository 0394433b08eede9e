"""A client that has closed its direction of the connection: does it still read?

`shutdown` and `close` send the same packet, and only after `close` is the client gone. The difference shows when the
server sends something: the system of a client that is gone answers with a reset. So a probe is sent, and the state of
the socket is read now and then.
"""

from __future__ import annotations

import asyncio
import socket

CHECK_SECONDS = (0.002, 0.01, 0.05)  # before each further look; the last one repeats
TCP_CLOSE = 7  # of the kernel's states: a reset has come


def can_watch(transport: asyncio.BaseTransport) -> bool:
    """Whether the state of the socket can be seen: only Linux shows it."""
    sock = transport.get_extra_info("socket")
    return hasattr(socket, "TCP_INFO") and sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6)


class HalfClosed:
    """Aborts the connection as soon as a reset has come, until `stop`."""

    def __init__(self, transport: asyncio.Transport, probe: bytes):
        self._transport = transport
        self._socket = transport.get_extra_info("socket")
        self._timer: asyncio.TimerHandle | None = None
        self._looks = 0
        transport.write(probe)
        self._look_later()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look_later(self) -> None:
        seconds = CHECK_SECONDS[min(self._looks, len(CHECK_SECONDS) - 1)]
        self._looks += 1
        self._timer = asyncio.get_running_loop().call_later(seconds, self._look)

    def _look(self) -> None:
        try:
            state = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
        except OSError:
            state = TCP_CLOSE
        if state == TCP_CLOSE:
            self._transport.abort()
        else:
            self._look_later()
