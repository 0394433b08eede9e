"""`twostroke serve` of an embedder: bind, load, serve, drain, stop."""

from __future__ import annotations

import asyncio
import gc
import time

from twostroke.errors import ConfigError
from twostroke.metrics.registry import Metrics
from twostroke.serve.app import App
from twostroke.serve.embedding import EmbeddingService
from twostroke.serve.embedding_routes import EMBEDDING_ROUTES
from twostroke.serve.main_base import BaseServer
from twostroke.serve.transport.auth import Keys
from twostroke.serve.transport.browsers import Browsers
from twostroke.serve.transport.listen import bind, make_listener


class EmbeddingServer(BaseServer):
    async def run(self) -> None:
        options = self.options
        refused = {
            "--max-queue": options.max_queue is not None,
            "--closed-objects": options.closed_objects,
            "--answer-cache": options.answers.tier != "off",
            "--record-questions": options.answers.record,
        }
        for name, given in refused.items():
            if given:
                raise ConfigError(f"{name}: {options.name} makes vectors and has no such option.")
        began = time.monotonic()
        sock = bind(options.host, options.port)
        self._take_signals()
        keys = Keys(options.keys, options.admin_keys)
        service = EmbeddingService(options.path, options.settings, options.name, keys, Metrics(options.name))
        browsers = Browsers(options.host, options.allowed_hosts, options.allowed_origins)
        listener = make_listener(App(service, EMBEDDING_ROUTES, browsers))
        listening = asyncio.create_task(listener.serve(sockets=[sock]))
        try:
            loading = asyncio.create_task(asyncio.to_thread(service.load))
            await self._until_stopped(loading)
            if loading.done():
                loading.result()
                gc.collect()
                gc.freeze()  # these objects stay: later collections need not visit them
                embedder = service.embedder
                kind = embedder.description.kind
                self.say(f"  {kind}, {embedder.width} numbers a text, texts of up to {embedder.max_tokens} tokens")
                self.say(f"ready after {time.monotonic() - began:.2f} s")
                self._announce_address(sock)
                await self._until_stopped(listening)
                await self._drain(service)
        finally:
            service.stop()
            await self._stop_listening(listener, listening)
        self.say("stopped")  # where it could not start, the error is printed instead
