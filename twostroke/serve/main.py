"""`twostroke serve`: bind, load, serve, drain, stop.

After the first SIGTERM or SIGINT new requests are refused, and requests in flight may finish within the drain timeout.
After the second one the server stops at once. The engine process stops with it, and the exit status is 0.
"""

from __future__ import annotations

import asyncio
import gc
import socket
import sys
import time
from typing import Any

from twostroke.cluster.pools import Pools
from twostroke.config import Resolved
from twostroke.embed.description import is_embedder_at
from twostroke.kv.layout import BLOCK
from twostroke.metrics.registry import Metrics
from twostroke.remote.async_engine import AsyncEngine
from twostroke.remote.client import EngineClient
from twostroke.remote.messages import Ready
from twostroke.serve.answer_setup import AnswerMetrics, open_cache, open_recorder
from twostroke.serve.answering import Answering
from twostroke.serve.app import App
from twostroke.serve.main_base import BaseServer, Options, Say
from twostroke.serve.off_loop import SWITCH_SECONDS
from twostroke.serve.pool_metrics import PoolMetrics
from twostroke.serve.service import Service
from twostroke.serve.transport.auth import Keys
from twostroke.serve.transport.browsers import Browsers
from twostroke.serve.transport.listen import Listener, bind, make_listener
from twostroke.serve.transport.places import fit_to_descriptors


class Server(BaseServer):
    async def run(self) -> None:
        began = time.monotonic()
        sock = bind(self.options.host, self.options.port)
        self._take_signals()
        metrics = Metrics(self.options.name)
        client = self.options.client() if self.options.client is not None else None
        engine = await asyncio.to_thread(self._open, metrics, client)
        keys = Keys(self.options.keys, self.options.admin_keys)
        service = Service(engine, self.options.name, keys, metrics, self.options.closed_objects)
        browsers = Browsers(self.options.host, self.options.allowed_hosts, self.options.allowed_origins)
        service.opening = self.options.answers.tier != "off" or self.options.answers.record
        listener = make_listener(App(service, browsers=browsers))
        listening = asyncio.create_task(listener.serve(sockets=[sock]))
        try:
            ready = await self._load(engine)
            if ready is not None:
                await self._open_answers(service)
                metrics.configured(cache_labels(ready.settings))
                if isinstance(client, Pools):
                    PoolMetrics(client, self.options.name, metrics.registry)
                gc.collect()
                gc.freeze()  # these objects stay: later collections need not visit them
                self._announce(sock, ready, time.monotonic() - began)
                await self._until_stopped(listening)
                await self._drain(service)
        finally:
            if service.answers is not None:
                await asyncio.to_thread(service.answers.cache.close)
            if service.topics is not None:
                await asyncio.to_thread(service.topics.topics.close)
            await self._stop(listener, listening, engine)

    async def _open_answers(self, service: Service) -> None:
        options = self.options.answers
        if options.tier != "off":
            cache = await asyncio.to_thread(open_cache, options)
            service.answers = Answering(cache, service)
            AnswerMetrics(cache, service.name, service.metrics.registry)
            where = "redis" if options.url else options.file
            self.say(f"  answer cache: {options.tier}, {where}, at most {options.error:.2%} wrong")
        if options.record:
            service.topics = await asyncio.to_thread(open_recorder, options)
            self.say("  questions are recorded in memory for diagnose")
        service.opening = False

    def _open(self, metrics: Metrics, client: EngineClient | None) -> AsyncEngine:
        options = self.options
        return AsyncEngine(
            options.path, options.settings, max_queue=options.max_queue, observer=metrics, patience=options.patience,
            client=client,
        )  # fmt: skip

    async def _load(self, engine: AsyncEngine) -> Ready | None:
        """Returns when the engine is ready; None when a signal comes first."""
        loading = asyncio.create_task(engine.start(grammars=True))
        await self._until_stopped(loading)
        if loading.done():
            return loading.result()
        loading.cancel()
        return None

    async def _stop(self, listener: Listener, listening: asyncio.Task[None], engine: AsyncEngine) -> None:
        """Ends open streams with an error event first."""
        await engine.stop(0.0 if self.at_once.is_set() else 1.0)
        await self._stop_listening(listener, listening)

    # ---- messages --------------------------------------------------------------------------------------------------

    def _announce(self, sock: socket.socket, ready: Ready, total: float) -> None:
        rest = total - sum(ready.seconds.values())
        parts = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in ready.seconds.items())
        for name, reason in sorted(ready.settings.reasons.items()):
            self.say(f"  {name} = {getattr(ready.settings, name)}: {reason}")
        self.say(f"ready after {total:.2f} s: processes and imports {rest:.2f} s, {parts}")
        self._announce_address(sock)


def cache_labels(settings: Resolved) -> dict[str, Any]:
    """Under vLLM's names."""
    return {
        "block_size": BLOCK, "num_gpu_blocks": settings.kv_blocks, "cache_dtype": settings.kv_dtype,
        "enable_prefix_caching": settings.prefix_cache,
    }  # fmt: skip


def run(options: Options, say: Say) -> None:
    sys.setswitchinterval(SWITCH_SECONDS)
    fit_to_descriptors()
    kind: type[BaseServer] = Server
    if is_embedder_at(options.path):
        from twostroke.serve.embedding_main import EmbeddingServer

        kind = EmbeddingServer
    asyncio.run(kind(options, say).run())
