"""The listening socket, and uvicorn's server on it."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Generator
from typing import Any

import uvicorn

from twostroke.errors import ConfigError
from twostroke.serve.transport import places
from twostroke.serve.transport.connection import Connection
from twostroke.serve.transport.strict_buffer import MAX_HEADER_BYTES

IDLE_SECONDS = 75  # between two requests on one connection
WAITING = 1024  # connections that the kernel holds until they are accepted
SEND_BUFFER = 256 << 10  # bytes that the kernel may hold for a client that reads slowly


class Listener(uvicorn.Server):
    """uvicorn without its signal handlers: main.py decides when to drain and when to stop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """asyncio takes one number for the connections that wait in the kernel and for those accepted at one go."""
        await super().startup(sockets)
        for sock in sockets or ():
            sock.listen(WAITING)


def is_worth_a_line(record: logging.LogRecord) -> bool:
    """False for lines that say that connections were cut: the operator asked for an end at once."""
    return "timeout graceful shutdown exceeded" not in str(record.msg)


def make_listener(app: Any) -> Listener:
    log = logging.getLogger("uvicorn.error")
    log.setLevel(logging.ERROR)  # malformed requests are not worth a warning each
    log.addFilter(is_worth_a_line)
    config = uvicorn.Config(
        app, http=Connection, ws="none", lifespan="off", log_config=None, access_log=False, server_header=False,
        proxy_headers=False, timeout_keep_alive=IDLE_SECONDS, h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        backlog=places.BACKLOG,
    )  # fmt: skip
    return Listener(config)


def bind(host: str, port: int) -> socket.socket:
    """Called before the model is loaded, so that a port in use is reported at once."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, proto)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        sock.bind(address)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"--host {host} --port {port} cannot be listened on ({error}): give another port (0 takes a free one), "
            "or an address of this machine."
        ) from None
    sock.setblocking(False)
    return sock
