"""Where the engine runs: takes messages between steps, runs the core, reports each step.

It waits for messages while it has nothing to do, and reads them between two steps while it has. A `Port` carries them:
a socket in the engine process (child_main.py), a queue on a thread (thread.py).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import msgspec

from twostroke.config import make_config
from twostroke.engine.build import Engine, build_engine
from twostroke.engine.device import device_name
from twostroke.engine.settings import change
from twostroke.errors import ConfigError, TwostrokeError
from twostroke.grammar.compile import GrammarCompiler
from twostroke.grammar.queue import GrammarQueue
from twostroke.metrics.timeline import Facts
from twostroke.remote.blocks import BlockExchange
from twostroke.remote.direct import open_direct
from twostroke.remote.messages import (
    Arrive,
    Arrived,
    BlocksStored,
    Change,
    Changed,
    Direct,
    Expect,
    Expected,
    Export,
    FromEngine,
    Hello,
    LookUp,
    Opened,
    Orders,
    Ready,
    Recall,
    Report,
    Stage,
    Steps,
    Store,
    TakeBack,
    ToEngine,
)
from twostroke.sampling import SamplingParams
from twostroke.schedule.scheduler import Counters
from twostroke.types import Event, FinishReason, Request

clock = time.monotonic  # the engine's own: a front end may have another (client.py)
WARM_UP_TOKENS = 48
GREEDY = SamplingParams(temperature=0, max_tokens=2)
SCORED = SamplingParams(temperature=0, max_tokens=2, logprobs=1)  # on a GPU, the host chooses such tokens
PROGRESS_SECONDS = 0.1  # between two reports of how much is loaded


class ClosedError(Exception):
    """The front end is gone, or wants the engine to end."""


class Port(Protocol):
    """The engine's end of a connection. `send` and `wake` may be called on any thread."""

    def send(self, message: FromEngine) -> None:
        """ClosedError when no front end is there any more."""

    def receive(self, wait: bool) -> Sequence[ToEngine]:
        """What has arrived; with `wait`, not before something has or `wake` is called. ClosedError as above."""

    def wake(self) -> None:
        """End a wait in `receive`."""


class EngineLoop:
    def __init__(self, port: Port, engine: Engine, direct: Direct | None = None):
        """ConfigError: other engines cannot read its blocks, and must."""
        self.port = port
        self.core = engine.core
        self.core.scheduler.together.coming = self._coming
        self.inbox: list[ToEngine] = []  # messages that came while a step ran
        self.settings = engine.settings
        self.grammars = GrammarQueue(compiler_of(engine), port.wake)
        self.blocks = BlockExchange(engine.core, open_direct(engine.core, direct, port.wake))
        self.expected: dict[int, Expect] = {}  # requests that come with blocks and wait for their grammar, by id
        self.steps = 0  # begun
        self.working = False  # the last of them has not ended
        self.step_seconds = 0.0
        self.empty_steps = 0  # in a row: steps in which nothing could be planned

    @property
    def _stalled(self) -> bool:
        """Nothing can be planned before blocks arrive from elsewhere. Two empty steps in a row show it: the first may
        have preempted a request, which the second could admit again."""
        return self.empty_steps > 1 and (bool(self.core.scheduler.fetching) or self.blocks.reading)

    def run(self) -> None:
        """Run the engine until ClosedError."""
        try:
            while True:
                self._turn()
        finally:
            self.blocks.close()

    def _turn(self) -> None:
        events: list[Event] = []
        for message in self._received():
            self.empty_steps = 0
            events += self._take(message)
        for request, error in self.grammars.take():
            events += self._join(request, error)
        for reply in self.blocks.finish():
            self.empty_steps = 0
            self.port.send(reply)
        if not self.core.idle:
            events += self._step()
        self._report(events)
        for part in self.blocks.parts():  # after the report: no token waits for it
            self.port.send(part)

    def _received(self) -> list[ToEngine]:
        messages, self.inbox = self.inbox, []
        wait = not messages and (self.core.idle or self._stalled)
        return [*messages, *self.port.receive(wait)]

    def _coming(self) -> int:
        """How many requests have arrived while the step ran that ends now."""
        self.inbox += self.port.receive(wait=False)
        return sum(len(message.runs) for message in self.inbox if isinstance(message, Orders))

    def _take(self, message: ToEngine) -> list[Event]:
        if isinstance(message, Orders):
            return self._obey(message)
        if isinstance(message, Change):
            self.port.send(self._change(message))
        elif isinstance(message, Recall):
            assert self.core.steplog is not None
            self.port.send(Steps(message.question, tuple(self.core.steplog.after(message.since, message.limit))))
        elif isinstance(message, Export):
            self.port.send(self.blocks.export(message))
        elif isinstance(message, TakeBack):
            self.blocks.take_back(message.lent)
        elif isinstance(message, Opened):
            self.blocks.opened(message.path)
        elif isinstance(message, LookUp):
            self.port.send(self.blocks.look_up(message))
        elif isinstance(message, Store):
            self._reply(self.blocks.store(message))
        elif isinstance(message, Arrive):
            self._reply(self.blocks.arrive(message))
        elif isinstance(message, Expect):
            self._expect(message)
        return []

    def _reply(self, reply: BlocksStored | Arrived | None) -> None:
        if reply is not None:
            self.port.send(reply)

    def _expect(self, message: Expect) -> None:
        if message.request.params.grammar is None:
            self.port.send(self.blocks.expect(message))
        else:
            self.expected[message.request.id] = message
            self.grammars.add([message.request])

    def _change(self, wanted: Change) -> Changed:
        try:
            self.settings = change(self.core.scheduler, self.settings, wanted.wanted)
        except ConfigError as error:
            return Changed(wanted.question, None, str(error))
        return Changed(wanted.question, self.settings, "")

    def _obey(self, orders: Orders) -> list[Event]:
        for first, count in orders.runs:
            siblings = first.siblings(count)
            if first.params.grammar is not None:
                self.grammars.add(siblings)
                continue
            for request in siblings:
                self.blocks.follow(self.core.submit(request))
        return [event for event in map(self._abort, orders.aborts) if event is not None]

    def _join(self, request: Request, error: str | None) -> list[Event]:
        """The grammar of a request is ready, or does not compile."""
        self.empty_steps = 0
        expected = self.expected.pop(request.id, None)
        if error is None:
            if expected is None:
                self.blocks.follow(self.core.submit(request))
            else:
                self.port.send(self.blocks.expect(expected))
            return []
        if expected is not None:
            self.port.send(Expected(expected.question, ()))
        return [Event(request.id, (), FinishReason.ERROR, error=error, facts=never_scheduled())]

    def _abort(self, request_id: int) -> Event | None:
        if self.grammars.drop(request_id) is None:
            event = self.core.abort(request_id)
            self.blocks.drop(request_id)
            return event
        expected = self.expected.pop(request_id, None)
        if expected is not None:
            self.port.send(Expected(expected.question, ()))
        return Event(request_id, (), FinishReason.ABORT, facts=never_scheduled())

    def _step(self) -> list[Event]:
        began = clock()
        self.steps += 1
        self.working = True
        before = self.core.scheduler.counters.steps
        events = self.core.step()
        moved = events or self.core.in_flight or self.core.scheduler.counters.steps != before
        self.empty_steps = 0 if moved else self.empty_steps + 1
        self.working = False
        self.step_seconds += clock() - began
        return events

    def _report(self, events: list[Event]) -> None:
        at = self.core.collected or clock()
        self.port.send(Report(at, tuple(events), self.core.counts(), self.step_seconds))


