"""The engine as the routes see it: what it serves, how it is, and the way from a prompt to an answer.

serving.py starts the engine. The answer cache (answering.py, recorder.py) and the route of workers use it directly.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from typing import Any, NamedTuple, TypeVar

import twostroke
from twostroke.cluster.pools import Pools
from twostroke.config import Resolved
from twostroke.confined import AccidentError
from twostroke.engine.answer import StreamEvent
from twostroke.errors import InputError, ModelError
from twostroke.metrics.registry import Metrics
from twostroke.metrics.steplog import Step
from twostroke.model.arch import Arch
from twostroke.remote.admission import BusyError
from twostroke.remote.async_engine import ENGINE_GONE, AsyncEngine
from twostroke.remote.client import EngineClient, EngineError
from twostroke.remote.ended import KEPT, EndedRequest
from twostroke.remote.messages import Ready
from twostroke.remote.stream import SLOW_READER, Piece, Stream
from twostroke.run.sample import NOT_FINITE
from twostroke.sampling import SamplingParams
from twostroke.serve import expected, usage
from twostroke.serve.answering import Answering, Question, described
from twostroke.serve.base_service import BaseService
from twostroke.serve.body_shape import check_text
from twostroke.serve.cache_miss import Nearest, RecentPrompts, explanation
from twostroke.serve.costs import NO_COSTS, answer_costs
from twostroke.serve.expected import Expectation
from twostroke.serve.recorder import Recorder
from twostroke.serve.sampling import AnswerCacheOptions
from twostroke.serve.structured import AnswerFormat, FormContext, grammar_failure
from twostroke.serve.transport import errors
from twostroke.serve.transport.auth import Caller, Keys
from twostroke.serve.transport.http import Exchange, GoneError
from twostroke.serve.verdicts import Verdicts
from twostroke.text.conversation import render_conversation
from twostroke.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)
T = TypeVar("T")


class GenerationInput(NamedTuple):
    """What a generating route hands over, whatever its API."""

    prompts: list[list[int]]
    params: SamplingParams
    explain: bool = False  # the answer shall say why the prompt was not in the prefix cache
    format: AnswerFormat = AnswerFormat()
    text: str = ""  # the prompt as the chat template wrote it
    grammar_field: str = "grammar"  # the request's field that the grammar comes from
    cache: AnswerCacheOptions | None = None  # what the request says about the answer cache
    question: Question | None = None  # of a request whose question may be compared by meaning


class Generation:
    """The answers to one request while they are written, and the parts of a response that are the same in every API."""

    def __init__(
        self, service: Service, exchange: Exchange, stream: Stream, near: Nearest | None, given: GenerationInput
    ):
        self.service = service
        self.exchange = exchange
        self.stream = stream
        self.near = near
        self.explain = given.explain
        self.cached: dict[str, Any] | None = None  # what the answer cache did; None: there is none
        self.readers = [given.format.reader(given.text) for _ in stream.answers]

    async def finish(self) -> None:
        """Waits for the end. The error of an answer that failed is raised."""
        self.stream.listener = lambda choice, text: True  # no need to wake up for text
        async with self.exchange.watched(self.stream.close):
            while await self.stream.take():
                continue
        self.record()
        self.check()

    def whole_pieces(self) -> list[Piece]:
        """Every answer as one piece."""
        samples = [answer.sample for answer in self.stream.answers]
        return [
            Piece(choice, StreamEvent(sample.text, (), sample.finish_reason, logprobs=tuple(sample.logprobs or ())))
            for choice, sample in enumerate(samples)
        ]

    def read_whole(self) -> None:
        """Reads the answers for their segments, where they were not read piece by piece."""
        for choice, event in self.whole_pieces():
            self.readers[choice].push(event)

    async def off_loop(self, size: int, function: Callable[..., T], *arguments: Any) -> T:
        return await self.service.off_loop(self.exchange, size, function, *arguments)

    def check(self) -> None:
        for answer in self.stream.answers:
            if answer.sample.finish_reason == "abort":
                raise GoneError
            if answer.sample.finish_reason == "error":
                raise failure(answer.sample.error or "")

    def record(self) -> None:
        """Remembers the prompts, to explain later cache misses."""
        firsts = self.stream.answers[:: self.stream.params.n]
        for prompt, answer in zip(self.stream.prompts, firsts, strict=True):
            self.service.recent.add(self.exchange.caller.salt, prompt + answer.sample.token_ids)

    def usage(self, written: int | None = None) -> dict[str, Any]:
        """The usage in OpenAI's form. written: tokens that count as written; None: all."""
        firsts = [answer.sample.timeline for answer in self.stream.answers[:: self.stream.params.n]]
        if written is None:
            written = sum(len(answer.sample.token_ids) for answer in self.stream.answers)
        prompt = sum(len(tokens) for tokens in self.stream.prompts)
        return usage.openai_usage(prompt, sum(timeline.cached_tokens for timeline in firsts), written)

    def timings(self, choice: int) -> dict[str, Any]:
        service, timeline = self.service, self.stream.answers[choice].sample.timeline
        known = self.cached is not None and self.cached["hit"] is not None
        costs = NO_COSTS if known else answer_costs(service.arch, service.settings, service.weight_bytes, timeline)
        return usage.timings(timeline, costs)

    def extras(self, choice: int = 0) -> dict[str, Any]:
        """The top-level fields that this server adds to an answer."""
        document: dict[str, Any] = {"timings": self.timings(choice)}
        if self.explain:
            tokens = self.stream.prompts[0]
            cached = self.stream.answers[0].sample.timeline.cached_tokens
            document["prefix_cache"] = explanation(self.service.tokenizer, tokens, cached, self.near)
        if self.cached is not None:
            document["answer_cache"] = self.cached
        return document

    def choice_extras(self, choice: int) -> dict[str, Any]:
        """Fields beside its text. Each of several choices has its own timings; those of a single one are at the top."""
        return {} if len(self.stream.answers) == 1 else {"timings": self.timings(choice)}

    def headers(self) -> dict[str, str]:
        return {"server-timing": usage.server_timing(self.stream.answers[0].sample.timeline)}


