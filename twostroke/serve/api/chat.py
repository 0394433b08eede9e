"""/v1/chat/completions."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from twostroke.engine.answer import StreamEvent
from twostroke.sampling import SamplingParams
from twostroke.serve import sse
from twostroke.serve.answering import question_of
from twostroke.serve.fates import Hint, HintFate, RefusedField, refusal
from twostroke.serve.fields import Count, LongText, Many, Payload, ShortText
from twostroke.serve.sampling import MAX_TOP_LOGPROBS, MessageHints, SamplingFields, same_value
from twostroke.serve.segments import CONTENT, REASONING, SegmentDelta
from twostroke.serve.service import Generation, GenerationInput, Service
from twostroke.serve.structured import ToolFields
from twostroke.serve.thinking import ThinkingFields, template_arguments
from twostroke.serve.transport.errors import ApiError, bad_request, openai_error
from twostroke.serve.transport.http import Exchange
from twostroke.serve.usage import chat_logprobs
from twostroke.text.tools import new_call_id

MAX_MESSAGES = 4096
THOUGHTS = ("thinking", "redacted_thinking")  # parts of an earlier answer, which are not given to the model again


# ---- the request ---------------------------------------------------------------------------------------------------


def _text_only(kind: str) -> str:
    if kind not in ("text", "refusal", *THOUGHTS):
        raise refusal(f"{kind[:40]!r} parts are not read: this server reads text only, no images, audio or files")
    return kind


class ContentPart(Payload):
    type: Annotated[str, AfterValidator(_text_only)]
    text: LongText | None = None
    refusal: LongText | None = None
    cache_control: Hint = None
    annotations: Hint = None
    prompt_cache_breakpoint: Hint = None
    thinking: Hint = None
    signature: Hint = None
    data: Hint = None

    @model_validator(mode="after")
    def _has_text(self) -> ContentPart:
        if self.text is None and self.refusal is None and self.type not in THOUGHTS:
            raise ValueError("text is missing")
        return self


class CalledFunction(Payload):
    name: ShortText
    arguments: LongText | dict[str, Any] | None = None
    parsed_arguments: Hint = None


class ToolCall(Payload):
    id: ShortText | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None

    def for_template(self) -> dict[str, Any]:
        given = self.function.arguments
        arguments = json.dumps(given, ensure_ascii=False) if isinstance(given, dict) else given or "{}"
        return tool_call(self.id or new_call_id(), self.function.name, arguments)


class Message(MessageHints):
    """The fields after `reasoning_content` are those of an answer that a client sends back as it got it."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: LongText | Annotated[Many[ContentPart], Field(max_length=MAX_MESSAGES)] | None = None
    name: ShortText | None = None
    tool_calls: Annotated[Many[ToolCall], Field(max_length=128)] | None = None
    tool_call_id: ShortText | None = None
    reasoning_content: LongText | None = None
    refusal: LongText | None = None
    annotations: Annotated[Any, HintFate(([],))] = None
    audio: RefusedField = None
    function_call: RefusedField = None

    def for_template(self) -> dict[str, Any]:
        """Chat templates have no role `developer`: it is read as `system`."""
        content: Any = self.content
        if isinstance(content, list):
            read = [part for part in content if part.type not in THOUGHTS]
            content = [{"type": "text", "text": part.text or part.refusal or ""} for part in read]
        message = {
            "role": "system" if self.role == "developer" else self.role, "content": content or self.refusal or content,
            "name": self.name or None, "tool_call_id": self.tool_call_id, "reasoning_content": self.reasoning_content,
            "tool_calls": [call.for_template() for call in self.tool_calls or ()] or None,
        }  # fmt: skip
        return {name: value for name, value in message.items() if value is not None}


Messages = Annotated[Many[Message], Field(min_length=1, max_length=MAX_MESSAGES)]


