"""The engine on a thread of this process: the same loop and messages as in a child process, without bytes.

It shares the interpreter lock with the front end, and is not started again after a failure. For tests, notebooks, and
programs that want answers asynchronously without a second process.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from pathlib import Path
from typing import Any

from twostroke.errors import TwostrokeError
from twostroke.remote import loop
from twostroke.remote.client import EngineError, EngineListener, MessageClient
from twostroke.remote.loop import ClosedError
from twostroke.remote.messages import Direct, FromEngine, Hello, Message, Ready, ToEngine

log = logging.getLogger(__name__)
ENDED = "it ended, and the log has the reason"  # which may name files: not for clients


class QueuePort:
    """The engine's end: a queue of messages to it, and the event loop on which its own are received."""

    def __init__(self, client: ThreadEngine):
        self.client = client
        self.events = asyncio.get_running_loop()
        self.inbox: queue.SimpleQueue[ToEngine | None] = queue.SimpleQueue()  # None: only to wake
        self.closed = False

    def send(self, message: FromEngine) -> None:
        if self.closed:
            raise ClosedError
        try:
            self.events.call_soon_threadsafe(self.client._receive, message)
        except RuntimeError:  # the event loop is closed
            raise ClosedError from None

    def receive(self, wait: bool) -> list[ToEngine]:
        found: list[ToEngine | None] = []
        try:
            if wait:
                found.append(self.inbox.get())
            while True:
                found.append(self.inbox.get_nowait())
        except queue.Empty:
            pass
        if self.closed:
            raise ClosedError
        return [message for message in found if message is not None]

    def wake(self) -> None:
        self.inbox.put(None)

    def close(self) -> None:
        self.closed = True
        self.wake()


class ThreadEngine(MessageClient):
    """An `EngineClient` whose engine runs on a thread."""

    def __init__(
        self,
        model: Path,
        settings: dict[str, Any],
        block_key: bytes | None = None,
        direct: Direct | None = None,
        mixed: tuple[str, ...] = (),
    ):
        super().__init__(model, settings, block_key, direct, mixed)
        self.why = "it has not been started"
        self._port: QueuePort
        self._thread: threading.Thread | None = None
        self._first: asyncio.Future[Ready]

    async def start(self, listener: EngineListener) -> Ready:
        self.listener = listener
        self.why = "it is starting"
        self._port = QueuePort(self)
        self._first = asyncio.get_running_loop().create_future()
        self._thread = threading.Thread(target=self._run, args=(self._port, self._hello()), name="engine", daemon=True)
        self._thread.start()
        return await self._first

    async def stop(self, seconds: float = 2.0) -> None:
        """A step that is under way ends first; a thread cannot be killed, so after that time it is left behind."""
        if self._thread is not None:
            self.why = "it was stopped"
            self._port.close()
            await asyncio.to_thread(self._thread.join, seconds)

    def _run(self, port: QueuePort, hello: Hello) -> None:
        """The main function of the thread."""
        try:
            engine, ready = loop.start(port, hello)
            running = loop.EngineLoop(port, engine, hello.direct)
            loop.announce(port, ready, running)
            running.run()
        except ClosedError:
            return
        except (TwostrokeError, OSError, MemoryError) as error:
            self._end(port, error, str(error))
        except Exception as error:
            log.exception("the engine's thread ended")
            self._end(port, error, f"{type(error).__name__}: {error}")

    def _end(self, port: QueuePort, error: Exception, why: str) -> None:
        if not port.events.is_closed():
            port.events.call_soon_threadsafe(self._lost, error, why)

    def _lost(self, error: Exception, why: str) -> None:
        self.why = ENDED
        if self._first.done():
            log.error("the engine is gone: %s", why)
            self._lose(ENDED)
        else:
            self._first.set_exception(error)

    def _send(self, message: Message) -> None:
        if self.why:
            raise EngineError(self.why)
        self._port.inbox.put(message)  # type: ignore[arg-type]

    def _on_ready(self, ready: Ready) -> None:
        self.why = ""
        super()._on_ready(ready)
        self._first.set_result(ready)

    @property
    def healthy(self) -> bool:
        return not self.why

    def trouble(self) -> str | None:
        return self.why or None
