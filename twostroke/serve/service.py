"""What the routes share: the engine, the model's name, the way from a prompt to a stream of pieces, and the fold."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, TypeVar

from twostroke.errors import InputError, ModelError
from twostroke.metrics.registry import Metrics
from twostroke.metrics.timeline import Timeline
from twostroke.remote.admission import BusyError
from twostroke.remote.async_engine import ENGINE_GONE, AsyncEngine
from twostroke.remote.client import EngineError
from twostroke.remote.stream import SLOW_READER, Stream
from twostroke.sampling import SamplingParams
from twostroke.serve import errors
from twostroke.serve.auth import Keys
from twostroke.serve.constrain import FREE, Binding
from twostroke.serve.explain import Nearest, Recent, explanation
from twostroke.serve.http import Call, GoneError
from twostroke.serve.protocol import answers
from twostroke.serve.work import work
from twostroke.text.tools import with_parsed_arguments

log = logging.getLogger(__name__)
T = TypeVar("T")
INLINE = 16_384  # characters that are tokenized on the event loop; more goes to a thread


class Ask(NamedTuple):
    """What every generating route boils down to."""

    prompts: list[list[int]]
    params: SamplingParams
    explain: bool = False  # tell why a prompt was not in the cache
    binding: Binding = FREE
    text: str = ""  # the prompt as the template wrote it
    grammar_field: str = "grammar"  # where a grammar came from


class Generation:
    """One call under way: its stream, its readers, and what is needed to tell about it."""

    def __init__(self, service: Service, call: Call, stream: Stream, near: Nearest | None, ask: Ask):
        self.service = service
        self.call = call
        self.stream = stream
        self.near = near
        self.explain = ask.explain
        self.readers = [ask.binding.reader(ask.text) for _ in stream.answers]

    async def finish(self) -> None:
        """The fold: take all pieces in. Afterwards the answers are whole; an error of any of them is raised."""
        self.stream.listener = self._listen
        async with self.call.watched(self.stream.close):
            while pieces := await self.stream.take():
                for choice, event in pieces:
                    self.readers[choice].push(event)
        self.record()
        self.check()

    def _listen(self, choice: int, text: str) -> bool:
        self.readers[choice].push_text(text)
        return True

    def check(self) -> None:
        for answer in self.stream.answers:
            if answer.sample.finish_reason == "abort":
                raise GoneError
            if answer.sample.finish_reason == "error":
                raise self.service.failure(answer.sample.error or "")

    def record(self) -> None:
        """Remember what the cache now holds, for those who will ask why theirs was not in it."""
        firsts = self.stream.answers[:: self.stream.params.n]
        for prompt, answer in zip(self.stream.prompts, firsts, strict=True):
            self.service.recent.add(self.call.caller.salt, prompt + answer.sample.token_ids)

    def usage(self, silent: bool = False) -> dict[str, Any]:
        firsts = [answer.sample.timeline for answer in self.stream.answers[:: self.stream.params.n]]
        written = 0 if silent else sum(len(answer.sample.token_ids) for answer in self.stream.answers)
        prompt = sum(len(tokens) for tokens in self.stream.prompts)
        return answers.usage(prompt, sum(timeline.cached_tokens for timeline in firsts), written)

    def timings(self, choice: int) -> dict[str, Any]:
        return self.service.timings(self.stream.answers[choice].sample.timeline)

    def extras(self, choice: int = 0) -> dict[str, Any]:
        """Our own top-level fields of an answer."""
        document: dict[str, Any] = {"timings": self.timings(choice)}
        if self.explain:
            tokens = self.stream.prompts[0]
            cached = self.stream.answers[0].sample.timeline.cached_tokens
            document["prefix_cache"] = explanation(self.service.engine.tokenizer, tokens, cached, self.near)
        return document

    def choice_extras(self, choice: int) -> dict[str, Any]:
        """With several choices each has timings of its own; a single one's are the answer's."""
        return {} if len(self.stream.answers) == 1 else {"timings": self.timings(choice)}

    def headers(self) -> dict[str, str]:
        return {"server-timing": answers.server_timing(self.stream.answers[0].sample.timeline)}


class Service:
    def __init__(self, engine: AsyncEngine, name: str, keys: Keys, metrics: Metrics):
        self.engine = engine
        self.name = name
        self.keys = keys
        self.metrics = metrics
        self.created = int(time.time())
        self.wall = time.time() - engine.clock()  # from the engine's clock to the time of day
        self.recent = Recent()
        self.draining = False
        self.calls = 0  # exchanges that generate, under way
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="tokenize")

    # ---- is it there -----------------------------------------------------------------------------------------------

    def check_open(self) -> None:
        """Refuse before anything is read when nothing could be served."""
        if self.draining:
            raise errors.unavailable("The server is shutting down.", "shutting_down")
        trouble = self.engine.client.trouble()
        if trouble is not None:
            raise errors.unavailable(f"The engine is not available: {trouble}.")
        try:
            self.engine.admission.check()
        except BusyError as error:
            raise errors.from_engine(error) from None

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.name:
            message = f"The model {name[:100]!r} is not served here; {self.name!r} is."
            raise errors.ApiError(404, message, param="model", code="model_not_found", reason="model")

    # ---- from prompts to pieces ------------------------------------------------------------------------------------

    async def off_loop(self, size: int, function: Callable[..., T], *arguments: Any) -> T:
        """Small things here, large ones in a thread so that streams keep their pace."""
        if size <= INLINE:
            return function(*arguments)
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

    async def tokenize(self, prompts: Sequence[str | list[int]], param: str = "prompt") -> list[list[int]]:
        try:
            return [await self.off_loop(len(prompt), self.engine.intake.tokenize, prompt) for prompt in prompts]
        except InputError as error:
            raise errors.bad_request(str(error), param, "invalid_prompt") from None

    async def render_text(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **arguments: Any
    ) -> str:
        """Messages as the model's chat template writes them."""
        template = self.engine.tokenizer.chat
        if template is None:
            raise errors.bad_request("messages: this model has no chat template; use /v1/completions.", "messages")
        size = sum(len(str(message.get("content"))) for message in messages) + 64 * len(messages)
        try:
            plain = with_parsed_arguments(messages)
            write = partial(template.render, plain, add_generation_prompt=add_generation_prompt, **arguments)
            return await self.off_loop(size, write)
        except (InputError, ModelError) as error:
            named = str(error).split(":", 1)[0]
            param = named if named in arguments or named.startswith("messages[") else "messages"
            raise errors.bad_request(str(error), param, "invalid_prompt") from None

    async def render(self, messages: Sequence[Mapping[str, Any]], **arguments: Any) -> tuple[str, list[int]]:
        """Messages to one prompt, as text and as tokens. The template has written its own special tokens."""
        text = await self.render_text(messages, **arguments)
        try:
            tokenize = partial(self.engine.intake.tokenize, text, add_special=False)
            return text, await self.off_loop(len(text), tokenize)
        except InputError as error:
            raise errors.bad_request(str(error), "messages", "invalid_prompt") from None

    async def generate(self, call: Call, ask: Ask, user: str | None = None) -> Generation:
        near = self.recent.nearest(call.caller.salt, ask.prompts[0]) if ask.explain else None
        try:
            await self.engine.prepare(ask.params)
            stream = self.engine.submit(ask.prompts, ask.params, call.caller.salt, call.arrival, ask.binding.visible)
        except InputError as error:
            named, _, why = str(error).partition(":")
            field = ask.grammar_field if named == "grammar" else named  # the caller knows it by another name
            raise errors.bad_request(f"{field}:{why}", field) from None
        except (BusyError, EngineError) as error:
            raise errors.from_engine(error) from None
        log.info("%s: %d prompts for %s, user %r", call.path, len(ask.prompts), call.caller.name, user)
        return Generation(self, call, stream, near, ask)

    # ---- what is told ----------------------------------------------------------------------------------------------

    def head(self, prefix: str) -> dict[str, Any]:
        return {"id": f"{prefix}{secrets.token_hex(12)}", "created": int(time.time()), "model": self.name}

    def timings(self, timeline: Timeline) -> dict[str, Any]:
        engine = self.engine
        return answers.timings(timeline, work(engine.arch, engine.intake.settings, engine.weight_bytes, timeline))

    def failure(self, error: str) -> errors.ApiError:
        """An answer that failed while it was written. Only sentences written for clients are shown to them."""
        if error == ENGINE_GONE:
            return errors.unavailable("The engine stopped while it wrote this answer: send the request again.")
        if error == SLOW_READER:
            return errors.ApiError(408, "The answer was read too slowly and was ended.", code="slow_reader")
        number = secrets.token_hex(8)
        errors.log.error("error %s: a request failed: %s", number, error)
        return errors.internal_with(number)
