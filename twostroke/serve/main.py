"""`twostroke serve`: bind, load, serve, drain, stop.

After the first SIGTERM or SIGINT new requests are refused, and requests in flight may finish within the drain timeout.
After the second one the server stops at once. The engine process stops with it, and the exit status is 0.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import time

from twostroke.embed.description import is_embedder_at
from twostroke.remote.messages import Ready
from twostroke.serve.main_base import BaseServer, Options, Say
from twostroke.serve.off_loop import SWITCH_SECONDS
from twostroke.serve.serving import Serving, open_serving
from twostroke.serve.transport.listen import bind, make_listener
from twostroke.serve.transport.places import fit_to_descriptors


class Server(BaseServer):
    async def run(self) -> None:
        began = time.monotonic()
        sock = bind(self.options.host, self.options.port)
        self._take_signals()
        serving = await open_serving(self.options, self.say)
        listener = make_listener(serving.app)
        listening = asyncio.create_task(listener.serve(sockets=[sock]))
        try:
            ready = await self._load(serving)
            if ready is not None:
                self._announce(sock, ready, time.monotonic() - began)
                await self._until_stopped(listening)
                await self._drain(serving.service)
        finally:
            await serving.close(0.0 if self.at_once.is_set() else 1.0)
            await self._stop_listening(listener, listening)
        self.say("stopped")  # where it could not start, the error is printed instead

    async def _load(self, serving: Serving) -> Ready | None:
        """Returns when the engine is ready; None when a signal comes first."""
        loading = asyncio.create_task(serving.load())
        await self._until_stopped(loading)
        if loading.done():
            return loading.result()
        loading.cancel()
        return None

    # ---- messages --------------------------------------------------------------------------------------------------

    def _announce(self, sock: socket.socket, ready: Ready, total: float) -> None:
        rest = total - sum(ready.seconds.values())
        parts = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in ready.seconds.items())
        for name, reason in sorted(ready.settings.reasons.items()):
            self.say(f"  {name} = {getattr(ready.settings, name)}: {reason}")
        self.say(f"ready after {total:.2f} s: processes and imports {rest:.2f} s, {parts}")
        self._announce_address(sock)


def run(options: Options, say: Say) -> None:
    sys.setswitchinterval(SWITCH_SECONDS)
    fit_to_descriptors()
    kind: type[BaseServer] = Server
    if is_embedder_at(options.path):
        from twostroke.serve.embedding_main import EmbeddingServer

        kind = EmbeddingServer
    asyncio.run(kind(options, say).run())
