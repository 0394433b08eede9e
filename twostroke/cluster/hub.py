"""Where workers join the router: a socket on one interface, for processes with the deployment's key. Torch-free."""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping

import twostroke
from twostroke.cluster.acceptor import Acceptor, bound, place_of
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
        self._acceptor: Acceptor | None = None

    def listen(self, interface: str) -> str:
        """Returns the address for workers: "HOST:PORT"."""
        sock = bound(interface)
        self._acceptor = Acceptor(sock, self._welcome, MAX_JOINING)
        return place_of(sock)

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
        if self._acceptor is not None:
            await self._acceptor.close()
