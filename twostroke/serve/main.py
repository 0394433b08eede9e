"""`twostroke serve`: bind, load, serve, drain, stop.

After the first SIGTERM or SIGINT new requests are refused, and requests in flight may finish within the drain timeout.
After the second one the server stops at once. The engine process stops with it, and the exit status is 0.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from twostroke.config import Resolved
from twostroke.kv.layout import BLOCK
from twostroke.metrics.registry import Metrics
from twostroke.remote.async_engine import AsyncEngine
from twostroke.remote.messages import Ready
from twostroke.remote.process import Patience
from twostroke.serve.app import App
from twostroke.serve.off_loop import SWITCH_SECONDS
from twostroke.serve.service import Service
from twostroke.serve.transport.auth import SHORT_KEY, Keys, is_loopback
from twostroke.serve.transport.browsers import Browsers
from twostroke.serve.transport.listen import Listener, bind, make_listener
from twostroke.serve.transport.places import fit_to_descriptors

log = logging.getLogger(__name__)
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


class Server:
    def __init__(self, options: Options, say: Say):
        self.options = options
        self.say = say
        self.signals = 0
        self.stopping = asyncio.Event()
        self.at_once = asyncio.Event()

    async def run(self) -> None:
        began = time.monotonic()
        sock = bind(self.options.host, self.options.port)
        self._take_signals()
        metrics = Metrics(self.options.name)
        engine = await asyncio.to_thread(self._open, metrics)
        keys = Keys(self.options.keys, self.options.admin_keys)
        service = Service(engine, self.options.name, keys, metrics, self.options.closed_objects)
        browsers = Browsers(self.options.host, self.options.allowed_hosts, self.options.allowed_origins)
        listener = make_listener(App(service, browsers=browsers))
        listening = asyncio.create_task(listener.serve(sockets=[sock]))
        try:
            ready = await self._load(engine)
            if ready is not None:
                metrics.configured(cache_labels(ready.settings))
                gc.collect()
                gc.freeze()  # these objects stay: later collections need not visit them
                self._announce(sock, ready, time.monotonic() - began)
                await self._until_stopped(listening)
                await self._drain(service)
        finally:
            await self._stop(listener, listening, engine)

    def _open(self, metrics: Metrics) -> AsyncEngine:
        options = self.options
        return AsyncEngine(
            options.path, options.settings, max_queue=options.max_queue, observer=metrics, patience=options.patience
        )

    async def _load(self, engine: AsyncEngine) -> Ready | None:
        """Returns when the engine is ready; None when a signal comes first."""
        loading = asyncio.create_task(engine.start(grammars=True))
        await self._until_stopped(loading)
        if loading.done():
            return loading.result()
        loading.cancel()
        return None

    # ---- signals and the end ---------------------------------------------------------------------------------------

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

    async def _drain(self, service: Service) -> None:
        service.draining = True
        if service.generating:
            self.say(
                f"stopping: {service.generating} requests in flight may take {self.options.drain_timeout:g} s more"
            )
        deadline = time.monotonic() + self.options.drain_timeout
        while service.generating and time.monotonic() < deadline and not self.at_once.is_set():
            await asyncio.sleep(0.02)

    async def _stop(self, listener: Listener, listening: asyncio.Task[None], engine: AsyncEngine) -> None:
        """Ends open streams with an error event, and gives connections a moment to send it."""
        await engine.stop(0.0 if self.at_once.is_set() else 1.0)
        listener.config.timeout_graceful_shutdown = 0 if self.at_once.is_set() else 1
        listener.should_exit = True
        await asyncio.wait((listening,), timeout=2.0)
        self.say("stopped")

    # ---- messages --------------------------------------------------------------------------------------------------

    def _announce(self, sock: socket.socket, ready: Ready, total: float) -> None:
        rest = total - sum(ready.seconds.values())
        parts = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in ready.seconds.items())
        for name, reason in sorted(ready.settings.reasons.items()):
            self.say(f"  {name} = {getattr(ready.settings, name)}: {reason}")
        self.say(f"ready after {total:.2f} s: processes and imports {rest:.2f} s, {parts}")
        host, port = sock.getsockname()[:2]
        if not (self.options.keys or self.options.admin_keys) and not is_loopback(host):
            self.say(f"WARNING: every client that reaches {host} may use this server: set --api-key or --api-key-file")
        if any(len(key) < SHORT_KEY for key in (*self.options.keys, *self.options.admin_keys)):
            self.say(f"WARNING: an API key with fewer than {SHORT_KEY} characters can be guessed: use a longer one")
        where = f"[{host}]" if ":" in host else host
        self.say(f"serving {self.options.name} on http://{where}:{port}/v1")


def cache_labels(settings: Resolved) -> dict[str, Any]:
    """Under vLLM's names."""
    return {
        "block_size": BLOCK, "num_gpu_blocks": settings.kv_blocks, "cache_dtype": settings.kv_dtype,
        "enable_prefix_caching": settings.prefix_cache,
    }  # fmt: skip


def run(options: Options, say: Say) -> None:
    sys.setswitchinterval(SWITCH_SECONDS)
    fit_to_descriptors()
    asyncio.run(Server(options, say).run())
