"""The engine's own process: takes orders between steps, runs the core, reports each step. See wire.py for the words.

It waits on the socket while there is nothing to do and looks at it once between steps while there is. It ends when the
socket does, and where the system can promise it (Linux), at once when its parent dies, whatever it is doing then.
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
from itertools import pairwise
from typing import Any

from twostroke.config import make_config
from twostroke.engine.build import Engine, build_engine, device_name
from twostroke.engine.settings import change
from twostroke.errors import ConfigError, TwostrokeError
from twostroke.grammar.compile import GrammarCompiler
from twostroke.grammar.queue import GrammarQueue
from twostroke.metrics.counts import Counts
from twostroke.metrics.timeline import Facts
from twostroke.remote import wire
from twostroke.remote.frames import Frames
from twostroke.sampling import SamplingParams
from twostroke.schedule.scheduler import Counters
from twostroke.types import Event, FinishReason, Request

log = logging.getLogger(__name__)
clock = time.monotonic  # one clock for both processes: arrivals are stamped in the parent
BEAT_SECONDS = 0.5
CHUNK = 1 << 18
WARM_UP_TOKENS = 48
PR_SET_PDEATHSIG = 1


class ClosedError(Exception):
    """The parent is gone, or wants this process gone."""


class Channel:
    """The child's end of the socket pair. Sends from several threads, receives in one."""

    def __init__(self, sock: socket.socket):
        self.sock = sock
        self.frames = Frames()
        self.lock = threading.Lock()
        self.bell, self._ringer = os.pipe()
        for end in (self.bell, self._ringer):
            os.set_blocking(end, False)
        self._poll = select.poll()
        for source in (sock.fileno(), self.bell):
            self._poll.register(source, select.POLLIN)

    def send(self, message: bytes) -> None:
        try:
            with self.lock:
                self.sock.sendall(message)
        except OSError:
            raise ClosedError from None

    def ring(self) -> None:
        """End a wait in `receive`, from another thread."""
        with contextlib.suppress(BlockingIOError):  # it has been rung often enough
            os.write(self._ringer, b"!")

    def receive(self, wait: bool) -> list[list[Any]]:
        """Whatever has arrived; with `wait`, not before something has or somebody rings."""
        messages: list[list[Any]] = []
        while heard := self._poll.poll(None if wait else 0):
            wait = False
            for source, _ in heard:
                if source == self.bell:
                    os.read(self.bell, CHUNK)
                else:
                    messages.extend(self.frames.feed(self._read()))
        return messages

    def _read(self) -> bytes:
        try:
            data = self.sock.recv(CHUNK)
        except OSError:
            data = b""
        if not data:
            raise ClosedError
        return data


class Worker:
    def __init__(self, channel: Channel, engine: Engine):
        self.channel = channel
        self.core = engine.core
        self.settings = engine.settings
        self.grammars = GrammarQueue(compiler_of(engine), channel.ring)
        self.steps = 0
        self.working = False
        self.step_seconds = 0.0

    def run(self) -> None:
        while True:
            events: list[Event] = []
            for message in self.channel.receive(wait=self.core.idle):
                events += self._hear(wire.read_from_parent(message))
            for request, error in self.grammars.take():
                events += self._join(request, error)
            if not self.core.idle:
                events += self._step()
            self._report(events)

    def _hear(self, message: wire.Orders | wire.Change | wire.Recall) -> list[Event]:
        if isinstance(message, wire.Orders):
            return self._obey(message)
        if isinstance(message, wire.Change):
            self.channel.send(wire.pack_changed(self._change(message)))
        else:
            assert self.core.steplog is not None
            steps = self.core.steplog.after(message.since, message.limit)
            self.channel.send(wire.pack_steps(wire.Steps(message.question, tuple(steps))))
        return []

    def _change(self, wanted: wire.Change) -> wire.Changed:
        try:
            self.settings = change(self.core.scheduler, self.settings, wanted.wanted)
        except ConfigError as error:
            return wire.Changed(wanted.question, None, str(error))
        return wire.Changed(wanted.question, self.settings, "")

    def _obey(self, orders: wire.Orders) -> list[Event]:
        for first, samples in orders.requests:
            siblings = first.siblings(samples)
            if first.params.grammar is not None:
                self.grammars.add(siblings)
                continue
            for request in siblings:
                self.core.submit(request)
        ended = map(self._abort, orders.aborts)
        return [event for event in ended if event is not None]

    def _join(self, request: Request, error: str | None) -> list[Event]:
        """Its grammar is ready, or never will be."""
        if error is None:
            self.core.submit(request)
            return []
        return [Event(request.id, (), FinishReason.ERROR, error=error, facts=never_scheduled())]

    def _abort(self, request_id: int) -> Event | None:
        if self.grammars.drop(request_id) is None:
            return self.core.abort(request_id)
        return Event(request_id, (), FinishReason.ABORT, facts=never_scheduled())

    def _step(self) -> list[Event]:
        began = clock()
        self.steps += 1
        self.working = True
        events = self.core.step()
        self.working = False
        self.step_seconds += clock() - began
        return events

    def _report(self, events: list[Event]) -> None:
        tokens, news = [], []
        for event in events:
            number, token_ids, reason, logprobs, prompt_logprobs, error, facts = event
            if len(token_ids) == 1 and not (reason or facts or logprobs or prompt_logprobs or error):
                tokens.append((number, token_ids[0]))
            else:
                news.append(event)
        at = self.core.collected or clock()
        report = wire.Report(at, tuple(tokens), tuple(news), self._counts(), self.step_seconds)
        self.channel.send(wire.pack_report(report))

    def _counts(self) -> Counts:
        scheduler = self.core.scheduler
        c, pool = scheduler.counters, scheduler.tables.pool
        host = pool.host
        kept = 0 if host is None else len(host.slot_of)
        moved = (0, 0) if host is None else (host.offloaded, host.restored)
        return Counts(
            c.steps, c.prompt_tokens, c.cached_tokens, c.computed_tokens, c.output_tokens, c.preemptions,
            c.recomputed_tokens, len(scheduler.running), len(scheduler.waiting), pool.total, len(pool.free),
            len(pool.cached), kept, kept * self.settings.layout.block_bytes, *moved,
        )  # fmt: skip


