"""The asynchronous front end of an engine: submit prompts, iterate over pieces of answers. Torch-free.

Requests are made by the same `Intake` and answers by the same `Answer` as in `LLM`; an `EngineClient` is between them.
Every sample gets exactly one last piece: from the engine, from a stop string found here, or, when the engine is lost,
an error. Closing a stream (a client that went away) ends what is left of it within a step.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from twostroke.config import Resolved
from twostroke.engine.answer import Answer
from twostroke.engine.intake import Intake, RequestIds, open_tokenizer
from twostroke.errors import TwostrokeError
from twostroke.grammar.check import GrammarChecker, NotCheckedError
from twostroke.metrics.counts import Counts
from twostroke.metrics.steplog import Step
from twostroke.remote.admission import Admission, BusyError
from twostroke.remote.client import EngineClient, EngineError
from twostroke.remote.ended import EndedRequests
from twostroke.remote.messages import Ready, Report, Stage
from twostroke.remote.observer import NoObserver, Observer
from twostroke.remote.process import Patience, ProcessEngine
from twostroke.remote.progress import Progress
from twostroke.remote.stream import Stream
from twostroke.remote.turns import FairTurns
from twostroke.sampling import SamplingParams
from twostroke.text.tokenizer import Tokenizer
from twostroke.types import Event, FinishReason
from twostroke.weights.checkpoint import open_checkpoint
from twostroke.weights.describe import checkpoint_bytes, load_arch
from twostroke.weights.fingerprint import fingerprint
from twostroke.weights.generation import sampling_defaults

ENGINE_GONE = "the engine stopped while it wrote this answer"
MAX_GRAMMARS = 16  # that may be tried or wait for it


class Recipient(NamedTuple):
    """Where the events of a request go until the engine has ended it."""

    stream: Stream
    choice: int
    answer: Answer
    cost: int
    key: int  # of the caller


class AsyncEngine:
    """A model behind an `EngineClient`. Everything here runs on one event loop."""

    def __init__(
        self,
        path: Path,
        settings: dict[str, Any],
        *,
        max_queue: int | None = None,
        observer: Observer | None = None,
        patience: Patience | None = None,
        client: EngineClient | None = None,
    ):
        """client: None for a child process."""
        self.checkpoint = open_checkpoint(path)
        self.arch = load_arch(self.checkpoint)
        self.weight_bytes = checkpoint_bytes(self.checkpoint)
        self.tokenizer: Tokenizer  # these are made while the engine starts
        self.grammars: GrammarChecker
        self.weights: str  # which weights they are
        self._opening: Future[None]
        self.clock = time.monotonic
        self.max_queue = max_queue
        self.queue_reason = "given at the start"
        self.observer: Observer = observer or NoObserver()
        self.client: EngineClient = client or ProcessEngine(path, settings, patience)
        self.counts = Counts()
        self.step_seconds = 0.0
        self.stage = Stage("start")
        self.intake: Intake
        self.admission: Admission
        self.ended = EndedRequests()
        self._recipients: dict[int, Recipient] = {}  # by request id
        self._to_wake: dict[Stream, None] = {}  # streams that got pieces
        self._waking = False  # they will be woken soon
        self._grammars = FairTurns(most=MAX_GRAMMARS)
        self.progress = Progress(self.clock)
        self._checker = ThreadPoolExecutor(1, thread_name_prefix="grammar")

    async def start(self, grammars: bool = False) -> Ready:
        """Start the engine, and read the tokenizer meanwhile. grammars: start the process that tries them too, so that
        the first caller who has one need not wait for it."""
        self._opening = self._checker.submit(self._open)
        starting = asyncio.ensure_future(self.client.start(self))
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
        self.grammars = GrammarChecker(self.tokenizer, self.arch.vocab)
        self.weights = fingerprint(self.checkpoint)
        if self.tokenizer.chat is not None:
            with contextlib.suppress(TwostrokeError):  # compiles it; one that is broken is refused when it is used
                self.tokenizer.chat.render([{"role": "user", "content": "Hello"}])
                _ = self.tokenizer.chat.variables

    async def stop(self, seconds: float = 2.0) -> None:
        await self.client.stop(seconds)
        self._fail_all()
        self._checker.shutdown(wait=False, cancel_futures=True)

    @property
    def in_flight(self) -> int:
        return len(self._recipients)

    @property
    def changed(self) -> dict[str, Any]:
        """Settings that were changed since the start."""
        return self.client.changed

    async def change(self, wanted: dict[str, Any]) -> None:
        await self.client.change(wanted)

    async def steps(self, since: int, limit: int) -> tuple[Step, ...]:
        return await self.client.steps(since, limit)

    # ---- callers ---------------------------------------------------------------------------------------------------

    async def prepare(self, params: SamplingParams, key: int = 0) -> None:
        """Check what depends on the model. A grammar is tried in a thread, in turns of the API keys."""
        if params.grammar is None or self.grammars.knows(params.grammar):
            self.intake.prepare(params)
            return
        try:
            async with self._grammars.turn(key, self.intake.settings.key_share):
                await asyncio.get_running_loop().run_in_executor(self._checker, self.intake.prepare, params)
        except NotCheckedError:
            raise BusyError(1) from None

    def submit(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        salt: bytes = b"",
        arrival: float | None = None,
        visible: frozenset[int] = frozenset(),
        key: int = 0,
    ) -> Stream:
        """Take prompts (checked by `intake.tokenize`) and params (by `prepare`) in. visible: special tokens whose text
        is wanted; key: number of the caller's API key. InputError, BusyError or EngineError, and nothing is held."""
        if not self.client.healthy:
            raise EngineError(self.client.trouble() or "it is not ready")
        moment = self.clock() if arrival is None else arrival
        groups = [self.intake.make(tokens, params, moment, salt, key) for tokens in prompts]
        costs = [self.admission.cost(group[0].limit) for group in groups]
        self.admission.take(len(groups) * params.n, sum(costs) * params.n, key)
        stream = Stream(self, prompts, params, moment, salt)
        for group, cost in zip(groups, costs, strict=True):
            for request in group:
                answer = Answer(request, self.tokenizer, visible)
                self._recipients[request.id] = Recipient(stream, len(stream.answers), answer, cost, key)
                stream.answers.append(answer)
            self.client.submit(group)
        return stream

    def abort(self, request_ids: list[int]) -> None:
        known = [request_id for request_id in request_ids if request_id in self._recipients]
        if known:
            self.client.abort(known)

    def end(self, stream: Stream, error: str) -> None:
        """Fail what is left of a stream and abort it in the engine."""
        stream.close()
        for answer in stream.answers:
            recipient = self._recipients.get(answer.request.id)
            if recipient is not None:
                self._fail(recipient, error)
        self._wake()

    def finishing(self, samples: int, key: int) -> float | None:
        """Seconds until so many of the answers under way have reached their longest length, each at its own pace so
        far, or at one step for each token where it has none yet. None: there are fewer answers. key: those of one API
        key; 0: all."""
        left = []
        for recipient in self._recipients.values():
            if key not in (0, recipient.key):
                continue
            times, request = recipient.answer.sample.timeline.token_times, recipient.answer.request
            pace = (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else self.step_seconds
            left.append(pace * (request.limit - len(request.tokens) - len(times)))
        return sorted(left)[samples - 1] if len(left) >= samples else None

    def contexts(self) -> list[int]:
        """Tokens known of each request in the engine."""
        answers = (recipient.answer for recipient in self._recipients.values())
        return [len(answer.request.tokens) + len(answer.sample.token_ids) for answer in answers]

    def wake_later(self, stream: Stream) -> None:
        self._to_wake[stream] = None

    def _wake_soon(self) -> None:
        """Once all reports are read that have come by now: a server that is late writes several tokens at once."""
        if not self._waking:
            self._waking = True
            asyncio.get_running_loop().call_soon(self._wake)

    def _wake(self) -> None:
        """Wake each stream once, however many of its answers got pieces."""
        self._waking = False
        streams, self._to_wake = self._to_wake, {}
        for stream in streams:
            stream.wake()

    # ---- the engine ------------------------------------------------------------------------------------------------

    def on_stage(self, stage: Stage) -> None:
        self.stage = stage

    def on_ready(self, ready: Ready) -> None:
        settings = ready.settings
        if self.max_queue is None:
            self.max_queue = 4 * settings.max_requests
            self.queue_reason = "four times max_requests at the start"
        if self.client.restarts == 0:
            self._opening.result()  # hardly a wait: the engine reads the same vocabulary, and the weights
            defaults = sampling_defaults(self.checkpoint, self.arch)
            self.intake = Intake(
                self.tokenizer, settings, self.arch.vocab, self.grammars, RequestIds(), defaults=defaults
            )
        self.intake.settings = settings  # ids go on from where they were
        self.admission = Admission(settings, self.max_queue, self.clock, self.finishing)
        self.progress = Progress(self.clock)
        self.counts = Counts(blocks_total=settings.kv_blocks, blocks_free=settings.kv_blocks)

    def on_settings(self, settings: Resolved) -> None:
        self.intake.settings = settings
        self.admission.adapt(settings)

    def on_report(self, report: Report) -> None:
        self.counts, self.step_seconds = report.counts, report.step_seconds
        self.progress.note(report.at, report.counts)
        self.observer.reported(report.counts, report.step_seconds)
        gaps: list[float] = []
        for event in report.events:
            recipient = self._recipients.get(event.request_id)
            if recipient is None:
                continue  # it was failed here, and the engine was lost before the abort arrived
            if recipient.answer.sample.finish_reason is None:  # else a stop string has ended it
                self._push(recipient, event, report.at, gaps)
            if event.finish_reason is not None:
                del self._recipients[event.request_id]
                self.admission.release(recipient.cost, recipient.key)
        if gaps:
            self.observer.gaps(gaps)
        self._wake_soon()

    def _push(self, recipient: Recipient, event: Event, at: float, gaps: list[float]) -> None:
        stream, choice, answer, *_ = recipient
        if event.prompt_logprobs:
            stream.prompt_logprobs[choice // stream.params.n].update(event.prompt_logprobs)
        timeline = answer.sample.timeline
        written = len(timeline.token_times)
        piece = answer.push(event, at)
        count = len(piece.token_ids)
        if written and count:
            gaps.append(at - timeline.token_times[written - 1])
            gaps += [0.0] * (count - 1)
        elif count:
            self.observer.tokens(timeline, count)
        if piece.finish_reason is not None:
            self.observer.ended(timeline, piece.finish_reason, answer.request.params)
            tokens = answer.sample.token_ids
            self.ended.add(answer.request, timeline, stream.salt, piece.finish_reason, tokens)
            if event.finish_reason is None:
                self.abort([event.request_id])  # a stop string ended it
        if count or piece.text or piece.finish_reason is not None:
            stream.put(choice, piece)

    def on_lost(self, why: str) -> None:
        """Every request that waits for the engine gets an error as its last piece. The counts are those of an engine
        that has no request and an empty cache."""
        self.observer.lost()
        total = self.counts.blocks_total
        self.counts = Counts(steps=self.counts.steps, blocks_total=total, blocks_free=total)
        self.progress = Progress(self.clock)
        self._fail_all()

    def _fail_all(self) -> None:
        recipients = list(self._recipients.values())
        self._recipients.clear()
        for recipient in recipients:
            self.admission.release(recipient.cost, recipient.key)
            self._fail(recipient, ENGINE_GONE)
        self._wake()

    def _fail(self, recipient: Recipient, error: str) -> None:
        if not recipient.answer.finished:
            event = Event(recipient.answer.request.id, (), FinishReason.ERROR, error=error)
            self._push(recipient, event, self.clock(), [])
