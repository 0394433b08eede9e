"""The engine's async face: submit prompts, iterate over pieces of answers. The core runs in a process of its own.

Requests are made by the same `Intake` and answers by the same `Answer` as in process; only the way between differs.
Every sample gets exactly one last piece: from the engine, from a stop string found here, or, when the engine dies, an
error. Closing a stream (a client that went away) ends what is left of it within a step.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from twostroke.engine.answer import Answer, StreamEvent
from twostroke.engine.intake import Intake, open_tokenizer
from twostroke.errors import ConfigError, TwostrokeError
from twostroke.grammar.check import GrammarChecker
from twostroke.grammar.compile import Words
from twostroke.metrics.counts import Counts
from twostroke.metrics.steplog import Step
from twostroke.remote import wire
from twostroke.remote.admission import Admission, BusyError
from twostroke.remote.ended import Arrivals
from twostroke.remote.observer import Nobody, Observer
from twostroke.remote.process import EngineError, Patience, Supervisor
from twostroke.sampling import SamplingParams
from twostroke.text.tokenizer import Tokenizer
from twostroke.types import Event, FinishReason, Request, TokenLogprobs
from twostroke.weights.checkpoint import open_checkpoint
from twostroke.weights.describe import checkpoint_bytes, load_arch

MAX_UNREAD = 8192  # tokens that may wait for a reader before its stream is ended
ENGINE_GONE = "the engine stopped while it wrote this answer"
MAX_GRAMMARS = 16  # that may wait to be tried
ANSWER_SECONDS = 10.0  # for a question between two steps
SLOW_READER = "the reader was too slow: the answer was ended"


class Piece(NamedTuple):
    """News of one answer of a stream: prompt number × n + sample."""

    choice: int
    event: StreamEvent


class Live(NamedTuple):
    """A request that the engine has not ended yet."""

    stream: Stream
    choice: int
    answer: Answer
    cost: int


class Stream:
    """The answers to one call as they come. `take` gives all pieces that wait, iteration one at a time. Where there is
    a `listener`, it is told of pieces that are only text (choice, text) on the spot while a task waits in `take`, so
    that the task need not be woken; it says whether it could take them."""

    def __init__(self, engine: AsyncEngine, prompts: Sequence[list[int]], params: SamplingParams):
        self.engine = engine
        self.prompts = prompts
        self.params = params
        self.arrival = 0.0
        self.salt = b""
        self.answers: list[Answer] = []
        self.prompt_logprobs: list[dict[int, TokenLogprobs]] = [{} for _ in prompts]
        self.open = 0  # answers without a last piece
        self.listener: Callable[[int, str], bool] | None = None
        self._pieces: deque[Piece] = deque()
        self._unread = 0
        self._given_up = False
        self._waiter: asyncio.Future[None] | None = None

    async def take(self) -> list[Piece]:
        """Everything that has come since the last call, waiting for something; empty when all answers have ended."""
        while not self._pieces:
            if not self.open:
                return []
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        pieces = list(self._pieces)
        self._pieces.clear()
        self._unread = 0
        return pieces

    async def __aiter__(self) -> AsyncIterator[Piece]:
        try:
            while pieces := await self.take():
                for piece in pieces:
                    yield piece
        finally:
            self.close()

    def tell(self, choice: int, text: str) -> bool:
        """Text to the listener, if one listens and nothing waits to be taken before."""
        waiter = self._waiter
        if self.listener is None or waiter is None or self._pieces or waiter.done():
            return False
        try:
            return self.listener(choice, text)
        except Exception as error:
            waiter.set_exception(error)  # the task's business, not the engine's
            return True

    def put(self, choice: int, event: StreamEvent) -> None:
        self._pieces.append(Piece(choice, event))
        self._unread += len(event.token_ids)
        if event.finish_reason is not None:
            self.open -= 1
        self.engine.touched[self] = None
        if self._unread > MAX_UNREAD and self.open and not self._given_up:
            self._given_up = True  # what waits is kept, and is bounded; the rest is ended
            self.engine.end(self, SLOW_READER)

    def wake(self) -> None:
        """Something has come for whoever waits, if anybody does."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def close(self) -> None:
        """End whatever has not ended. Safe to call at any time, any number of times."""
        unfinished = [answer.request.id for answer in self.answers if not answer.finished]
        self.engine.abort(unfinished)


