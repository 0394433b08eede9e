"""What every kind of server does around its model: signals, draining, the end, and where it listens."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from twostroke.remote.client import EngineClient
from twostroke.remote.process import Patience
from twostroke.serve.answer_setup import AnswerOptions
from twostroke.serve.base_service import BaseService
from twostroke.serve.transport.auth import SHORT_KEY, is_loopback
from twostroke.serve.transport.listen import Listener

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Options:
    path: Path  # of the checkpoint
    name: str  # of the model, as clients call it
    settings: dict[str, Any] = field(default_factory=dict)
    host: str = "127.0.0.1"
    port: int = 8000
    keys: tuple[str, ...] = ()
    admin_keys: tuple[str, ...] = ()
    max_queue: int | None = None
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    drain_timeout: float = 30.0
    closed_objects: bool = False
    patience: Patience = field(default_factory=Patience)
    answers: AnswerOptions = field(default_factory=AnswerOptions)
    client: Callable[[], EngineClient] | None = None  # makes it, on the event loop; None: a child process


class BaseServer:
    def __init__(self, options: Options, say: Say):
        self.options = options
        self.say = say
        self.signals = 0
        self.stopping = asyncio.Event()
        self.at_once = asyncio.Event()

    async def run(self) -> None:
        raise NotImplementedError

    def _take_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled)

    def _signalled(self) -> None:
        self.signals += 1
        self.stopping.set()
        if self.signals > 1:
            self.at_once.set()

    async def _until_stopped(self, task: asyncio.Task[Any]) -> None:
        """Returns at the first signal, or when the task ends."""
        stopping = asyncio.create_task(self.stopping.wait())
        await asyncio.wait((stopping, task), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()

    async def _drain(self, service: BaseService) -> None:
        service.draining = True
        count = service.generating
        if count:
            self.say(
                f"stopping: {count} request{'s' * (count != 1)} in flight may take {self.options.drain_timeout:g} s "
                "more; a second Ctrl-C or SIGTERM ends at once"
            )
        deadline = time.monotonic() + self.options.drain_timeout
        while service.generating and time.monotonic() < deadline and not self.at_once.is_set():
            await asyncio.sleep(0.02)

    async def _stop_listening(self, listener: Listener, listening: asyncio.Task[None]) -> None:
        """Gives connections a moment to send what is left."""
        listener.config.timeout_graceful_shutdown = 0 if self.at_once.is_set() else 1
        listener.should_exit = True
        await asyncio.wait((listening,), timeout=2.0)

    def _announce_address(self, sock: socket.socket) -> None:
        host, port = sock.getsockname()[:2]
        if not (self.options.keys or self.options.admin_keys) and not is_loopback(host):
            self.say(f"WARNING: every client that reaches {host} may use this server: set --api-key or --api-key-file")
        if any(len(key) < SHORT_KEY for key in (*self.options.keys, *self.options.admin_keys)):
            self.say(f"WARNING: an API key with fewer than {SHORT_KEY} characters can be guessed: use a longer one")
        where = f"[{host}]" if ":" in host else host
        self.say(f"serving {self.options.name} on http://{where}:{port}/v1")
