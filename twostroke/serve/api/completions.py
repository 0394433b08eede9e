"""/v1/completions: continues a text exactly as it is given."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any

from pydantic import Field

from twostroke.engine.answer import StreamEvent
from twostroke.remote.stream import Piece
from twostroke.sampling import MAX_SAMPLES, SamplingParams
from twostroke.serve import sse
from twostroke.serve.fields import LongText, Many, Natural, TokenIds
from twostroke.serve.forms import FormatFields
from twostroke.serve.sampling import MAX_TOP_LOGPROBS, SamplingFields
from twostroke.serve.service import Generation, GenerationInput, Service
from twostroke.serve.structured import AnswerFormat, grammar_hints
from twostroke.serve.thinking import ThinkingHints
from twostroke.serve.transport.errors import ApiError, bad_request, openai_error
from twostroke.serve.transport.http import Exchange
from twostroke.serve.usage import text_logprobs
from twostroke.text.infill import Infill, infill_of
from twostroke.text.tokenizer import Tokenizer
from twostroke.types import TokenLogprobs

DEFAULT_MAX_TOKENS = 16  # OpenAI's


class CompletionRequest(SamplingFields, FormatFields, ThinkingHints):
    prompt: LongText | TokenIds | Annotated[Many[LongText | TokenIds], Field(min_length=1, max_length=MAX_SAMPLES)]
    max_tokens: Natural | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] | None = None
    suffix: LongText | None = None  # the answer is the text between prompt and suffix
    add_special_tokens: bool | None = None

    def prompts(self) -> list[str | list[int]]:
        """One or several: a flat list of numbers is one prompt of token ids."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        many: list[str | list[int]] = self.prompt
        if len(many) * (self.n or 1) > MAX_SAMPLES:
            raise bad_request(f"prompt: prompts × n may be at most {MAX_SAMPLES}.", "prompt")
        return many

    def infill(self, tokenizer: Tokenizer) -> Infill | None:
        """How the model writes the text before a suffix. None: there is no suffix."""
        if not self.suffix:
            return None
        if self.echo:
            raise bad_request("suffix: does not go together with echo: send one of them.", "suffix")
        found = infill_of(tokenizer)
        if found is None:
            raise bad_request("suffix: this model has no tokens for filling in the middle.", "suffix")
        return found

    @property
    def silent(self) -> bool:
        """max_tokens=0 with echo: only the prompt with its log probabilities is wanted."""
        return self.max_tokens == 0

    def to_params(self, **more: Any) -> SamplingParams:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise bad_request("best_of: only the value of n is supported.", "best_of")
        if self.silent and not self.echo:
            raise bad_request("max_tokens: 0 only together with echo=true.", "max_tokens")
        longest = DEFAULT_MAX_TOKENS if self.max_tokens is None else max(1, self.max_tokens)
        prompt_logprobs = self.logprobs if self.echo else None
        values = {"max_tokens": longest, "logprobs": self.logprobs, "prompt_logprobs": prompt_logprobs}
        return self.params(**values, **more)


async def handle(service: Service, exchange: Exchange) -> None:
    request = await service.read(CompletionRequest, exchange)
    service.check_model(request.model)
    grammar = await service.off_loop(exchange, exchange.weight, request.make_grammar, service.forms.closed)
    visible = service.tokenizer.special_ids if request.skip_special_tokens is False else frozenset()
    hints = await service.off_loop(exchange, exchange.weight, grammar_hints, grammar)
    form = AnswerFormat(grammar, visible=visible, hints=hints)
    exchange.ignored |= request.hints()
    infill = request.infill(service.tokenizer)
    ends = {} if infill is None else {"stop_token_ids": [*(request.stop_token_ids or ()), *infill.ends]}
    params = request.to_params(grammar=form.grammar, **ends)
    if infill is None:
        prompts = await service.tokenize(exchange, request.prompts(), request.add_special_tokens is not False)
    else:
        prompts = await infill_prompts(service, exchange, request, infill)
    echo = await prompt_texts(service, exchange, request)
    given = GenerationInput(
        prompts, params, request.explain, form, grammar_field=request.grammar_field, cache=request.cache
    )
    generation = await service.generate(exchange, given, request.user_name)
    await sse.reply(generation, CompletionWriter(generation, request, Echo(generation, echo)), request.stream)


async def infill_prompts(
    service: Service, exchange: Exchange, request: CompletionRequest, infill: Infill
) -> list[list[int]]:
    """Prompts that ask for the text between a prefix, which may be empty, and the suffix."""
    if request.add_special_tokens:
        exchange.ignored.add("add_special_tokens")  # the marks are the only special tokens of such a prompt
    (after,) = await service.tokenize(exchange, [request.suffix or ""], special=False)
    whole: list[str | list[int]] = []
    for prefix in request.prompts():
        (before,) = await service.tokenize(exchange, [prefix], special=False) if prefix else ([],)
        whole.append(infill.prompt(before, after))
    return await service.tokenize(exchange, whole)  # their length


