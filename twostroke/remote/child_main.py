"""The engine's own process: an `EngineLoop` at the end of a socket. process.py starts it.

It ends when the socket is closed. On Linux it also ends at once when its parent dies, in the middle of a step too.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import select
import signal
import socket
import sys
import threading
import time

from twostroke.errors import TwostrokeError
from twostroke.remote import loop, wire
from twostroke.remote.loop import ClosedError
from twostroke.remote.messages import Beat, Failed, FromEngine, Hello, ToEngine

BEAT_SECONDS = 0.5
CHUNK = 1 << 18
PR_SET_PDEATHSIG = 1


class SocketPort:
    """The child's end of the socket pair. Sends from several threads, receives in one."""

    def __init__(self, sock: socket.socket):
        self.sock = sock
        self.reader = wire.to_engine()
        self.lock = threading.Lock()
        self.wake_read, self._wake_write = os.pipe()
        for end in (self.wake_read, self._wake_write):
            os.set_blocking(end, False)
        self._poll = select.poll()
        for source in (sock.fileno(), self.wake_read):
            self._poll.register(source, select.POLLIN)

    def send(self, message: FromEngine) -> None:
        data = wire.encode(message)
        try:
            with self.lock:
                self.sock.sendall(data)
        except OSError:
            raise ClosedError from None

    def wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the pipe is full of wake-ups already
            os.write(self._wake_write, b"!")

    def receive(self, wait: bool) -> list[ToEngine]:
        messages: list[ToEngine] = []
        while found := self._poll.poll(None if wait else 0):
            wait = False
            for source, _ in found:
                if source == self.wake_read:
                    os.read(self.wake_read, CHUNK)
                else:
                    messages.extend(self.reader.feed(self._read()))
        return messages

    def _read(self) -> bytes:
        try:
            data = self.sock.recv(CHUNK)
        except OSError:
            data = b""
        if not data:
            raise ClosedError
        return data


def beat(port: SocketPort, engine: loop.EngineLoop) -> None:
    """Reports from a thread that the process runs, so that a stopped process can be distinguished from a long step."""
    while True:
        time.sleep(BEAT_SECONDS)
        try:
            port.send(Beat(engine.steps, engine.working))
        except ClosedError:
            os._exit(0)  # the main thread may be deep in a step whose result has no reader any more


def follow_parent() -> None:
    """End with the parent, on Linux even in a step. The parent alone handles signals that are sent to both."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def read_hello(port: SocketPort) -> Hello:
    """The first message: it comes alone, in any number of pieces."""
    messages: list[ToEngine] = []
    while not messages:
        messages = port.receive(wait=True)
    if not isinstance(messages[0], Hello):
        raise wire.WireError("the first message must be Hello")
    return messages[0]


def main(descriptor: str, parent: str) -> None:
    follow_parent()
    if os.getppid() != int(parent):
        return  # it died before this process could follow it
    port = SocketPort(socket.socket(fileno=int(descriptor)))
    try:
        hello = read_hello(port)
        logging.basicConfig(level=hello.log_level, format="%(levelname)s engine: %(message)s")
        try:
            engine, ready = loop.start(port, hello)
            running = loop.EngineLoop(port, engine, hello.direct)
        except (TwostrokeError, OSError, MemoryError) as error:
            port.send(Failed(type(error).__name__, str(error)))
            return
        gc.collect()
        gc.freeze()  # the model stays: no later collection needs to look at it again
        threading.Thread(target=beat, args=(port, running), daemon=True).start()
        loop.announce(port, ready, running)
        running.run()
    except ClosedError:
        return