class Service(BaseService):
    def __init__(self, engine: AsyncEngine, name: str, keys: Keys, metrics: Metrics, closed: bool = False):
        """closed: objects of a schema have no other properties than it names, unless it says so."""
        super().__init__(name, keys, metrics, engine.clock)
        self.engine = engine
        self.closed = closed
        self.wall = time.time() - engine.clock()  # added to the engine's clock, it gives unix time
        self.recent = RecentPrompts()
        self.verdicts = Verdicts(engine.clock)
        self._expectation: tuple[Ready, Expectation] | None = None  # of the engine's present life
        self.answers: Answering | None = None  # the answer cache
        self.topics: Recorder | None = None  # of questions, where they are recorded
        self.opening = False  # the answer cache is not open yet: requests wait for it as for the model

    # ---- what is served --------------------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Tokenizer:
        return self.engine.tokenizer

    @property
    def forms(self) -> FormContext:
        return FormContext(self.tokenizer, self.closed)

    @property
    def template_variables(self) -> frozenset[str]:
        """The names that the chat template reads."""
        return frozenset() if self.tokenizer.chat is None else self.tokenizer.chat.variables

    @property
    def arch(self) -> Arch:
        return self.engine.arch

    @property
    def settings(self) -> Resolved:
        """The settings as they are now."""
        return self.engine.intake.settings

    @property
    def key_share(self) -> float:
        """The most that one key may have of what other keys leave free; 1 until the model is loaded."""
        return 1.0 if self.engine.client.ready is None else self.settings.key_share

    @property
    def weight_bytes(self) -> int:
        return self.engine.weight_bytes

    @property
    def max_model_len(self) -> int:
        return self.settings.max_model_len

    # ---- how the engine is -----------------------------------------------------------------------------------------

    @property
    def healthy(self) -> bool:
        return self.engine.client.healthy and not self.opening

    @property
    def restarts(self) -> int:
        return self.engine.client.restarts

    def trouble(self) -> str | None:
        return self.engine.client.trouble()

    def slow(self) -> str | None:
        """Why the engine counts as slow: it does less than a tenth of what the cost model expects. None: it does not,
        or has not had work for long enough to tell."""
        engine, ready = self.engine, self.engine.client.ready
        done = engine.progress.over(expected.SECONDS)
        if done is None or ready is None:
            return None
        if self._expectation is None or self._expectation[0] is not ready:
            self._expectation = ready, Expectation(self.arch, self.weight_bytes, ready)
        return expected.slow(done, self._expectation[1].seconds(done, engine.contexts()))

    def check_loaded(self) -> None:
        """Raises a 503 for as long as the model has never been loaded."""
        if self.engine.client.ready is None or self.opening:
            raise errors.ApiError(
                503, "The model is still loading.", code="loading", retry_after=2, reason="unavailable"
            )

    def check_open(self, caller: Caller) -> None:
        """Raises the 429 or 503 of a server that cannot take a generating request of this caller now."""
        self.check_draining()
        trouble = self.trouble()
        if trouble is not None:
            raise errors.unavailable(f"The engine is not available: {trouble}.")
        try:
            self.engine.admission.check(caller.number)
        except BusyError as error:
            raise errors.busy(error.retry_after, error.why) from None

    def state(self) -> dict[str, Any]:
        """Counters of the engine, as /health shows them."""
        engine, counts = self.engine, self.engine.counts
        document: dict[str, Any] = {
            "running": counts.running,
            "waiting": counts.waiting,
            "in_flight": engine.in_flight,
            "steps": counts.steps,
            "restarts": self.restarts,
            "blocks": {
                "total": counts.blocks_total,
                "free": counts.blocks_free,
                "cached": counts.blocks_cached,
                "host": counts.blocks_on_host,
                "offloaded": counts.blocks_offloaded,
                "restored": counts.blocks_restored,
            },
        }
        if engine.client.ready is None:
            stage = engine.stage
            document["loading"] = {"name": stage.name, "done": stage.done, "total": stage.total}
        return document

    # ---- settings and records --------------------------------------------------------------------------------------

    @property
    def machine(self) -> dict[str, Any]:
        """The processor or card, and the most that max_requests can be raised to."""
        ready = self.engine.client.ready
        assert ready is not None
        return {"machine": ready.machine, "restarts": self.restarts, "rows": ready.settings.max_requests}

    @property
    def workers(self) -> int:
        """How many workers a deployment has; 0: this is one engine and no deployment."""
        client = self.engine.client
        return len(client.members) if isinstance(client, Pools) else 0

    @property
    def given_settings(self) -> Mapping[str, Any]:
        """The settings that were given at the start."""
        return self.engine.client.settings

    @property
    def changed_settings(self) -> Mapping[str, Any]:
        """Changed since the start."""
        return self.engine.changed

    @property
    def max_queue(self) -> tuple[int | None, str]:
        """And why it has this value."""
        return self.engine.max_queue, self.engine.queue_reason

    async def change(self, wanted: dict[str, Any]) -> None:
        """Changes settings while the engine runs. ConfigError: nothing was changed."""
        try:
            await self.engine.change(wanted)
        except EngineError as error:
            raise unavailable_engine(error) from None

    async def steps(self, since: int, limit: int, worker: EngineClient | None = None) -> Sequence[Step]:
        try:
            return await (worker or self.engine.client).steps(since, limit)
        except EngineError as error:
            raise unavailable_engine(error) from None

    def ended_requests(self, limit: int = KEPT) -> list[EndedRequest]:
        """The last requests that ended, in the order of their ends."""
        return self.engine.ended.latest(limit)

    # ---- from prompts to answers -----------------------------------------------------------------------------------

    async def tokenize(
        self, exchange: Exchange, prompts: Sequence[str | list[int]], special: bool = True
    ) -> list[list[int]]:
        """special: with the model's begin and end tokens."""
        size = sum(len(prompt) for prompt in prompts)
        tokenize = partial(self.engine.intake.tokenize, add_special=special)
        try:  # one prompt at a time: keys take turns between them
            return [await self.off_loop(exchange, size, tokenize, prompt) for prompt in prompts]
        except InputError as error:
            raise errors.bad_request(str(error), "prompt", "invalid_prompt") from None

    async def render_text(self, exchange: Exchange, messages: Sequence[Mapping[str, Any]], **arguments: Any) -> str:
        """Messages as the model's chat template writes them. arguments: of `render_conversation`."""
        template = self.tokenizer.chat
        if template is None:
            raise errors.bad_request("messages: this model has no chat template; use /v1/completions.", "messages")

        def write() -> str:
            for message in messages:
                for call in message.get("tool_calls") or ():
                    check_text(call["function"]["arguments"])
            return render_conversation(template, messages, **arguments)

        try:
            return await self.threads.render(exchange, write)
        except AccidentError:
            message = "The conversation could not be rendered: send the request again."
            raise errors.unavailable(message, "not_rendered") from None
        except (InputError, ModelError) as error:
            named = str(error).split(":", 1)[0]
            param = named if named in arguments or named.startswith("messages[") else "messages"
            raise errors.bad_request(str(error), param, "invalid_prompt") from None

    async def render(
        self, exchange: Exchange, messages: Sequence[Mapping[str, Any]], **arguments: Any
    ) -> tuple[str, list[int]]:
        """Messages as one prompt, in text and in tokens. The template writes the special tokens itself."""
        text = await self.render_text(exchange, messages, **arguments)
        try:
            tokenize = partial(self.engine.intake.tokenize, text, add_special=False)
            return text, await self.off_loop(exchange, len(text), tokenize)
        except InputError as error:
            raise errors.bad_request(str(error), "messages", "invalid_prompt") from None

    async def generate(self, exchange: Exchange, given: GenerationInput, user: str | None = None) -> Generation:
        exchange.release_body()
        exchange.ignored |= given.format.hints
        caller, salt = exchange.caller, exchange.caller.salt
        self.check_rights(caller, given)
        near = self.recent.nearest(salt, given.prompts[0]) if given.explain else None
        cached: dict[str, Any] | None = None
        try:
            await self.engine.prepare(given.params, caller.number)
            stream, cached = await self._answered(exchange, given)
        except InputError as error:
            named, _, why = str(error).partition(":")
            if " " in named:  # a sentence about the prompt
                raise errors.bad_request(str(error), "prompt", "invalid_prompt") from None
            field = given.grammar_field if named == "grammar" else named  # as the request calls it
            raise errors.bad_request(f"{field}:{why}", field) from None
        except BusyError as error:
            raise errors.busy(error.retry_after, error.why) from None
        except EngineError as error:
            raise unavailable_engine(error) from None
        log.info("%s: %d prompts for %s, user %r", exchange.path, len(given.prompts), exchange.caller.name, user)
        generation = Generation(self, exchange, stream, near, given)
        generation.cached = cached
        return generation

    async def _answered(self, exchange: Exchange, given: GenerationInput) -> tuple[Stream, dict[str, Any] | None]:
        """The stream of an answer: from the answer cache, or from the engine; and what the cache did."""
        answers = self.answers
        query = answers.query(exchange, given) if answers is not None else None
        planned = await answers.look(query) if answers is not None and query is not None else None
        if answers is not None and planned is not None:
            if planned.looked.found is not None:
                return answers.known(exchange, given, planned)
            joined = answers.join(exchange, given, planned.query)
            if joined is not None:
                return joined, described(None, True)
        caller = exchange.caller
        stream = self.engine.submit(
            given.prompts, given.params, caller.salt, exchange.arrival, given.format.visible, caller.number
        )
        if self.topics is not None and given.question is not None:
            self.topics.record(self, stream, given, caller.salt)
        if answers is None:
            return stream, None
        if planned is not None:
            answers.watch(planned, stream)
            await answers.look_again(planned.looked, stream)
            if planned.looked.found is not None:
                stream.close()
                return answers.known(exchange, given, planned)
        return stream, described(None, False)

    def check_rights(self, caller: Caller, given: GenerationInput) -> None:
        """Raises the 403 of a user key that asks for what is the admin's."""
        if given.params.priority < 0:
            self.keys.require_admin(caller, f"priority: {given.params.priority}, a value below 0,", "priority")
        if given.explain and not self.keys.required:  # all callers share one record of prompts
            self.keys.require_admin(caller, "prefix_cache.explain", "prefix_cache")

    def head(self, prefix: str) -> dict[str, Any]:
        """The fields that OpenAI's answers begin with."""
        head = {"id": f"{prefix}{secrets.token_hex(12)}", "created": int(time.time()), "model": self.name}
        return head if prefix == "resp_" else head | {"system_fingerprint": self.fingerprint}

    @property
    def fingerprint(self) -> str:
        """Changes when the same request may be answered with other tokens: other weights, precision or version."""
        settings, ready = self.settings, self.engine.client.ready
        parts = (twostroke.__version__, self.engine.weights, settings.dtype, settings.kv_dtype, settings.quantize)
        return "fp_" + blake2b(repr(parts + (ready.mixed if ready else ())).encode(), digest_size=6).hexdigest()


def unavailable_engine(error: EngineError) -> errors.ApiError:
    return errors.unavailable(f"The engine is not available: {error}.")


def failure(error: str) -> errors.ApiError:
    """An answer that failed while it was written. The client sees a message that was written for clients, or an id."""
    if error == ENGINE_GONE:
        return errors.unavailable("The engine stopped while it wrote this answer: send the request again.")
    if error == SLOW_READER:
        return errors.ApiError(408, "The answer was read too slowly and was ended.", code="slow_reader")
    if error == NOT_FINITE:
        return errors.ApiError(500, f"{error[0].upper()}{error[1:]}.", code="not_finite", reason="internal")
    by_grammar = grammar_failure(error)
    if by_grammar is not None:
        return by_grammar
    number = secrets.token_hex(8)
    errors.log.error("error %s: a request failed: %s", number, error)
    return errors.internal_with(number)
