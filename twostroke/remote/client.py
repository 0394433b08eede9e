"""An engine somewhere else: what a front end can ask of it, and the part that every implementation shares. Torch-free.

`EngineClient` is the protocol. `ProcessEngine` (process.py) runs the engine in a child process, `ThreadEngine`
(thread.py) on a thread of this process. Both send and receive the same messages, so both extend `MessageClient`, which
collects orders, matches answers to questions and converts times.

**Ids.** `Intake` gives every request an id that no other front end gives out (engine/intake.py). Clients and engines
match ids exactly and give them no other meaning.

**Clocks.** Each side reads its own monotonic clock; the front end's may differ from the engine's by any amount. The two
agree on one offset when the engine says Ready: an engine whose reading lies between our Hello and the arrival of its
Ready has the same clock as far as we can tell, and the offset is 0 (always so in a child process). Otherwise the offset
is the arrival of Ready less its reading: the clocks' difference, plus the short time that Ready was on its way. It
stays the same until the engine starts again, so that differences of times are exact. Everything that leaves the client
is on the front end's clock, everything on the wire on the engine's.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from twostroke.config import Resolved
from twostroke.errors import ConfigError
from twostroke.kv.addresses import Name
from twostroke.metrics.steplog import Step
from twostroke.record import replace
from twostroke.remote.messages import (
    Arrive,
    Arrived,
    BlockData,
    BlockPayload,
    BlocksStored,
    Change,
    Changed,
    Direct,
    EngineQuestion,
    Expect,
    Expected,
    Export,
    Exported,
    Found,
    FromEngine,
    Hello,
    LookUp,
    Message,
    Opened,
    Orders,
    Part,
    Ready,
    Recall,
    Reply,
    Report,
    Stage,
    Steps,
    Store,
    TakeBack,
    runs_of,
)
from twostroke.types import Event, Request

ANSWER_SECONDS = 10.0  # for a question between two steps
clock = time.monotonic


class EngineError(Exception):
    """The engine cannot serve: not started, dead, or restarting."""


class EngineListener(Protocol):
    """Receives what the engine reports. All calls come on the event loop."""

    def on_stage(self, stage: Stage) -> None: ...

    def on_ready(self, ready: Ready) -> None: ...

    def on_report(self, report: Report) -> None: ...

    def on_settings(self, settings: Resolved) -> None: ...

    def on_lost(self, why: str) -> None: ...


class EngineClient(Protocol):
    """An engine that runs elsewhere. All calls are made on one event loop; events arrive at the listener there."""

    settings: dict[str, Any]  # given at the start

    @property
    def changed(self) -> dict[str, Any]:
        """Settings that were changed since."""

    @property
    def ready(self) -> Ready | None:
        """What the engine said when it was last ready."""

    @property
    def restarts(self) -> int: ...

    async def start(self, listener: EngineListener) -> Ready:
        """Start the engine, and wait until it is ready. What keeps it from starting is raised in its own words."""

    async def stop(self, seconds: float) -> None:
        """End the engine, by force after so many seconds."""

    def submit(self, requests: Sequence[Request]) -> None: ...

    def abort(self, request_ids: Sequence[int]) -> None: ...

    async def change(self, wanted: dict[str, Any]) -> None:
        """Use these settings from the next plan on. ConfigError: nothing was changed. EngineError: no answer."""

    async def steps(self, since: int, limit: int) -> tuple[Step, ...]:
        """The newest `limit` steps after number `since`, oldest first."""

    @property
    def healthy(self) -> bool: ...

    def trouble(self) -> str | None:
        """What is wrong with the engine now, if anything is."""


class BlockClient(EngineClient, Protocol):
    """An engine that gives KV blocks to other engines and takes theirs. EngineError: it is gone, or did not answer."""

    on_part: Callable[[Part], None]  # blocks of requests with `lend`, to be `opened` or taken back

    async def look_up(self, tokens: Sequence[int], salt: bytes, first: int) -> Found:
        """Cached blocks of the beginning of a prompt, from token `first` on: `opened` or `take_back` what is found."""

    def opened(self, path: str) -> None:
        """A segment of the engine was opened, or cannot be."""

    async def export(self, lent: int, wanted: Sequence[Name], path: str) -> Exported:
        """Write blocks that the request `lent` has left (`Request.lend`) to the segment at `path`; without one, say
        where they lie."""

    def take_back(self, lent: Sequence[int]) -> None:
        """What these requests have left, or what was located, is not needed any more."""

    async def store(
        self, tokens: Sequence[int], salt: bytes, names: Sequence[Name], payload: BlockData
    ) -> BlocksStored:
        """Put the blocks that end the beginning of a prompt into the cache."""

    async def expect(self, request: Request, tokens: int) -> tuple[Name, ...] | None:
        """Run a request whose first `tokens` tokens another engine has computed: the blocks that it waits for, until
        `arrive` is called. None: there is no room for it now, and it was not taken."""

    async def arrive(self, request_id: int, payload: BlockData | None) -> Arrived:
        """The request's blocks have arrived. None: they will not come."""


