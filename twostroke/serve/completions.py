"""/v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from twostroke.remote.stream import Piece
from twostroke.serve import stream
from twostroke.serve.constrain import Binding, grammar_field, grammar_of
from twostroke.serve.errors import ApiError
from twostroke.serve.http import Call
from twostroke.serve.protocol import answers, completions, problems
from twostroke.serve.protocol.base import validate
from twostroke.serve.protocol.completions import CompletionRequest
from twostroke.serve.service import Ask, Generation, Service
from twostroke.types import TokenLogprobs


async def handle(service: Service, call: Call) -> None:
    request = validate(CompletionRequest, await call.body())
    service.check_model(request.model)
    binding = Binding(grammar_of(request))
    params = request.to_params(grammar=binding.grammar)
    prompts = await service.tokenize(request.prompts())
    ask = Ask(prompts, params, request.explain, binding, grammar_field=grammar_field(request))
    generation = await service.generate(call, ask, request.user)
    if request.stream:
        await stream.send(generation, TextWriter(generation, request))
        return
    await generation.finish()
    await call.respond(200, whole(generation, request), generation.headers())


def whole(generation: Generation, request: CompletionRequest) -> dict[str, Any]:
    """Every choice is what its stream's chunks add up to."""
    service, samples = generation.service, generation.stream.answers
    echo = Echo(generation, request)
    choices = []
    for index, answer in enumerate(samples):
        sample = answer.sample
        text = echo.text(index) + ("" if request.silent else sample.text)
        scores = None
        if sample.logprobs is not None:
            tokens = echo.tokens(index) + ([] if request.silent else sample.token_ids)
            every = echo.scores(index) + ([] if request.silent else list(sample.logprobs))
            scores = answers.text_logprobs(service.engine.tokenizer, tokens, every, 0)
        reason = "length" if request.silent else sample.finish_reason
        choice = completions.choice(index, text, reason, scores)
        choices.append(choice | generation.choice_extras(index))
    document = completions.completion(service.head("cmpl-"), choices, generation.usage(request.silent))
    return document | generation.extras()


class Echo:
    """The prompt before the answer, where it was asked for: its text, its tokens and their scores."""

    def __init__(self, generation: Generation, request: CompletionRequest):
        self.generation = generation
        self.wanted = bool(request.echo)
        self.n = generation.stream.params.n
        self.given = request.prompts()

    def text(self, choice: int) -> str:
        if not self.wanted:
            return ""
        prompt = self.given[choice // self.n]
        return prompt if isinstance(prompt, str) else self.generation.service.engine.tokenizer.decode(prompt)

    def tokens(self, choice: int) -> list[int]:
        return self.generation.stream.prompts[choice // self.n] if self.wanted else []

    def scores(self, choice: int) -> list[TokenLogprobs | None]:
        known = self.generation.stream.prompt_logprobs[choice // self.n]
        return [known.get(position) for position in range(len(self.tokens(choice)))]


class TextWriter(stream.Writer):
    def __init__(self, generation: Generation, request: CompletionRequest):
        self.generation = generation
        self.tokenizer = generation.service.engine.tokenizer
        self.head = generation.service.head("cmpl-")
        self.request = request
        self.echo = Echo(generation, request)
        self.plain = request.logprobs is None and not request.silent  # every piece but the last is just text
        self.written: dict[int, int] = {}  # characters with logprobs so far, by choice
        self.forms = stream.Forms(self._plain)

    def begin(self) -> bytes:
        return b""

    def text(self, choice: int, text: str) -> bytes:
        if self.plain and choice in self.written:
            return self.forms.fill(choice, text) if text else b""
        return super().text(choice, text)

    def piece(self, piece: Piece) -> bytes:
        event, choice = piece.event, piece.choice
        written = b""
        if choice not in self.written:
            self.written[choice] = 0
            if self.request.echo:
                scores = self.echo.scores(choice) if self.request.logprobs is not None else None
                written = self._chunk(choice, self.echo.text(choice), self.echo.tokens(choice), scores)
        text, reason = event.text, event.finish_reason
        if self.request.silent:
            text, reason = "", "length" if reason else None
        if text or event.logprobs:
            ids = [] if self.request.silent else list(event.token_ids)
            written += self._chunk(choice, text, ids, event.logprobs and event.logprobs[: len(ids)])
        if reason is not None:
            document = completions.chunk(self.head, [completions.choice(choice, "", reason, None)])
            written += self._data(document | self.generation.extras(choice))
        return written

    def _chunk(self, choice: int, text: str, tokens: list[int], scores: Sequence[TokenLogprobs | None] | None) -> bytes:
        if scores is None:
            return self.forms.fill(choice, text)
        shape = answers.text_logprobs(self.tokenizer, tokens, scores, self.written[choice])
        self.written[choice] += len(text)
        return self._data(completions.chunk(self.head, [completions.choice(choice, text, None, shape)]))

    def _plain(self, choice: int, text: str) -> bytes:
        return self._data(completions.chunk(self.head, [completions.choice(choice, text, None, None)]))

    def _data(self, document: dict[str, Any]) -> bytes:
        return stream.data(document | {"usage": None} if self.request.include_usage else document)

    def end(self) -> bytes:
        if not self.request.include_usage:
            return stream.DONE
        usage = self.generation.usage(self.request.silent)
        return stream.data(completions.chunk(self.head, []) | {"usage": usage}) + stream.DONE

    def problem(self, error: ApiError) -> bytes:
        return stream.data(problems.openai_error(error)) + stream.DONE
