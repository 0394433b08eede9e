"""Where workers join the router: a socket on one interface, for processes with the deployment's key. Torch-free."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Mapping

import twostroke
from twostroke.cluster.channel import Channel, limited
from twostroke.cluster.control import Joined, Line, from_worker
from twostroke.cluster.remote_worker import RemoteWorker
from twostroke.cluster.transport import TransferError
from twostroke.errors import ConfigError

log = logging.getLogger(__name__)
JOIN_SECONDS = 10.0
MAX_JOINING = 256  # connections that have not said which worker they are


class Hub:
    def __init__(self, key: bytes, workers: Mapping[int, RemoteWorker]):
        """key: of the control lines of a deployment, see `channel.derive`. workers: by number."""
        self._key = key
        self._workers = workers
        self._listening: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def listen(self, interface: str) -> str:
        """Returns the address for workers: "HOST:PORT"."""
        family, kind, _, _, place = socket.getaddrinfo(interface, 0, type=socket.SOCK_STREAM)[0]
        sock = self._listening = socket.socket(family, kind)
        sock.setblocking(False)
        sock.bind(place)
        sock.listen(128)
        self._keep(asyncio.get_running_loop().create_task(self._accept(sock)))
        host, port, *_ = sock.getsockname()
        return f"{host}:{port}"

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listening)
            except OSError as error:
                log.warning("a connection could not be accepted: %s", error)
                await asyncio.sleep(0.1)
                continue
            sock.setblocking(False)
            if len(self._tasks) > MAX_JOINING:
                sock.close()
                continue
            self._keep(loop.create_task(self._welcome(sock)))

    async def _welcome(self, sock: socket.socket) -> None:
        channel = Channel(sock)
        line = None
        try:
            await channel.prove_as_server(self._key)
            line = Line(channel, from_worker())
            async with limited(JOIN_SECONDS):
                joined = next(await line.receive(), None)
            if not isinstance(joined, Joined) or joined.worker not in self._workers:
                raise TransferError("the first message must be Joined, with the number of a worker")
            worker = self._workers[joined.worker]
            if joined.version != twostroke.__version__:
                worker.fail(
                    ConfigError(
                        f"{joined.machine} has twostroke {joined.version} and this machine {twostroke.__version__}: "
                        "install one version on all machines."
                    )
                )
                raise TransferError("another version of twostroke")
            worker.connect(line, joined)
        except TransferError as error:
            log.warning("a worker did not join: %s", error)
            if line is not None:
                line.close()
            channel.close()

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._listening is not None:
            self._listening.close()
