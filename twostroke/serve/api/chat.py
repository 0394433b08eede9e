"""/v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from twostroke.engine.answer import StreamEvent
from twostroke.sampling import SamplingParams
from twostroke.serve import sse
from twostroke.serve.fields import Count, Many, Name, Payload, Text
from twostroke.serve.sampling import MAX_TOP_LOGPROBS, SamplingFields
from twostroke.serve.segments import CONTENT, REASONING, SegmentDelta
from twostroke.serve.service import Generation, GenerationInput, Service
from twostroke.serve.structured import ToolFields
from twostroke.serve.transport.errors import ApiError, bad_request, openai_error
from twostroke.serve.transport.http import Exchange
from twostroke.serve.usage import chat_logprobs
from twostroke.text.chat import ARGUMENTS

MAX_MESSAGES = 4096


# ---- the request ---------------------------------------------------------------------------------------------------


class TextPart(Payload):
    type: Literal["text"]
    text: Text


class CalledFunction(Payload):
    name: Name
    arguments: Text


class ToolCall(Payload):
    id: Name
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class Message(Payload):
    """The last four fields are those of an answer that a client sends back as it got it."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[Many[TextPart], Field(max_length=MAX_MESSAGES)] | None = None
    name: Name | None = None
    tool_calls: Annotated[Many[ToolCall], Field(max_length=128)] | None = None
    tool_call_id: Name | None = None
    reasoning_content: Text | None = None
    refusal: None = None
    annotations: Annotated[Many[None], Field(max_length=0)] | None = None
    audio: None = None
    function_call: None = None

    def for_template(self) -> dict[str, Any]:
        """Chat templates have no role `developer`: it is read as `system`."""
        message = self.model_dump(exclude_none=True, exclude={"annotations"})
        if self.role == "developer":
            message["role"] = "system"
        return message


Messages = Annotated[Many[Message], Field(min_length=1, max_length=MAX_MESSAGES)]


class ChatRequest(SamplingFields, ToolFields):
    messages: Messages
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    reasoning_effort: Name | None = None
    chat_template_kwargs: dict[Name, Any] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    modalities: Annotated[Many[Literal["text"]], Field(min_length=1, max_length=1)] | None = None

    def to_params(self, **more: Any) -> SamplingParams:
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise bad_request("max_tokens and max_completion_tokens mean the same: send one.", "max_tokens")
        if self.top_logprobs is not None and not self.logprobs:
            raise bad_request("top_logprobs: only together with logprobs=true.", "top_logprobs")
        longest = self.max_tokens or self.max_completion_tokens
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return self.params(max_tokens=longest, unlimited=True, logprobs=logprobs, **more)

    def for_template(self) -> list[dict[str, Any]]:
        return [message.for_template() for message in self.messages]

    def template_arguments(self) -> dict[str, Any]:
        arguments = dict(self.chat_template_kwargs or {})
        for name in arguments:
            if name not in ARGUMENTS:
                raise bad_request(f"chat_template_kwargs: {name!r} may not be set.", "chat_template_kwargs")
        if self.reasoning_effort is not None:
            arguments["reasoning_effort"] = self.reasoning_effort
        return arguments


# ---- the answer ----------------------------------------------------------------------------------------------------


async def handle(service: Service, exchange: Exchange) -> None:
    request = await service.read(ChatRequest, exchange)
    service.check_model(request.model)
    form = await service.off_loop(exchange, exchange.weight, request.answer_format, service.tokenizer)
    params = request.to_params(grammar=form.grammar)
    messages = await service.off_loop(exchange, exchange.weight, request.for_template)
    text, tokens = await service.render(exchange, messages, tools=form.tools, **request.template_arguments())
    given = GenerationInput([tokens], params, request.explain, form, text, request.grammar_field)
    generation = await service.generate(exchange, given, request.user)
    await sse.reply(generation, ChatWriter(generation, request), request.stream)


def tool_call(number: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}


def scored(logprobs: list[dict[str, Any]] | None) -> dict[str, Any] | None:
    return None if logprobs is None else {"content": logprobs, "refusal": None}


def delta_of(delta: SegmentDelta) -> dict[str, Any]:
    segment = delta.segment
    if segment.kind == CONTENT:
        return {"content": delta.text}
    if segment.kind == REASONING:
        return {"reasoning_content": delta.text}
    more = tool_call(segment.id, segment.name, delta.text) if delta.opens else {"function": {"arguments": delta.text}}
    return {"tool_calls": [{"index": segment.number, **more}]}


class ChatWriter(sse.Writer):
    def __init__(self, generation: Generation, request: ChatRequest):
        self.generation = generation
        self.tokenizer = generation.service.tokenizer
        self.head = generation.service.head("chatcmpl-")
        self.include_usage = request.include_usage
        self.begun: set[int] = set()  # choices whose role was sent
        self.text_events = sse.TextEvents(lambda choice, text: self._chunk(choice, {"content": text}))

    def whole(self) -> dict[str, Any]:
        generation = self.generation
        choices = [self._choice(index) | generation.choice_extras(index) for index in range(len(generation.readers))]
        document = {**self.head, "object": "chat.completion", "choices": choices, "usage": generation.usage()}
        return document | generation.extras()

    def _choice(self, index: int) -> dict[str, Any]:
        sample, reader = self.generation.stream.answers[index].sample, self.generation.readers[index]
        text, reasoning = reader.text(CONTENT), reader.text(REASONING)
        calls = [tool_call(segment.id, segment.name, segment.text) for segment in reader.calls]
        message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        scores = None if sample.logprobs is None else chat_logprobs(self.tokenizer, sample.logprobs)
        reason = reader.finish_reason(sample.finish_reason)
        return {"index": index, "message": message, "logprobs": scored(scores), "finish_reason": reason}

    def piece(self, choice: int, event: StreamEvent) -> bytes:
        reader = self.generation.readers[choice]
        scores = None if event.logprobs is None else chat_logprobs(self.tokenizer, event.logprobs)
        deltas = reader.push(event)
        if not deltas and not scores and event.finish_reason is None:
            return b""  # half a character, or text that may become a tool call
        written = b""
        if choice not in self.begun:
            self.begun.add(choice)
            written = self._chunk(choice, {"role": "assistant", "content": ""})
        for delta in deltas:
            if scores is None and delta.segment.kind == CONTENT:
                written += self.text_events.fill(choice, delta.text)
                continue
            written += self._chunk(choice, delta_of(delta), scores=scores)
            scores = None if scores is None else []
        if scores and not deltas:
            written += self._chunk(choice, {"content": ""}, scores=scores)
        if event.finish_reason is not None:
            extras = self.generation.extras(choice)
            written += self._chunk(choice, {}, reader.finish_reason(event.finish_reason), extras=extras)
        return written

    def _chunk(
        self,
        choice: int,
        delta: dict[str, Any],
        reason: str | None = None,
        scores: list[dict[str, Any]] | None = None,
        extras: dict[str, Any] | None = None,
    ) -> bytes:
        one = {"index": choice, "delta": delta, "logprobs": scored(scores), "finish_reason": reason}
        return sse.data(self._document([one]) | ({"usage": None} if self.include_usage else {}) | (extras or {}))

    def _document(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self.head, "object": "chat.completion.chunk", "choices": choices}

    def end(self) -> bytes:
        if not self.include_usage:
            return sse.DONE
        return sse.data(self._document([]) | {"usage": self.generation.usage()}) + sse.DONE

    def problem(self, error: ApiError) -> bytes:
        return sse.data(openai_error(error)) + sse.DONE
