"""The process of a worker: an engine in a child process, its blocks' ends, and a line to the router. Torch-free.

router ══ line ══ Agent ── Worker ── engine process
                             └══ blocks ══ other workers
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import platform
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import twostroke
from twostroke.cluster.channel import HANDSHAKE_SECONDS, Channel, derive, limited
from twostroke.cluster.control import (
    Alive,
    Collect,
    Ended,
    Found,
    Joined,
    Line,
    LookUp,
    Offered,
    ParcelReady,
    Release,
    Take,
    Taken,
    ToWorker,
    Unanswered,
    to_worker,
)
from twostroke.cluster.holder import Offer, Parcel
from twostroke.cluster.sockets import reach
from twostroke.cluster.transport import TransferError
from twostroke.cluster.transports import direct_reads, fitting_transport
from twostroke.cluster.worker import Worker
from twostroke.config import KV_SHARE, Resolved
from twostroke.errors import ConfigError, ModelError, TwostrokeError
from twostroke.hardware import free_memory
from twostroke.remote.client import EngineError
from twostroke.remote.messages import Change, Changed, Failed, Hello, Orders, Ready, Recall, Report, Stage, Steps
from twostroke.remote.process import ProcessEngine
from twostroke.weights.checkpoint import locate, open_checkpoint
from twostroke.weights.describe import checkpoint_bytes

log = logging.getLogger(__name__)
ALIVE_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Post:
    """What a worker's process is told when it is placed."""

    number: int
    router: str  # "HOST:PORT"
    secret: bytes  # of the deployment
    interface: str  # to listen on for other workers
    neighbours: int  # workers on this machine, this one among them
    transport: str = "auto"  # see transports.py


class Agent:
    def __init__(self, post: Post):
        self.post = post
        self.line: Line[ToWorker]
        self.worker: Worker | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Serve the router until it closes the line."""
        self.line = await join(self.post)
        self.line.send(Joined(self.post.number, twostroke.__version__, os.getpid(), platform.node()))
        self._keep(self._beat())
        try:
            while True:
                for message in await self.line.receive():
                    self._obey(message)
        except TransferError:
            return
        finally:
            self.line.close()
            if self.worker is not None:
                await self.worker.stop(0.0)

    def _keep(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(ALIVE_SECONDS)
            worker = self.worker
            if worker is not None:
                trouble = worker.trouble() if worker.ready is not None else None
                self.line.send(Alive(trouble, worker.held))

    # ---- what the router says ----------------------------------------------------------------------------------------

    def _obey(self, message: ToWorker) -> None:
        if isinstance(message, Hello):
            self._keep(self._start(message))
            return
        assert self.worker is not None, "Hello comes first"
        if isinstance(message, Orders):
            self.worker.submit([one for first, count in message.runs for one in first.siblings(count)])
            if message.aborts:
                self.worker.abort(message.aborts)
        elif isinstance(message, Release):
            self.worker.release(message.lent)
        else:
            self._keep(self._reply(self.worker, message))

    async def _reply(self, worker: Worker, message: Change | Recall | LookUp | Collect | Take) -> None:
        number = message.question
        try:
            if isinstance(message, Take):
                self.line.send(Taken(number, await worker.take(message.request, message.tokens, message.offer)))
            elif isinstance(message, LookUp):
                self.line.send(Found(number, await worker.look_up(message.tokens, message.salt, message.first)))
            elif isinstance(message, Collect):
                self.line.send(Taken(number, await worker.collect(message.tokens, message.salt, message.parcel)))
            elif isinstance(message, Recall):
                self.line.send(Steps(number, await worker.steps(message.since, message.limit)))
            else:
                await self._change(worker, message)
        except EngineError as error:
            self.line.send(Unanswered(number, str(error)))

    async def _change(self, worker: Worker, message: Change) -> None:
        before, self.settings = self.settings, None
        try:
            await worker.change(message.wanted)
            self.line.send(Changed(message.question, self.settings or before, ""))
        except ConfigError as error:
            self.line.send(Changed(message.question, None, str(error)))
        finally:
            self.settings = self.settings or before

    async def _start(self, hello: Hello) -> None:
        logging.getLogger("twostroke").setLevel(hello.log_level)
        try:
            path = await asyncio.to_thread(find, hello.model)
            settings = shared_memory(hello.settings, path, self.post.neighbours)
            if "draft_model" in settings:
                settings["draft_model"] = str(await asyncio.to_thread(find, settings["draft_model"]))
            direct = direct_reads(self.post.interface, self.post.transport)
            names = derive(self.post.secret, "names")
            engine = ProcessEngine(path, settings, block_key=names, direct=direct, mixed=hello.mixed)
            key = derive(self.post.secret, "peers")
            transport = fitting_transport(key, self.post.interface, self.post.transport)
            self.worker = Worker(engine, transport)
            await self.worker.start(self)
        except (TwostrokeError, EngineError, OSError, MemoryError) as error:
            self.line.send(Failed(type(error).__name__, str(error)))

    # ---- what the worker says ----------------------------------------------------------------------------------------

    settings: Resolved | None = None

    def on_stage(self, stage: Stage) -> None:
        self.line.send(stage)

    def on_ready(self, ready: Ready) -> None:
        self.settings = ready.settings
        self.line.send(ready)

    def on_report(self, report: Report) -> None:
        self.line.send(report)

    def on_settings(self, settings: Resolved) -> None:
        self.settings = settings

    def on_parcel(self, request_id: int, parcel: Parcel) -> None:
        self.line.send(ParcelReady(request_id, parcel))

    def on_offer(self, request_id: int, offer: Offer) -> None:
        self.line.send(Offered(request_id, offer))

    def on_lost(self, why: str) -> None:
        self.line.send(Ended(why))


async def join(post: Post) -> Line[ToWorker]:
    host, _, port = post.router.rpartition(":")
    loop = asyncio.get_running_loop()
    family, kind, _, _, place = (await loop.getaddrinfo(host, int(port), type=socket.SOCK_STREAM))[0]
    async with limited(HANDSHAKE_SECONDS):
        channel = Channel(await reach(socket.socket(family, kind), place))
    try:
        await channel.prove_as_client(derive(post.secret, "control"))
    except BaseException:
        channel.close()
        raise
    return Line(channel, to_worker())


def find(model: str) -> Path:
    try:
        return locate(model).resolve()
    except ModelError as error:
        raise ModelError(f"{error} Every machine of the deployment reads the model from its own disk.") from None


def shared_memory(settings: dict[str, Any], path: Path, neighbours: int) -> dict[str, Any]:
    """The workers of one machine share its memory: the KV cache of each gets its part of what is left beside their
    weights, where its size is not given. A GPU is not shared."""
    if neighbours < 2 or settings.get("device") == "cuda" or {"kv_memory", "kv_blocks"} & settings.keys():
        return dict(settings)
    left = free_memory() - neighbours * (checkpoint_bytes(open_checkpoint(path)) + settings.get("kv_offload", 0))
    processes = neighbours * settings.get("parallel", 1)  # kv_memory is of each rank
    return settings | {"kv_memory": max(1, int(KV_SHARE["cpu"] * max(0, left) / processes))}


def serve(post: Post) -> None:
    """The life of a worker's process."""
    logging.basicConfig(level=logging.WARNING, format=f"%(levelname)s worker {post.number}: %(message)s")
    runner = asyncio.Runner(loop_factory=asyncio.SelectorEventLoop)  # Ray prefers uvloop where it finds it
    with contextlib.suppress(OSError, TransferError), runner:  # the router is gone
        runner.run(Agent(post).run())