class ChatRequest(SamplingFields, ToolFields, ThinkingFields):
    messages: Messages
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None  # the last message is the beginning of the answer
    modalities: Annotated[Many[Literal["text"]], Field(max_length=1)] | None = None
    prediction: Hint = None
    audio: RefusedField = None
    function_call: RefusedField = None
    functions: RefusedField = None
    moderation: RefusedField = None
    web_search_options: RefusedField = None

    def to_params(self, **more: Any) -> SamplingParams:
        if self.top_logprobs and not self.logprobs:
            raise bad_request("top_logprobs: only together with logprobs=true.", "top_logprobs")
        longest = same_value(self, "max_tokens", "max_completion_tokens")
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return self.params(max_tokens=longest, unlimited=True, logprobs=logprobs, **more)

    def for_template(self) -> list[dict[str, Any]]:
        return [message.for_template() for message in self.messages]

    def template_arguments(self, variables: Collection[str]) -> tuple[dict[str, Any], set[str]]:
        """The arguments for a template that reads these variables, and the fields that are hints because it has no
        switch."""
        return template_arguments(variables, self.thinking_options(), self.chat_template_kwargs)

    def ending(self) -> dict[str, bool]:
        """How the prompt ends: with the beginning of an answer, or with a message that is continued."""
        if self.continue_final_message and self.add_generation_prompt:
            reason = "continue_final_message: does not go together with add_generation_prompt: send one of them."
            raise bad_request(reason, "continue_final_message")
        if self.continue_final_message:
            return {"continue_final_message": True}
        return {"add_generation_prompt": self.add_generation_prompt is not False}


# ---- the answer ----------------------------------------------------------------------------------------------------


async def handle(service: Service, exchange: Exchange) -> None:
    request = await service.read(ChatRequest, exchange)
    service.check_model(request.model)
    form = await service.off_loop(exchange, exchange.weight, request.answer_format, service.forms)
    if request.skip_special_tokens is False:
        form = form._replace(visible=service.tokenizer.special_ids)
    params = request.to_params(grammar=form.grammar)
    arguments, hints = request.template_arguments(service.template_variables)
    exchange.ignored |= hints | request.hints()
    messages = await service.off_loop(exchange, exchange.weight, request.for_template)
    question = None
    if service.answers is not None or service.topics is not None:
        before = (messages[:-1], form.tools, arguments, request.ending())
        question = question_of(messages, before, form.tools is not None)
    if service.answers is not None and question is not None:
        question = service.answers.begin(exchange, question, params, form.visible, request.cache)
    text, tokens = await service.render(exchange, messages, tools=form.tools, **request.ending(), **arguments)
    given = GenerationInput(
        [tokens], params, request.explain, form, text, request.grammar_field, request.cache, question
    )
    generation = await service.generate(exchange, given, request.user_name)
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
        self.usage_in_chunks = self.whole_events = request.usage_in_chunks
        self.written = 0  # tokens of the chunks so far
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
        self.written += len(event.token_ids)
        scores = None if event.logprobs is None else chat_logprobs(self.tokenizer, event.logprobs)
        deltas = reader.push(event)
        if not deltas and not scores and event.finish_reason is None:
            return b""  # half a character, or text that may become a tool call
        written = b""
        if choice not in self.begun:
            self.begun.add(choice)
            written = self._chunk(choice, {"role": "assistant", "content": ""})
        for delta in deltas:
            if scores is None and delta.segment.kind == CONTENT and not self.usage_in_chunks:
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
        return sse.data(self._document([one]) | self._usage() | (extras or {}))

    def _usage(self) -> dict[str, Any]:
        """The usage in a chunk: so far, or null where only the last chunk has it."""
        if self.usage_in_chunks:
            return {"usage": self.generation.usage(self.written)}
        return {"usage": None} if self.include_usage else {}

    def _document(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self.head, "object": "chat.completion.chunk", "choices": choices}

    def end(self) -> bytes:
        if not self.include_usage:
            return sse.DONE
        return sse.data(self._document([]) | {"usage": self.generation.usage()}) + sse.DONE

    def problem(self, error: ApiError) -> bytes:
        return sse.data(openai_error(error)) + sse.DONE