def never_scheduled() -> Facts:
    """Of a request that ends now without having run."""
    return Facts(None, clock(), 0, 0, 0, 0)


def compiler_of(engine: Engine) -> GrammarCompiler:
    compiler = engine.intake.grammars
    assert isinstance(compiler, GrammarCompiler), "this process has the model: it compiles its grammars itself"
    return compiler


def beat(channel: Channel, worker: Worker) -> None:
    """Says from a thread of its own that the process runs, so that one that is stopped can be told from a long step."""
    while True:
        time.sleep(BEAT_SECONDS)
        try:
            channel.send(wire.pack_beat(wire.Beat(worker.steps, worker.working)))
        except ClosedError:
            os._exit(0)  # the main thread may be deep in a step that nobody waits for any more


def start(channel: Channel, hello: wire.Hello) -> tuple[Engine, wire.Ready]:
    """Build and warm up, reporting the stages."""
    times: list[tuple[str, float]] = []
    last = 0.0

    def stage(name: str) -> None:
        times.append((name, clock()))
        channel.send(wire.pack_stage(wire.Stage(name, 0, 0)))

    def moved(done: int, total: int) -> None:
        nonlocal last
        if clock() - last > 0.1 or done == total:
            last = clock()
            channel.send(wire.pack_stage(wire.Stage("load", done, total)))

    engine = build_engine(hello.model, make_config(**hello.settings), clock, load_progress=moved, stage=stage)
    stage("warm up")
    longest = warm_up(engine)
    stage("grammars")
    compiler_of(engine).warm()
    times.append(("", clock()))
    seconds = {name: after - began for (name, began), (_, after) in pairwise(times)}
    return engine, wire.Ready(engine.settings, seconds, longest, device_name(engine.settings.device))


def warm_up(engine: Engine) -> float:
    """Run a prompt and two tokens so that the first caller does not pay for first times. The seconds that a step of
    the largest size may take. Leaves no trace in the cache, the counters or the log of steps."""
    scheduler = engine.core.scheduler
    count = max(1, min(WARM_UP_TOKENS, engine.settings.max_model_len - 3))
    rehearse(engine, count)
    scheduler.pace = scheduler.pace.anew()  # first times are no measure of later ones
    first = rehearse(engine, count)
    scheduler.counters = Counters()
    assert engine.core.steplog is not None
    engine.core.steplog.clear()
    return first * max(1.0, engine.settings.max_batch_tokens / count)


def rehearse(engine: Engine, count: int) -> float:
    """One made-up request from start to end; the seconds of its prompt."""
    tokens = [number % engine.arch.vocab for number in range(count)]
    params = SamplingParams(temperature=0, max_tokens=2)
    state = engine.core.submit(Request(-1, tuple(tokens), params, 0, clock(), count + 2, salt=b"warm up"))
    while not engine.core.idle:
        engine.core.step()
    if state.finish_reason is not FinishReason.LENGTH:
        raise TwostrokeError("the warm-up failed: the log above has the trace.")
    engine.core.scheduler.tables.pool.clear()
    return state.timeline.prefill


def follow_parent() -> None:
    """Die with the parent even when stuck, where the system can promise it; signals for the group are its business."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def first(channel: Channel) -> list[Any]:
    """The first message. A single one, in however many pieces it comes."""
    messages: list[list[Any]] = []
    while not messages:
        messages = channel.receive(wait=True)
    return messages[0]


def main(descriptor: str, parent: str) -> None:
    follow_parent()
    if os.getppid() != int(parent):
        return  # it died before we could ask to be told
    channel = Channel(socket.socket(fileno=int(descriptor)))
    try:
        hello = wire.read_hello(first(channel))
        logging.basicConfig(level=hello.log_level, format="%(levelname)s engine: %(message)s")
        try:
            engine, ready = start(channel, hello)
        except (TwostrokeError, OSError, MemoryError) as error:
            channel.send(wire.pack_failed(wire.Failed(type(error).__name__, str(error))))
            return
        gc.collect()
        gc.freeze()  # the model stays: no later collection needs to look at it again
        worker = Worker(channel, engine)
        threading.Thread(target=beat, args=(channel, worker), daemon=True).start()
        channel.send(wire.pack_ready(ready))
        worker.run()
    except ClosedError:
        return
