"""The engine in a child process: start it, watch it, and start it again when it dies. Torch-free.

    starting ──ready──▶ ready ──socket ends, or silence too long──▶ restarting ──ready──▶ ready
                          └── silence for a while: late (health says so), it may yet answer

A process that dies is seen at once: its end of the socket pair closes. A process that is stopped goes silent. A process
that is stuck in a step still beats, but its step does not end. The last two get some time, then they are killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from twostroke import errors
from twostroke.remote import wire
from twostroke.remote.client import EngineError, EngineListener, MessageClient
from twostroke.remote.messages import Beat, Direct, Failed, FromEngine, Hello, Message, Ready, Report

log = logging.getLogger(__name__)
NOT_STARTED = "it could not start, and the server's log has the reason"  # which may name files: not for clients
BOOT = "import sys; sys.path.append(sys.argv[3]); from twostroke.remote.child_main import main; main(*sys.argv[1:3])"
SOCKET_BUFFER = 4 << 20
READ = 1 << 18  # bytes taken in at once; one buffer for all of them, as a new one costs more than what is read


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait, in seconds."""

    late: float = 3.0  # of silence before the engine counts as not healthy
    dead: float = 10.0  # of silence before it is killed
    step: float = 20.0  # that a step may take beyond three times the longest one expected
    start: float = 600.0  # of silence while it starts: big models load for minutes
    backoff: float = 0.5  # before the first restart; doubles each time until one has lived for a minute
    backoff_most: float = 30.0


class Child(asyncio.BufferedProtocol):
    """One life of the engine process."""

    def __init__(
        self, process: subprocess.Popen[bytes], receive: Callable[[FromEngine], None], lost: Callable[[str, str], None]
    ):
        self.process = process
        self.receive = receive
        self.lost = lost
        self.reader = wire.from_engine()
        self.buffer = memoryview(bytearray(READ))
        self.transport: asyncio.Transport | None = None
        self.why = ""  # it ends, once that is decided; for the log
        self.shown = ""  # the same for clients, where it differs

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # other event loops have classes of their own

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.buffer

    def buffer_updated(self, nbytes: int) -> None:
        try:
            for message in self.reader.feed(self.buffer[:nbytes]):
                self.receive(message)
        except wire.WireError as error:
            self.kill(f"it sent a malformed message ({error})")

    def connection_lost(self, error: Exception | None) -> None:
        self.process.kill()  # whatever closed its socket, nothing of it may stay
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(1.0)
        why = self.why or ended_with(self.process.returncode)
        self.lost(why, self.shown or why)

    def send(self, message: Message) -> None:
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(wire.encode(message))

    def kill(self, why: str) -> None:
        self.why = self.why or why
        self.process.kill()
        if self.transport is not None:
            self.transport.abort()


def ended_with(status: int | None) -> str:
    """How the process ended, in words that clients may read."""
    if status == -signal.SIGKILL:
        return "it was killed (signal 9), perhaps because memory ran out: see kv_memory and kv_blocks"
    return f"it ended with exit status {status}"


async def spawn(receive: Callable[[FromEngine], None], lost: Callable[[str, str], None], hello: Hello) -> Child:
    """Called on the main thread: on Linux the child is bound to the life of the thread that makes it."""
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER)
    root = str(Path(__file__).parents[2])  # where this package lies, should it not be installed
    # -P: the folder it happens to be started in is not searched for modules.
    command = [sys.executable, "-P", "-c", BOOT, str(theirs.fileno()), str(os.getpid()), root]
    with theirs:
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    loop = asyncio.get_running_loop()
    _, child = await loop.create_connection(lambda: Child(process, receive, lost), sock=ours)
    child.send(hello)
    return child


