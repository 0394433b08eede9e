"""A worker in another process, perhaps on another machine: the router's end of its line. Torch-free.

    waiting ──joined, ready──▶ up ──engine lost──▶ waiting ──ready──▶ up
                                └──line closed, or silent too long──▶ waiting ──joined again, ready──▶ up

A worker that dies is seen at once: its line closes. A worker that is stopped goes silent: after a moment it counts as
late and gets no new requests, after a while it is killed. Ray starts it again (placement_main.py).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twostroke import errors
from twostroke.cluster.control import (
    Alive,
    Collect,
    Ended,
    Found,
    FromWorker,
    Joined,
    Line,
    LookUp,
    Offered,
    ParcelReady,
    Release,
    Take,
    Taken,
    Unanswered,
)
from twostroke.cluster.handover import Moved
from twostroke.cluster.holder import Offer, Parcel
from twostroke.cluster.transport import TransferError
from twostroke.cluster.worker import Held, WorkerListener
from twostroke.record import replace
from twostroke.remote.client import ANSWER_SECONDS, EngineError, MessageClient
from twostroke.remote.messages import Failed, Message, Ready
from twostroke.types import Request

log = logging.getLogger(__name__)
LOOK_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class Silence:
    """How long a worker may be silent, in seconds."""

    late: float = 3.0  # before it counts as not healthy, and what it has goes on elsewhere
    dead: float = 15.0  # before it is killed; its agent kills an engine that is silent sooner


class RemoteWorker(MessageClient):
    """A `WorkerClient`."""

    def __init__(
        self,
        name: str,
        model: Path,
        settings: dict[str, Any],
        kill: Callable[[], None],
        silence: Silence | None = None,
    ):
        """kill: end the process of the worker; it is then started again, and joins again."""
        super().__init__(model, settings)
        self.name = name
        self.kill = kill
        self.silence = silence or Silence()
        self.why = "it has not been placed yet"
        self.held = Held()
        self.joined: Joined | None = None
        self.listener: WorkerListener
        self._up = False
        self._line: Line[FromWorker] | None = None
        self._trouble: str | None = None
        self._heard = 0.0
        self._looked = 0.0  # when `_watch` last looked
        self._first: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._tasks: set[asyncio.Task[None]] = set()

    # ---- life ------------------------------------------------------------------------------------------------------

    async def start(self, listener: WorkerListener) -> Ready:
        self.listener = listener
        self._looked = time.monotonic()
        self._keep(asyncio.get_running_loop().create_task(self._watch()))
        return await asyncio.shield(self._first)

    def fail(self, error: Exception) -> None:
        """It cannot start."""
        if not self._first.done():
            self._first.set_exception(error)
            self._first.exception()  # it may have no reader any more

    def not_placed(self, why: str) -> None:
        """The worker's process has ended, or waits for a place."""
        self.why = why

    async def stop(self, seconds: float) -> None:
        for task in list(self._tasks):
            task.cancel()
        if self._line is not None:
            self._line.close()

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def connect(self, line: Line[FromWorker], joined: Joined) -> None:
        """The worker's process has joined. An earlier process is gone, or will be soon."""
        if self._line is not None:
            self._drop("it has joined again")
        self._line, self.joined, self._trouble = line, joined, None
        self.why = "it is starting"
        self._heard = time.monotonic()
        line.send(self._hello())
        self._keep(asyncio.get_running_loop().create_task(self._read(line)))

    async def _read(self, line: Line[FromWorker]) -> None:
        try:
            while True:
                for message in await line.receive():
                    if line is self._line:
                        self._heard = time.monotonic()
                        self._hear(message)
        except TransferError as error:
            if line is self._line:
                self._drop(str(error))

    def _drop(self, why: str) -> None:
        """The line is gone, and the worker with it as far as we know."""
        line, self._line, self._trouble, self.held = self._line, None, None, Held()
        if line is not None:
            line.close()
        self._down("its process is gone" if why == "the peer closed the connection" else why)

    def _down(self, why: str) -> None:
        self.why = why
        if self._up:
            self._up = False
            self.restarts += 1
            log.error("%s is lost: %s", self.name, why)
            self._lose(why)

    # ---- messages --------------------------------------------------------------------------------------------------

    def _send(self, message: Message) -> None:
        if self._line is None or not self._up:
            raise EngineError(self.why)
        self._line.send(message)

    def _hear(self, message: FromWorker) -> None:
        if isinstance(message, Alive):
            self._trouble, self.held = message.trouble, message.held
        elif isinstance(message, ParcelReady):
            self.listener.on_parcel(message.request_id, message.parcel)
        elif isinstance(message, Offered):
            self.listener.on_offer(message.request_id, message.offer)
        elif isinstance(message, Taken | Found):
            self._answer(message)  # type: ignore[arg-type]
        elif isinstance(message, Unanswered):
            future = self._questions.get(message.question)
            if future is not None and not future.done():
                future.set_exception(EngineError(message.why))
        elif isinstance(message, Ended):
            self._down(message.why)
        elif isinstance(message, Failed):
            self._fail_start(message)
        elif not isinstance(message, Joined):
            self._receive(message)

    def _on_ready(self, ready: Ready) -> None:
        self._up, self.why = True, ""
        super()._on_ready(ready)
        if not self._first.done():
            self._first.set_result(ready)

    def _fail_start(self, failed: Failed) -> None:
        self.why = "it could not start, and the server's log has the reason"
        where = f" on {self.joined.machine}" if self.joined is not None else ""
        log.error("%s%s could not start: %s", self.name, where, failed.message)
        self.fail(start_error(self.name + where, failed))

    # ---- requests with blocks --------------------------------------------------------------------------------------

    def release(self, lent: Sequence[int]) -> None:
        if self._line is not None and self._up:
            self._line.send(Release(tuple(lent)))

    async def look_up(self, tokens: Sequence[int], salt: bytes, first: int) -> Parcel | None:  # type: ignore[override]
        question = LookUp(next(self._numbers), tuple(tokens), salt, first)
        answer: Found = await self._ask(question)  # type: ignore[arg-type]
        return answer.parcel

    async def collect(self, tokens: Sequence[int], salt: bytes, parcel: Parcel) -> Moved:
        question = Collect(next(self._numbers), tuple(tokens), salt, parcel)
        answer: Taken = await self._ask(question, parcel.offer.seconds + ANSWER_SECONDS)  # type: ignore[arg-type]
        return answer.moved

    async def take(self, request: Request, tokens: int, offer: Offer) -> Moved:
        request = replace(request, arrival=request.arrival - self._offset)
        question = Take(next(self._numbers), request, tokens, offer)
        answer: Taken = await self._ask(question, offer.seconds + ANSWER_SECONDS)  # type: ignore[arg-type]
        return answer.moved

    # ---- health ----------------------------------------------------------------------------------------------------

    @property
    def there(self) -> bool:
        """Whether the worker's process has joined, ready or not."""
        return self._line is not None

    @property
    def healthy(self) -> bool:
        return self._up and self.trouble() is None

    def trouble(self) -> str | None:
        if not self._up:
            return self.why
        now = time.monotonic()
        if not self._slept(now) and now - self._heard > self.silence.late:
            return f"no sign of life for {now - self._heard:.0f} s"
        return self._trouble

    def _slept(self, now: float) -> bool:
        """Whether this process itself did not run: what came meanwhile is still unread."""
        return now - self._looked > 4 * LOOK_SECONDS

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            now = time.monotonic()
            slept, before, self._looked = self._slept(now), self._looked, now
            if slept:
                self._heard = min(now, self._heard + now - before)
            elif self._line is not None and now - self._heard > self.silence.dead:
                log.error("%s gave no sign of life for %g s and is killed", self.name, self.silence.dead)
                self.kill()
                self._drop(f"it gave no sign of life for {self.silence.dead:g} s")


def start_error(who: str, failed: Failed) -> Exception:
    """The error in the words of the engine, with the name of the worker."""
    if failed.kind == "MemoryError":
        return errors.ConfigError(
            f"{who} ran out of memory while it started: lower kv_memory or kv_blocks, take quantize=int8 or int4, or "
            "use fewer workers on each machine."
        )
    kind = getattr(errors, failed.kind, EngineError)
    return kind(f"{who}: {failed.message}")