async def prompt_texts(service: Service, exchange: Exchange, request: CompletionRequest) -> list[str]:
    """The texts of the prompts, where the answer repeats them."""
    prompts = request.prompts() if request.echo else []
    size = sum(len(prompt) for prompt in prompts)
    decode = service.tokenizer.decode
    return [p if isinstance(p, str) else await service.off_loop(exchange, size, decode, p) for p in prompts]


class Echo:
    """The prompt in front of the answer, where it was asked for: its text, its tokens and their scores."""

    def __init__(self, generation: Generation, texts: list[str]):
        """texts: of the prompts; none if they were not asked for."""
        self.generation = generation
        self.n = generation.stream.params.n
        self.texts = texts

    def text(self, choice: int) -> str:
        return self.texts[choice // self.n] if self.texts else ""

    def tokens(self, choice: int) -> list[int]:
        return self.generation.stream.prompts[choice // self.n] if self.texts else []

    def scores(self, choice: int) -> list[TokenLogprobs | None]:
        known = self.generation.stream.prompt_logprobs[choice // self.n]
        return [known.get(position) for position in range(len(self.tokens(choice)))]


class CompletionWriter(sse.Writer):
    def __init__(self, generation: Generation, request: CompletionRequest, echo: Echo):
        self.generation = generation
        self.tokenizer = generation.service.tokenizer
        self.head = {**generation.service.head("cmpl-"), "object": "text_completion"}
        self.request = request
        self.echo = echo
        self.whole_events = request.usage_in_chunks
        self.tokens = 0  # of the chunks so far
        self.written: dict[int, int] = {}  # characters with log probabilities so far, by choice
        self.text_events = sse.TextEvents(lambda choice, text: self._event([chunk(choice, text)]))

    def size(self, several: Iterable[Piece]) -> int:
        pieces = list(several)
        new = [choice for choice, _ in pieces if choice not in self.written]
        scores = 0 if self.request.logprobs is None else sse.SCORE * (1 + self.request.logprobs)  # of one token
        echoed = sum(len(self.echo.text(choice)) + scores * len(self.echo.tokens(choice)) for choice in new)
        return super().size(pieces) + echoed

    def whole(self) -> dict[str, Any]:
        """Every choice is what its stream's chunks add up to."""
        generation, request, echo = self.generation, self.request, self.echo
        choices = []
        for index, answer in enumerate(generation.stream.answers):
            sample = answer.sample
            text = echo.text(index) + ("" if request.silent else sample.text)
            scores = None
            if sample.logprobs is not None:
                tokens = echo.tokens(index) + ([] if request.silent else sample.token_ids)
                every = echo.scores(index) + ([] if request.silent else list(sample.logprobs))
                scores = text_logprobs(self.tokenizer, tokens, every, 0)
            reason = "length" if request.silent else sample.finish_reason
            choices.append(chunk(index, text, reason, scores) | generation.choice_extras(index))
        return {
            **self.head,
            "choices": choices,
            "usage": generation.usage(0 if request.silent else None),
            **generation.extras(),
        }

    def piece(self, choice: int, event: StreamEvent) -> bytes:
        written = b""
        if choice not in self.written:
            self.written[choice] = 0
            if self.request.echo:
                scores = self.echo.scores(choice) if self.request.logprobs is not None else None
                written = self._text(choice, self.echo.text(choice), self.echo.tokens(choice), scores)
        text, reason = event.text, event.finish_reason
        self.tokens += 0 if self.request.silent else len(event.token_ids)
        if self.request.silent:
            text, reason = "", "length" if reason else None
        if text or event.logprobs:
            ids = [] if self.request.silent else list(event.token_ids)
            written += self._text(choice, text, ids, event.logprobs and event.logprobs[: len(ids)])
        if reason is not None:
            written += self._event([chunk(choice, "", reason)], self.generation.extras(choice))
        return written

    def _text(self, choice: int, text: str, tokens: list[int], scores: Sequence[TokenLogprobs | None] | None) -> bytes:
        if scores is None and not self.request.usage_in_chunks:
            return self.text_events.fill(choice, text)
        if scores is None:
            return self._event([chunk(choice, text)])
        logprobs = text_logprobs(self.tokenizer, tokens, scores, self.written[choice])
        self.written[choice] += len(text)
        return self._event([chunk(choice, text, None, logprobs)])

    def _event(self, choices: list[dict[str, Any]], extras: dict[str, Any] | None = None) -> bytes:
        usage: dict[str, Any] = {"usage": None} if self.request.include_usage else {}
        if self.request.usage_in_chunks:
            usage = {"usage": self.generation.usage(self.tokens)}
        return sse.data({**self.head, "choices": choices, **(extras or {}), **usage})

    def end(self) -> bytes:
        if not self.request.include_usage:
            return sse.DONE
        usage = self.generation.usage(0 if self.request.silent else None)
        return sse.data({**self.head, "choices": [], "usage": usage}) + sse.DONE

    def problem(self, error: ApiError) -> bytes:
        return sse.data(openai_error(error)) + sse.DONE


def chunk(choice: int, text: str, reason: str | None = None, logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"index": choice, "text": text, "logprobs": logprobs, "finish_reason": reason}