class ProcessEngine(MessageClient):
    """An `EngineClient` that keeps one engine process alive and knows how it is."""

    def __init__(
        self,
        model: Path,
        settings: dict[str, Any],
        patience: Patience | None = None,
        block_key: bytes | None = None,
        direct: Direct | None = None,
        mixed: tuple[str, ...] = (),
    ):
        super().__init__(model, settings, block_key, direct, mixed)
        self.patience = patience or Patience()
        self.child: Child | None = None
        self.why = "it has not been started"  # in words that clients may read: no paths
        self._up = False
        self._heard = 0.0  # when the last message came
        self._looked = 0.0  # when `_watch` last looked
        self._moved = 0.0  # when the child last began or ended a step, or had nothing to do
        self._beat = Beat(0, False)
        self._born = 0.0  # when it last became ready
        self._failures = 0  # lives in a row that ended too soon
        self._closing = False
        self._first: asyncio.Future[Ready] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    # ---- life ------------------------------------------------------------------------------------------------------

    async def start(self, listener: EngineListener) -> Ready:
        self.listener = listener
        self._first = asyncio.get_running_loop().create_future()
        self.why = "it is starting"
        await self._spawn()
        self._looked = time.monotonic()
        self._keep(self._watch())
        return await self._first

    async def stop(self, seconds: float = 2.0) -> None:
        """Close the socket, which ends the process; kill it if it does not go."""
        self._closing = True
        for task in self._tasks:
            task.cancel()
        child = self.child
        if child is None or child.transport is None:
            return
        if not child.transport.is_closing():
            child.transport.write_eof()
        deadline = time.monotonic() + seconds
        while child.process.poll() is None and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        child.kill("it was stopped")
        child.process.wait()

    async def _spawn(self) -> None:
        hello = self._hello()
        self._heard = self._moved = self._said_hello
        self.child = await spawn(self._receive, self._lost, hello)

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _lost(self, why: str, shown: str) -> None:
        """why: for the log and for the operator who starts the server; shown: the same in words for clients."""
        lived = time.monotonic() - self._born if self._up else 0.0
        self._up, self.child, self.why = False, None, shown
        if self._closing:
            return
        if self._first is not None and not self._first.done():
            self._first.set_exception(EngineError(f"the engine did not start: {why}"))
            return
        log.error("the engine process is gone: %s; starting it again", why)
        self.restarts += 1
        self._lose(shown)
        self._keep(self._restart(self._backoff(lived)))

    def _backoff(self, lived: float) -> float:
        self._failures = 1 if lived > 60 else self._failures + 1
        return min(self.patience.backoff * 2 ** (self._failures - 1), self.patience.backoff_most)

    async def _restart(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self.why = f"it is starting again ({self.why})"
        try:
            await self._spawn()
        except OSError as error:
            self._lost(f"it could not be started ({error})", NOT_STARTED)

    # ---- messages --------------------------------------------------------------------------------------------------

    def _send(self, message: Message) -> None:
        if self.child is None or not self._up:
            raise EngineError(self.why)
        self.child.send(message)

    def _receive(self, message: FromEngine) -> None:
        self._heard = now = time.monotonic()
        if isinstance(message, Report):
            self._moved = now
        elif isinstance(message, Beat):
            if message.steps != self._beat.steps or not message.working:
                self._moved = now
            self._beat = message
        elif isinstance(message, Failed):
            self._on_failed(message)
        super()._receive(message)

    def _on_ready(self, ready: Ready) -> None:
        self._up, self.why = True, ""
        self._beat = Beat(0, False)
        self._born = self._moved = time.monotonic()
        super()._on_ready(ready)
        if self._first is not None and not self._first.done():
            self._first.set_result(ready)

    def _on_failed(self, failed: Failed) -> None:
        if self.child is not None:
            self.child.why, self.child.shown = failed.message, NOT_STARTED
        if self._first is not None and not self._first.done():
            kind = getattr(errors, failed.kind, EngineError)
            self._first.set_exception(kind(failed.message))

    # ---- health ----------------------------------------------------------------------------------------------------

    @property
    def healthy(self) -> bool:
        return self._up and self.trouble() is None

    def trouble(self) -> str | None:
        if not self._up:
            return self.why
        now = time.monotonic()
        if self._slept(now):
            return None  # what the child sent meanwhile is still unread
        if now - self._heard > self.patience.late:
            return f"no sign of life for {now - self._heard:.0f} s"
        if now - self._moved > self._step_patience() / 2:
            return f"no step has ended for {now - self._moved:.0f} s"
        return None

    @property
    def _tick(self) -> float:
        """Seconds between two looks."""
        return min(0.5, self.patience.late / 4)

    def _slept(self, now: float) -> bool:
        """Whether this process itself did not run: its silence is not the child's."""
        return now - self._looked > 4 * self._tick

    def _step_patience(self) -> float:
        longest = self.ready.longest_step if self.ready is not None else 0.0
        return self.patience.step + 3 * longest

    async def _watch(self) -> None:
        """Kills a process that is silent or stuck for too long; `_lost` then starts it again."""
        while True:
            await asyncio.sleep(self._tick)
            now = time.monotonic()
            slept, before, self._looked = self._slept(now), self._looked, now
            if slept:  # the child may have been stopped too: its time goes on from here
                self._heard = min(now, self._heard + now - before)
                self._moved = min(now, self._moved + now - before)
            if slept or self.child is None:
                continue
            silent = self.patience.dead if self._up else self.patience.start
            if now - self._heard > silent:
                self.child.kill(f"it gave no sign of life for {silent:g} s")
            elif self._up and now - self._moved > self._step_patience():
                self.child.kill(f"a step did not end within {self._step_patience():.0f} s")
