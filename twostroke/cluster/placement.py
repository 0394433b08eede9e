"""The router's end of its Ray driver: start it, talk to it, start it again when it ends. Torch-free."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from twostroke.cluster.placing import (
    ClusterAbsent,
    Connect,
    Connected,
    FromDriver,
    Kill,
    PlacementImpossible,
    PlaceWorkers,
    ToDriver,
    WorkerDied,
)
from twostroke.errors import ConfigError
from twostroke.remote import wire

log = logging.getLogger(__name__)
BOOT = "import sys; sys.path.append(sys.argv[2]); from twostroke.cluster.placement_main import main; main(sys.argv[1])"
CONNECT_SECONDS = 90.0  # a Ray of its own takes 13 s on two cores
STOP_SECONDS = 10.0
NO_CLUSTER = (
    "--address auto: no Ray cluster runs on this machine: start one with `ray start --head`, or leave --address out."
)
LOOPBACK_ONLY = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # Ray's processes then listen on 127.0.0.1, on Linux too
BACKOFF, BACKOFF_MOST = 2.0, 10.0  # seconds before a driver is started again
CHUNK = 1 << 16


class Placement:
    """Keeps one driver process."""

    def __init__(
        self,
        address: str | None,
        cores: int,
        plan: Callable[[Connected], PlaceWorkers],
        died: Callable[[WorkerDied], None],
    ):
        """address: of a Ray cluster; None: one that runs on this machine, else a new one with so many cores. plan: what
        to place on a cluster, or ConfigError; it is called again for each driver. died: a worker has."""
        self.address = address
        self.cores = cores
        self.plan = plan
        self.died = died
        self._process: subprocess.Popen[bytes] | None = None
        self._sock: socket.socket | None = None
        self._reader: wire.Reader[FromDriver]
        self._said: tempfile._TemporaryFileWrapper[bytes] | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._failed: asyncio.Future[None]
        self._placed = False  # a driver has been told what to place
        self.placed_at = 0.0  # when it was told

    async def start(self) -> Connected:
        """Wait until workers are being placed. ConfigError: they cannot be placed."""
        connected = await self._begin()
        self._failed = asyncio.get_running_loop().create_future()
        self._keeping = asyncio.get_running_loop().create_task(self._keep())
        return connected

    async def impossible(self) -> None:
        """Wait until the first driver says that workers cannot be placed: ConfigError."""
        await asyncio.shield(self._failed)

    async def _begin(self) -> Connected:
        answer = await self._connect(self.address or "auto")
        if isinstance(answer, ClusterAbsent) and self.address is None:
            await self._end()
            answer = await self._connect(None)
        if isinstance(answer, ClusterAbsent):
            answer = PlacementImpossible(NO_CLUSTER)
        if isinstance(answer, PlacementImpossible):
            self._kill()
            raise ConfigError(answer.why)
        if not isinstance(answer, Connected):
            said = self._last_words()
            self._kill()
            raise ConfigError(f"Ray could not be started: {said}")
        try:
            self._tell(self.plan(answer))
        except ConfigError:
            await self._end()
            raise
        self._placed, self.placed_at = True, time.monotonic()
        return answer

    async def _connect(self, address: str | None) -> FromDriver | None:
        self._spawn(own=address is None)
        self._tell(Connect(address, self.cores))
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                return await self._hear()
        except TimeoutError:
            self._kill()
            raise ConfigError(
                f"Ray did not answer within {CONNECT_SECONDS:g} s: see whether its processes run (`ray status`), or "
                "leave --address out to start a new one."
            ) from None

    def _spawn(self, own: bool) -> None:
        """A session of its own: signals of a terminal reach the router alone. own: it starts a Ray, whose processes
        talk to those that have a token."""
        self._sock, theirs = socket.socketpair()
        self._sock.setblocking(False)
        self._reader = wire.Reader(FromDriver)
        self._said = tempfile.NamedTemporaryFile(prefix="twostroke-ray-", suffix=".log")  # noqa: SIM115
        root = str(Path(__file__).parents[2])  # where this package lies, should it not be installed
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        if own:
            environment |= LOOPBACK_ONLY
        if own and os.environ.get("RAY_AUTH_MODE", "token") == "token":
            environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        command = [sys.executable, "-P", "-c", BOOT, str(theirs.fileno()), root]
        with theirs:
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=self._said, stderr=self._said,
                start_new_session=True, env=environment,
            )  # fmt: skip

    def _tell(self, message: ToDriver) -> None:
        if self._sock is not None:
            with contextlib.suppress(OSError):  # it has ended, and is started again
                self._sock.sendall(wire.encode(message))

    async def _hear(self) -> FromDriver | None:
        """The next message; None: the driver has ended. It sends few, one at a time."""
        assert self._sock is not None
        loop = asyncio.get_running_loop()
        pending: list[FromDriver] = []
        while not pending:
            try:
                data = await loop.sock_recv(self._sock, CHUNK)
            except OSError:
                data = b""
            if not data:
                return None
            pending = list(self._reader.feed(data))
        for later in pending[1:]:
            self._take(later)
        return pending[0]

    def _take(self, message: FromDriver) -> None:
        if isinstance(message, WorkerDied):
            self.died(message)
        elif isinstance(message, PlacementImpossible) and not self._failed.done():
            self._failed.set_exception(ConfigError(message.why))

    async def _keep(self) -> None:
        """Hears what the driver says; another one is started where it ends."""
        wait = BACKOFF
        while True:
            while (message := await self._hear()) is not None:
                wait = BACKOFF
                self._take(message)
            log.error("the Ray driver has ended: %s", self._last_words())
            self._kill()
            while True:
                await asyncio.sleep(wait)
                wait = min(BACKOFF_MOST, 2 * wait)
                try:
                    await self._begin()
                    break
                except ConfigError as error:
                    log.error("workers are not placed again yet: %s", error)
                    self._kill()

    def renew(self) -> bool:
        """No worker is there: another driver is to place them, if one has placed them before. A driver that has lost
        its cluster may wait for ever, if another cluster answers at the old address."""
        if not self._placed or self._process is None:
            return False
        log.error("no worker is there: Ray is asked anew to place them")
        self._process.kill()  # `_keep` hears of it
        return True

    def kill(self, worker: int) -> None:
        self._tell(Kill(worker))

    def _last_words(self) -> str:
        if self._said is None:
            return "it said nothing"
        lines = Path(self._said.name).read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    async def stop(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
            if self._failed.done():
                self._failed.exception()
        await self._end()

    async def _end(self) -> None:
        """Close the driver's socket: it ends its actors, a Ray of its own, and itself."""
        if self._sock is not None:
            self._sock.close()
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._process.wait, STOP_SECONDS)
        self._kill()

    def _kill(self) -> None:
        if self._sock is not None:
            self._sock.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._said is not None:
            self._said.close()
        self._placed = False
        self._sock = self._process = self._said = None
