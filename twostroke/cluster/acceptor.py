"""A listening socket: a task for each connection, up to so many at once, and the end of all of them. Torch-free."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine
from typing import Any

log = logging.getLogger(__name__)


class Acceptor:
    def __init__(self, sock: socket.socket, serve: Callable[[socket.socket], Coroutine[Any, Any, None]], most: int):
        """sock: bound, and closed here. most: connections at once; further ones are closed. On the running loop."""
        self._sock = sock
        self._serve = serve
        self._most = most
        self._tasks: set[asyncio.Task[None]] = set()
        sock.setblocking(False)
        sock.listen(128)
        self._keep(self._accept())

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(self._sock)
            except OSError as error:
                log.warning("a connection could not be accepted: %s", error)
                await asyncio.sleep(0.1)  # too many open files, perhaps
                continue
            sock.setblocking(False)
            if len(self._tasks) > self._most:
                sock.close()
            else:
                self._keep(self._serve(sock))

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._sock.close()


def bound(interface: str, port: int = 0) -> socket.socket:
    """A socket on this address and no other. port: 0 for any that is free."""
    family, kind, _, _, place = socket.getaddrinfo(interface, port, type=socket.SOCK_STREAM)[0]
    sock = socket.socket(family, kind)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(place)
    return sock


def place_of(sock: socket.socket) -> str:
    """HOST:PORT."""
    host, port, *_ = sock.getsockname()
    return f"{host}:{port}"