class MessageClient:
    """The part of an `EngineClient` that does not depend on how messages travel."""

    def __init__(
        self,
        model: Path,
        settings: dict[str, Any],
        block_key: bytes | None = None,
        direct: Direct | None = None,
        mixed: tuple[str, ...] = (),
    ):
        """block_key: shared by engines that are to agree on the names of KV blocks (kv/addresses.py). direct: how
        other engines read its blocks. mixed: how these engines compute K and V, where they differ."""
        self.model = model
        self.settings = settings
        self.block_key = block_key
        self.direct = direct
        self.mixed = mixed
        self.changed: dict[str, Any] = {}
        self.ready: Ready | None = None
        self.restarts = 0
        self.listener: EngineListener
        self.on_part: Callable[[Part], None] = self._ignore
        self._said_hello = 0.0  # when
        self._offset = 0.0  # the front end's clock less the engine's
        self._requests: list[Request] = []  # to be sent, as are the aborts
        self._aborts: list[int] = []
        self._flushing = False
        self._numbers = itertools.count()
        self._questions: dict[int, asyncio.Future[Any]] = {}

    def _hello(self) -> Hello:
        settings = self.settings
        if self.ready is not None:  # as before the restart: seeds of requests are made from it
            settings = settings | {"seed": self.ready.settings.seed}
        self._said_hello = clock()
        level = logging.getLogger("twostroke").getEffectiveLevel()
        return Hello(str(self.model), settings, level, self.block_key, self.direct, self.mixed)

    def _send(self, message: Message) -> None:
        """Give a message to the engine; EngineError when it is not there."""
        raise NotImplementedError

    # ---- orders ----------------------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[Request]) -> None:
        self._requests += requests
        self._flush_soon()

    def abort(self, request_ids: Sequence[int]) -> None:
        self._aborts += request_ids
        self._flush_soon()

    def _flush_soon(self) -> None:
        """Orders of one turn of the event loop travel in one message."""
        if not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        requests, aborts, self._requests, self._aborts = self._requests, self._aborts, [], []
        if self._offset:
            requests = [replace(request, arrival=request.arrival - self._offset) for request in requests]
        if requests or aborts:
            with contextlib.suppress(EngineError):  # it is gone, and the listener knows
                self._send(Orders(runs_of(requests), tuple(aborts)))

    # ---- questions -------------------------------------------------------------------------------------------------

    async def change(self, wanted: dict[str, Any]) -> None:
        answer: Changed = await self._ask(Change(next(self._numbers), wanted))
        if answer.settings is None:
            raise ConfigError(answer.error)
        self.changed |= {name: value for name, value in wanted.items() if value is not None}

    async def steps(self, since: int, limit: int) -> tuple[Step, ...]:
        answer: Steps = await self._ask(Recall(next(self._numbers), since, limit))
        return answer.steps

    # ---- KV blocks -------------------------------------------------------------------------------------------------

    async def export(self, lent: int, wanted: Sequence[Name], path: str) -> Exported:
        answer: Exported = await self._ask(Export(next(self._numbers), lent, tuple(wanted), path))
        return answer

    def take_back(self, lent: Sequence[int]) -> None:
        with contextlib.suppress(EngineError):  # it is gone, and with it what was lent
            self._send(TakeBack(tuple(lent)))

    def _ignore(self, part: Part) -> None:
        self.give_up(part.payload)

    async def look_up(self, tokens: Sequence[int], salt: bytes, first: int) -> Found:
        answer: Found = await self._ask(LookUp(next(self._numbers), tuple(tokens), salt, first))
        return answer

    def give_up(self, payload: BlockData | None) -> None:
        """Blocks that the engine gave are not wanted."""
        if isinstance(payload, BlockPayload):
            self.opened(payload.path)
        elif payload is not None:
            self.take_back([payload.held])

    def opened(self, path: str) -> None:
        with contextlib.suppress(EngineError):  # it is gone, and the segment with it
            self._send(Opened(path))

    async def store(
        self, tokens: Sequence[int], salt: bytes, names: Sequence[Name], payload: BlockData
    ) -> BlocksStored:
        question = Store(next(self._numbers), tuple(tokens), salt, tuple(names), payload)
        answer: BlocksStored = await self._ask(question)
        return answer

    async def expect(self, request: Request, tokens: int) -> tuple[Name, ...] | None:
        request = replace(request, arrival=request.arrival - self._offset)
        answer: Expected = await self._ask(Expect(next(self._numbers), request, tokens))
        return answer.wanted

    async def arrive(self, request_id: int, payload: BlockData | None) -> Arrived:
        answer: Arrived = await self._ask(Arrive(next(self._numbers), request_id, payload))
        return answer

    async def _ask(self, question: EngineQuestion, seconds: float | None = None) -> Any:
        limit = ANSWER_SECONDS if seconds is None else seconds
        future = self._questions[question.question] = asyncio.get_running_loop().create_future()
        try:
            self._send(question)
            async with asyncio.timeout(limit):
                return await future
        except asyncio.CancelledError:
            self._leave(future)
            raise
        except TimeoutError:
            self._leave(future)
            raise EngineError(f"it did not answer within {limit:g} s") from None
        finally:
            del self._questions[question.question]

    def _leave(self, future: asyncio.Future[Any]) -> None:
        """The caller leaves. An answer may have come in the same moment."""
        came = future.done() and not future.cancelled() and future.exception() is None
        if came and isinstance(future.result(), Found):
            self.give_up(future.result().payload)

    def _answer(self, answer: Reply) -> None:
        if self._waits_for(answer):
            self._questions[answer.question].set_result(answer)

    def _waits_for(self, answer: Reply) -> bool:
        """Whether the caller still waits: it may have been cancelled, or have waited long enough."""
        future = self._questions.get(answer.question)
        return future is not None and not future.done()

    # ---- what the engine says --------------------------------------------------------------------------------------

    def _receive(self, message: FromEngine) -> None:
        if isinstance(message, Report):
            self.listener.on_report(self._on_our_clock(message) if self._offset else message)
        elif isinstance(message, Stage):
            self.listener.on_stage(message)
        elif isinstance(message, Ready):
            self._on_ready(message)
        elif isinstance(message, Changed):
            if message.settings is not None:
                self.listener.on_settings(message.settings)
            self._answer(message)
        elif isinstance(message, Steps):
            steps = tuple(step._replace(launched=step.launched + self._offset) for step in message.steps)
            self._answer(msgspec.structs.replace(message, steps=steps) if self._offset else message)
        elif isinstance(message, Found) and message.payload is not None and not self._waits_for(message):
            self.give_up(message.payload)
        elif isinstance(message, Exported | Found | BlocksStored | Expected | Arrived):
            self._answer(message)
        elif isinstance(message, Part):
            self.on_part(message)

    def _on_ready(self, ready: Ready) -> None:
        now = clock()
        self._offset = 0.0 if self._said_hello <= ready.clock <= now else now - ready.clock
        self.ready = ready
        self.listener.on_ready(ready)
        if self.changed:  # the engine starts with the settings of the first start, and takes no order before these
            self._send(Change(next(self._numbers), self.changed))
            self.listener.on_settings(replace(ready.settings, **self.changed))

    def _on_our_clock(self, report: Report) -> Report:
        return msgspec.structs.replace(
            report, at=report.at + self._offset, events=tuple(map(self._event_on_our_clock, report.events))
        )

    def _event_on_our_clock(self, event: Event) -> Event:
        return event if event.facts is None else event._replace(facts=event.facts.shifted(self._offset))

    def _lose(self, why: str) -> None:
        """The engine is gone: orders that were not sent go with it, questions get no answer."""
        self._requests, self._aborts = [], []
        self.listener.on_lost(why)
        for future in self._questions.values():
            if not future.done():
                future.set_exception(EngineError(why))