def never_scheduled() -> Facts:
    """The facts of a request that ends now without having run."""
    return Facts(None, clock(), 0, 0, 0, 0, 0, 0)


def compiler_of(engine: Engine) -> GrammarCompiler:
    compiler = engine.intake.grammars
    assert isinstance(compiler, GrammarCompiler), "the engine that has the model compiles its grammars itself"
    return compiler


def start(port: Port, hello: Hello) -> tuple[Engine, Ready]:
    """Build and warm up, reporting the stages. `announce` the Ready once the engine can take orders."""
    times: list[tuple[str, float]] = []
    last = 0.0

    def stage(name: str) -> None:
        times.append((name, clock()))
        port.send(Stage(name))

    def loaded(done: int, total: int) -> None:
        nonlocal last
        if clock() - last > PROGRESS_SECONDS or done == total:
            last = clock()
            port.send(Stage("load", done, total))

    config = make_config(**hello.settings)
    engine = build_engine(
        hello.model, config, clock, load_progress=loaded, stage=stage, block_key=hello.block_key, mixed=hello.mixed,
        ahead=True,
    )  # fmt: skip
    stage("warm up")
    count, first = warm_up(engine)
    longest = first * max(1.0, engine.settings.max_batch_tokens / count)
    stage("grammars")
    compiler_of(engine).warm()
    times.append(("", clock()))
    seconds = {name: after - began for (name, began), (_, after) in pairwise(times)}
    machine = device_name(engine.settings.device)
    names = engine.core.scheduler.tables.hasher.root(b"")
    ready = Ready(engine.settings, seconds, longest, (count, first), machine, clock(), names, mixed=hello.mixed)
    return engine, ready


def announce(port: Port, ready: Ready, running: EngineLoop) -> None:
    port.send(msgspec.structs.replace(ready, clock=clock(), direct=running.blocks.direct is not None))


def warm_up(engine: Engine) -> tuple[int, float]:
    """Run prompts and two tokens each, so that the first caller does not pay for what only a first run costs. Returns
    the length of the prompt and the seconds it took. Leaves no trace in the cache, the counters or the log of steps."""
    scheduler = engine.core.scheduler
    count = max(1, min(WARM_UP_TOKENS, engine.settings.max_model_len - 3))
    rehearse(engine, 1, SCORED)
    rehearse(engine, count)
    scheduler.pace = scheduler.pace.anew()  # a first run is slower than later ones
    first = rehearse(engine, count)
    scheduler.counters = Counters()
    assert engine.core.steplog is not None
    engine.core.steplog.clear()
    return count, first


def rehearse(engine: Engine, count: int, params: SamplingParams = GREEDY) -> float:
    """One made-up request from start to end; the seconds of its prompt."""
    tokens = tuple(number % engine.arch.vocab for number in range(count))
    state = engine.core.submit(Request(-1, tokens, params, 0, clock(), count + 2, salt=b"warm up"))
    errors: list[str] = []
    while not engine.core.idle:
        errors += [event.error for event in engine.core.step() if event.error is not None]
    if state.finish_reason is not FinishReason.LENGTH:
        raise TwostrokeError(f"the warm-up failed: {'; '.join(errors)}.")
    engine.core.scheduler.tables.pool.clear()
    return state.timeline.prefill
