"""A child process for work on untrusted input, with limits on CPU time, wall time and memory.

A chat template comes with a checkpoint, a grammar comes from a client. Either may run forever, fill the memory or crash
the interpreter, so each runs in a child that can be killed. `Confined` is the parent's side: it sends one message at a
time and replaces a child that ended. `answer_messages` is the child's side. Messages are msgpack maps after a length.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

START_SECONDS = 60.0
WALL_FACTOR = 5.0  # wall time allowed for one second of CPU time, because other processes use the CPU too
GRACE_SECONDS = 1.0  # what the parent waits beyond the wall time, in which the child ends itself
LOOK_SECONDS = 0.25  # while the parent waits: how often it looks whether the child was stopped
MAX_ANSWER = 64 << 20  # bytes
MAX_CHUNK = 1 << 18
LENGTH = struct.Struct("<I")

JsonMessage = dict[str, Any]


class LimitError(Exception):
    """A message made the child exceed its time or memory, or crash."""


class WallTimeError(LimitError):
    """A message took its wall time but not its CPU time. Other processes may be the cause: later it may succeed."""


class AccidentError(RuntimeError):
    """The child was killed or stopped from outside: the message is not the cause."""


class Confined:
    """Sends messages to a child process and starts it when there is none. Thread-safe; one message at a time."""

    def __init__(self, module: str, setup: Callable[[], JsonMessage] = dict, *, seconds: float, memory: int) -> None:
        """module: its `main` calls `answer_messages` in the child. setup: the first message to every new child.

        seconds: CPU time for one message. memory: bytes beyond what the child uses after its setup.
        """
        self._module = module
        self._setup = setup
        self._limits = {"seconds": seconds, "memory": memory}
        self._child: _Child | None = None
        self._lock = threading.Lock()

    def ask(self, message: JsonMessage) -> JsonMessage:
        """The child's answer. LimitError if the message takes too much. After an accident a new child is asked once;
        AccidentError if that one has an accident too."""
        data = _packed(message)
        patience = self._limits["seconds"] * WALL_FACTOR + GRACE_SECONDS
        with self._lock:
            for _ in range(2):
                try:
                    return self._started().ask(data, patience)
                except AccidentError:
                    self._end()
                except LimitError:
                    self._end()
                    raise
        raise AccidentError(f"the child process {self._module} was killed or stopped twice while it had one message")

    def start(self) -> None:
        """Start the child now, so that the first message does not wait for it."""
        with self._lock:
            self._started()

    def close(self) -> None:
        with self._lock:
            self._end()

    @property
    def pid(self) -> int | None:
        return None if self._child is None else self._child.process.pid

    def _started(self) -> _Child:
        if self._child is None:
            self._child = _Child(self._module, self._limits | {"setup": self._setup()})
        return self._child

    def _end(self) -> None:
        if self._child is not None:
            self._child.end()
        self._child = None


class _Child:
    """One child process and the parent's end of its socket."""

    def __init__(self, module: str, first: JsonMessage) -> None:
        root = str(Path(__file__).parents[1])
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        self._socket, inside = socket.socketpair()
        with inside:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", f"from {module} import main; main()"],
                stdin=inside.fileno(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": path}, start_new_session=True,
            )  # fmt: skip
        self.end = weakref.finalize(self, _end, self.process, self._socket)  # at the latest when this process ends
        try:
            self.ask(_packed(first), START_SECONDS)
        except AccidentError:
            self.end()
            raise
        except LimitError as error:
            self.end()
            raise RuntimeError(f"the child process {module} does not start") from error

    def ask(self, data: bytes, seconds: float) -> JsonMessage:
        deadline = time.monotonic() + seconds
        try:
            _send(self._socket, data, lambda: self._check(deadline))
            return _receive(self._socket, lambda: self._check(deadline))
        except OSError:  # the child has closed its end
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self.process.wait(START_SECONDS)
                if code in (-signal.SIGKILL, -signal.SIGTERM):
                    raise AccidentError from None
                if code == -signal.SIGALRM:
                    raise WallTimeError from None
            raise LimitError from None

    def _check(self, deadline: float) -> None:
        """AccidentError if the child was stopped, or neither answers nor ends in time."""
        if time.monotonic() > deadline or _stopped(self.process.pid):
            raise AccidentError


def _stopped(pid: int) -> bool:
    """Whether a signal has stopped this child. Where the system cannot say it, the deadline ends the wait."""
    if not hasattr(os, "waitid"):
        return False
    with contextlib.suppress(ChildProcessError):
        return os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    return False


def _end(process: subprocess.Popen[bytes], channel: socket.socket) -> None:
    process.kill()
    channel.close()
    process.wait()


def _packed(message: JsonMessage) -> bytes:
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body


def _send(channel: socket.socket, data: bytes, check: Callable[[], None]) -> None:
    """check: called while the other side does not read; it raises to end the wait."""
    channel.settimeout(LOOK_SECONDS)
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[channel.send(rest) :]
        except TimeoutError:
            check()


def _receive(channel: socket.socket, check: Callable[[], None] | None = None) -> JsonMessage:
    """check: called while the message is not complete; it raises to end the wait. None: wait without end."""
    channel.settimeout(None if check is None else LOOK_SECONDS)
    (size,) = LENGTH.unpack(_read(channel, LENGTH.size, check))
    if check is not None and size > MAX_ANSWER:
        raise LimitError
    try:
        message: JsonMessage = msgspec.msgpack.decode(_read(channel, size, check))
    except msgspec.MsgspecError as error:
        raise LimitError from error
    return message


def _read(channel: socket.socket, size: int, check: Callable[[], None] | None) -> bytes:
    data = bytearray()
    while len(data) < size:
        try:
            chunk = channel.recv(min(size - len(data), MAX_CHUNK))
            if not chunk:
                raise ConnectionResetError
            data += chunk
        except TimeoutError:
            pass
        if check is not None and len(data) < size:
            check()
    return bytes(data)


# ---- in the child --------------------------------------------------------------------------------------------------


def answer_messages(prepare: Callable[[JsonMessage], Callable[[JsonMessage], JsonMessage]]) -> None:
    """Answer every message until the parent closes its end. prepare: makes the answering function from the setup."""
    with socket.socket(fileno=os.dup(0)) as channel, contextlib.suppress(ConnectionError):
        first = _receive(channel)
        answer = prepare(first["setup"])
        _limit_memory(first["memory"])
        channel.sendall(_packed({}))
        while True:
            message = _receive(channel)
            _limit_time(first["seconds"])
            reply = _packed(answer(message))
            _limit_time(0.0)
            channel.sendall(reply)


def _limit_time(seconds: float) -> None:
    """Both signals end the process, whatever it does. 0: no limit."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, seconds * WALL_FACTOR)


def _limit_memory(size: int) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, ValueError):  # some systems have no /proc or refuse this limit
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + size, used + size))