class AsyncEngine:
    """A model behind a process boundary. Everything here runs on one event loop."""

    def __init__(
        self,
        path: Path,
        settings: dict[str, Any],
        *,
        max_queue: int | None = None,
        observer: Observer | None = None,
        patience: Patience | None = None,
    ):
        self.checkpoint = open_checkpoint(path)
        self.arch = load_arch(self.checkpoint)
        self.weight_bytes = checkpoint_bytes(self.checkpoint)
        self.tokenizer: Tokenizer  # both are made while the engine process starts
        self.grammars: GrammarChecker
        self._opening: Future[None]
        self.clock = time.monotonic
        self.max_queue = max_queue
        self.queue_reason = "given at the start"
        self.observer: Observer = observer or Nobody()
        self.supervisor = Supervisor(path, settings, self, patience)
        self.counts = Counts()
        self.step_seconds = 0.0
        self.stage = wire.Stage("start", 0, 0)
        self.intake: Intake
        self.admission: Admission
        self.arrivals = Arrivals()
        self.changed: dict[str, Any] = {}  # settings that were changed since the start
        self._questions = itertools.count()
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._live: dict[int, Live] = {}
        self.touched: dict[Stream, None] = {}  # that were given pieces and have not been woken
        self._orders: list[tuple[Request, int]] = []
        self._aborts: list[int] = []
        self._flushing = False
        self._grammars = 0  # being tried, or waiting for it
        self._checker = ThreadPoolExecutor(1, thread_name_prefix="grammar")

    async def start(self, grammars: bool = False) -> wire.Ready:
        """Start the engine process, and read the tokenizer meanwhile. grammars: start the process that tries them too,
        so that the first caller who has one need not wait for it."""
        self._opening = self._checker.submit(self._open)
        starting = asyncio.ensure_future(self.supervisor.start())
        try:
            await asyncio.wrap_future(self._opening)
            if grammars:
                self._checker.submit(self.grammars.warm)
        except BaseException:
            starting.cancel()
            raise
        return await starting

    def _open(self) -> None:
        self.tokenizer = open_tokenizer(self.checkpoint)
        self.grammars = GrammarChecker(Words(self.tokenizer, self.arch.vocab).as_message)
        if self.tokenizer.chat is not None:
            with contextlib.suppress(TwostrokeError):  # compiles it; one that is broken is refused when it is used
                self.tokenizer.chat.render([{"role": "user", "content": "Hello"}])

    async def stop(self, seconds: float = 2.0) -> None:
        await self.supervisor.stop(seconds)
        self._fail_all()
        self._checker.shutdown(wait=False, cancel_futures=True)

    @property
    def in_flight(self) -> int:
        return len(self._live)

    async def prepare(self, params: SamplingParams) -> None:
        """Check what depends on the model. A grammar is tried in a thread; only so many may wait for that."""
        if params.grammar is None:
            self.intake.prepare(params)
            return
        if self._grammars >= MAX_GRAMMARS:
            raise BusyError(1)
        self._grammars += 1
        try:
            await asyncio.get_running_loop().run_in_executor(self._checker, self.intake.prepare, params)
        finally:
            self._grammars -= 1

    # ---- callers ---------------------------------------------------------------------------------------------------

    def submit(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        salt: bytes = b"",
        arrival: float | None = None,
        visible: frozenset[int] = frozenset(),
    ) -> Stream:
        """Take prompts (checked by `intake.tokenize`) and params (by `prepare`) in. visible: special tokens whose text
        is wanted. InputError, BusyError or EngineError, and nothing is held."""
        if not self.supervisor.healthy:
            raise EngineError(self.supervisor.trouble() or "it is not ready")
        moment = self.clock() if arrival is None else arrival
        groups = [self.intake.make(tokens, params, moment, salt) for tokens in prompts]
        costs = [self.admission.cost(group[0].limit) for group in groups]
        count = sum(len(group) for group in groups)
        self.admission.take(count, sum(cost * len(group) for cost, group in zip(costs, groups, strict=True)))
        stream = Stream(self, prompts, params)
        stream.arrival, stream.open, stream.salt = moment, count, salt
        for group, cost in zip(groups, costs, strict=True):
            for request in group:
                answer = Answer(request, self.tokenizer, visible)
                self._live[request.id] = Live(stream, len(stream.answers), answer, cost)
                stream.answers.append(answer)
            self._orders.append((group[0], len(group)))
        self._flush_soon()
        return stream

    def abort(self, numbers: list[int]) -> None:
        known = [number for number in numbers if number in self._live]
        if known:
            self._aborts += known
            self._flush_soon()

    def end(self, stream: Stream, error: str) -> None:
        """Fail what is left of a stream; the engine hears of it as of any abort."""
        stream.close()
        for answer in stream.answers:
            live = self._live.get(answer.request.id)
            if live is not None:
                self._fail(live, error)
        self._wake()

    # ---- questions -------------------------------------------------------------------------------------------------

    async def change(self, wanted: dict[str, Any]) -> None:
        """Take settings while running. ConfigError: nothing was changed. EngineError: nobody is there to take them."""
        answer: wire.Changed = await self._ask(wire.Change(next(self._questions), wanted))
        if answer.settings is None:
            raise ConfigError(answer.error)
        self.changed |= wanted

    async def steps(self, since: int, limit: int) -> tuple[Step, ...]:
        """The newest `limit` steps after number `since`, oldest first."""
        answer: wire.Steps = await self._ask(wire.Recall(next(self._questions), since, limit))
        return answer.steps

    async def _ask(self, question: wire.Change | wire.Recall) -> Any:
        future = self._asked[question.question] = asyncio.get_running_loop().create_future()
        try:
            self.supervisor.send(question)
            async with asyncio.timeout(ANSWER_SECONDS):
                return await future
        except TimeoutError:
            raise EngineError(f"it did not answer within {ANSWER_SECONDS:g} s") from None
        finally:
            del self._asked[question.question]

    def on_answer(self, answer: wire.Changed | wire.Steps) -> None:
        if isinstance(answer, wire.Changed) and answer.settings is not None:
            self.intake.settings = answer.settings
            self.admission.adapt(answer.settings)
        future = self._asked.get(answer.question)
        if future is not None and not future.done():
            future.set_result(answer)

    # ---- orders ----------------------------------------------------------------------------------------------------

    def _flush_soon(self) -> None:
        """What callers want within one turn of the loop goes to the engine in one message."""
        if not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        orders = wire.Orders(tuple(self._orders), tuple(self._aborts))
        self._orders, self._aborts = [], []
        try:
            self.supervisor.send(orders)
        except EngineError:
            self._fail_all()

    # ---- the engine process ----------------------------------------------------------------------------------------

    def on_stage(self, stage: wire.Stage) -> None:
        self.stage = stage

    def on_ready(self, ready: wire.Ready) -> None:
        settings = ready.settings
        if self.max_queue is None:
            self.max_queue = 4 * settings.max_requests
            self.queue_reason = "four times max_requests at the start"
        if self.supervisor.restarts == 0:
            self._opening.result()  # done about as soon: the process reads the same vocabulary, and the weights
            self.intake = Intake(self.tokenizer, settings, self.arch.vocab, self.grammars)
        self.intake.settings = settings  # ids go on from where they were
        self.admission = Admission(settings, self.max_queue, self.clock)
        self.counts = Counts(blocks_total=settings.kv_blocks, blocks_free=settings.kv_blocks)
        if self.changed:  # a new process starts as the first one did
            self.supervisor.send(wire.Change(next(self._questions), self.changed))

    def on_report(self, report: wire.Report) -> None:
        self.counts, self.step_seconds = report.counts, report.step_seconds
        self.observer.reported(report.counts, report.step_seconds)
        self._deliver_tokens(report.tokens, report.at)
        for news in report.news:
            self._deliver(news, report.at)
        self._wake()

    def _wake(self) -> None:
        """One word to each stream, however many of its answers there is news of."""
        touched, self.touched = self.touched, {}
        for stream in touched:
            stream.wake()

    def _deliver_tokens(self, tokens: Sequence[tuple[int, int]], at: float) -> None:
        """`_deliver` of one token and nothing else each, which nearly all news are."""
        gaps = []
        for number, token in tokens:
            live = self._live.get(number)
            if live is None:
                continue
            stream, choice, answer, _ = live
            if not answer.plain:
                self._deliver(Event(number, (token,)), at)
                continue
            gaps.append(at - answer.sample.timeline.token_times[-1])
            text = answer.push_token(token, at)
            if not stream.tell(choice, text):
                stream.put(choice, StreamEvent(text, (token,), None, answer.request.sample))
        if gaps:
            self.observer.gaps(gaps)

    def _deliver(self, news: Event, at: float) -> None:
        live = self._live.get(news.request_id)
        if live is None:
            return  # the engine died before it could hear of the end of this one
        answer = live.answer
        was_finished = answer.finished
        if not was_finished:
            self._push(live, news, at)
        if news.finish_reason is not None:
            del self._live[news.request_id]
            self.admission.release(live.cost)
        elif answer.finished and not was_finished:
            self.abort([news.request_id])  # a stop string ended it

    def _push(self, live: Live, news: Event, at: float) -> None:
        stream, answer = live.stream, live.answer
        if news.prompt_logprobs:
            stream.prompt_logprobs[live.choice // stream.params.n].update(news.prompt_logprobs)
        piece = answer.push(news, at)
        timeline = answer.sample.timeline
        if piece.token_ids:
            self.observer.tokens(timeline, len(piece.token_ids))
        if answer.finished:
            self.observer.ended(timeline, piece.finish_reason or "")
            self.arrivals.add(answer.request, timeline, stream.salt, piece.finish_reason or "")
        if piece.is_text and stream.tell(live.choice, piece.text):
            return
        if piece.text or piece.token_ids or answer.finished:
            stream.put(live.choice, piece)

    def on_lost(self, why: str) -> None:
        """The engine is gone: everybody who still waits gets an error as the last piece."""
        self.observer.lost()
        self._fail_all()
        for future in self._asked.values():
            if not future.done():
                future.set_exception(EngineError(why))

    def _fail_all(self) -> None:
        lives = list(self._live.values())
        self._live.clear()
        self._orders, self._aborts = [], []
        for live in lives:
            self.admission.release(live.cost)
            self._fail(live, ENGINE_GONE)
        self._wake()

    def _fail(self, live: Live, error: str) -> None:
        if not live.answer.finished:
            failure = Event(live.answer.request.id, (), FinishReason.ERROR, error=error)
            self._push(live, failure, self.clock())
