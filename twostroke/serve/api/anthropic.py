"""/v1/messages and /v1/messages/count_tokens: Anthropic's API."""

from __future__ import annotations

import json
import secrets
from typing import Annotated, Any, Literal

from pydantic import Field

from twostroke.engine.answer import StreamEvent
from twostroke.sampling import MAX_STOPS, SamplingParams
from twostroke.serve import sse
from twostroke.serve.api.chat import MAX_MESSAGES
from twostroke.serve.fields import Count, Many, Name, Natural, Payload, Text
from twostroke.serve.sampling import ExplainField, StopString, make_params
from twostroke.serve.segments import CONTENT, TOOL_CALL, Segment, SegmentDelta
from twostroke.serve.service import Generation, GenerationInput, Service
from twostroke.serve.structured import AnswerFormat, chat_format, function_choice, function_tool
from twostroke.serve.transport.errors import ApiError, anthropic_error, bad_request
from twostroke.serve.transport.http import Exchange
from twostroke.text.tokenizer import Tokenizer
from twostroke.text.tools import MAX_TOOLS

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens"}


# ---- the request ---------------------------------------------------------------------------------------------------


class CacheControl(Payload):
    """Accepted without effect: every prompt is cached."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(Payload):
    type: Literal["text"]
    text: Text
    cache_control: CacheControl | None = None
    citations: None = None


class ToolUseBlock(Payload):
    type: Literal["tool_use"]
    id: Name
    name: Name
    input: dict[str, Any]
    cache_control: CacheControl | None = None


class ToolResultBlock(Payload):
    type: Literal["tool_result"]
    tool_use_id: Name
    content: Text | Annotated[Many[TextBlock], Field(max_length=MAX_MESSAGES)] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


class ThinkingBlock(Payload):
    """The reasoning of an earlier answer. It is not given to the model again."""

    type: Literal["thinking"]
    thinking: Text
    signature: Text | None = None


Block = Annotated[TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock, Field(discriminator="type")]


class Turn(Payload):
    role: Literal["user", "assistant"]
    content: Text | Annotated[Many[Block], Field(max_length=MAX_MESSAGES)]

    def for_template(self) -> list[dict[str, Any]]:
        """One turn may become several messages: tool results have their own role."""
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        results = [result_message(block) for block in self.content if isinstance(block, ToolResultBlock)]
        calls = [call_of(block) for block in self.content if isinstance(block, ToolUseBlock)]
        text = "".join(block.text for block in self.content if isinstance(block, TextBlock))
        if calls:
            return [{"role": self.role, "content": text, "tool_calls": calls}]
        return [*results, {"role": self.role, "content": text}] if text or not results else results


def result_message(block: ToolResultBlock) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": joined(block.content)}


def call_of(block: ToolUseBlock) -> dict[str, Any]:
    function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
    return {"id": block.id, "type": "function", "function": function}


def joined(content: str | list[TextBlock] | None) -> str:
    return content if isinstance(content, str) else "".join(block.text for block in content or ())


class AnthropicTool(Payload):
    type: Literal["custom"] | None = None
    name: Name
    description: Text | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: CacheControl | None = None


class AnthropicChoice(Payload):
    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class NoThinking(Payload):
    type: Literal["disabled"]


class Metadata(Payload):
    user_id: Name | None = None


class Conversation(Payload):
    """The fields that /v1/messages and /v1/messages/count_tokens have in common."""

    model: Name
    messages: Annotated[Many[Turn], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: Text | Annotated[Many[TextBlock], Field(max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[Many[AnthropicTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: AnthropicChoice | None = None
    thinking: NoThinking | None = None
    cache_control: CacheControl | None = None

    def for_template(self) -> list[dict[str, Any]]:
        if self.messages[-1].role == "assistant":
            raise bad_request("messages: the last one must be the user's: no answer can be begun for it.", "messages")
        opening = [{"role": "system", "content": joined(self.system)}] if self.system else []
        return opening + [message for turn in self.messages for message in turn.for_template()]

    def answer_format(self, tokenizer: Tokenizer) -> AnswerFormat:
        tools = [function_tool(tool.name, tool.description, tool.input_schema) for tool in self.tools or ()]
        wanted = self.tool_choice
        choice: Any = None
        if wanted is not None and wanted.type == "tool":
            if wanted.name is None:
                raise bad_request("tool_choice.name: is missing.", "tool_choice.name")
            choice = function_choice(wanted.name)
        elif wanted is not None:
            choice = "required" if wanted.type == "any" else wanted.type
        parallel = wanted is None or not wanted.disable_parallel_tool_use
        return chat_format(tokenizer, None, tools, choice, parallel)


class MessagesRequest(Conversation, ExplainField):
    max_tokens: Count
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0.0, le=1.0)] | None = None  # 1 is the limit of this API
    top_p: float | None = None
    top_k: Natural | None = None
    stop_sequences: Annotated[Many[StopString], Field(max_length=MAX_STOPS)] | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None

    def to_params(self, **more: Any) -> SamplingParams:
        return make_params(
            max_tokens=self.max_tokens, temperature=self.temperature, top_p=self.top_p, top_k=self.top_k,
            stop=self.stop_sequences, **more,
        )  # fmt: skip


class CountTokensRequest(Conversation):
    pass


# ---- the answer ----------------------------------------------------------------------------------------------------


async def handle(service: Service, exchange: Exchange) -> None:
    request = await service.read(MessagesRequest, exchange)
    text, tokens, form = await read(service, exchange, request)
    params = request.to_params(grammar=form.grammar)
    user = request.metadata.user_id if request.metadata is not None else None
    given = GenerationInput([tokens], params, request.explain, form, text, "tools")
    generation = await service.generate(exchange, given, user)
    await sse.reply(generation, MessageWriter(generation), request.stream)


async def count_tokens(service: Service, exchange: Exchange) -> None:
    request = await service.read(CountTokensRequest, exchange)
    _, tokens, _ = await read(service, exchange, request)
    await exchange.respond(200, {"input_tokens": len(tokens)})


async def read(service: Service, exchange: Exchange, request: Conversation) -> tuple[str, list[int], AnswerFormat]:
    """The prompt in text and in tokens, and the format of its answer."""
    service.check_model(request.model)
    form = await service.off_loop(exchange, exchange.weight, request.answer_format, service.tokenizer)
    messages = await service.off_loop(exchange, exchange.weight, request.for_template)
    text, tokens = await service.render(exchange, messages, tools=form.tools)
    return text, tokens, form


def text_block(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def thinking_block(text: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": text, "signature": ""}


def tool_block(segment: Segment, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": segment.id, "name": segment.name, "input": arguments}


def whole_block(segment: Segment) -> dict[str, Any]:
    if segment.kind == CONTENT:
        return text_block(segment.text)
    if segment.kind != TOOL_CALL:
        return thinking_block(segment.text)
    try:
        return tool_block(segment, json.loads(segment.text))
    except ValueError:
        return tool_block(segment, {})  # cut off by max_tokens, as stop_reason says


def empty_block(segment: Segment) -> dict[str, Any]:
    if segment.kind == CONTENT:
        return text_block("")
    return tool_block(segment, {}) if segment.kind == TOOL_CALL else thinking_block("")


def block_delta(delta: SegmentDelta) -> dict[str, Any]:
    if delta.segment.kind == CONTENT:
        return {"type": "text_delta", "text": delta.text}
    if delta.segment.kind == TOOL_CALL:
        return {"type": "input_json_delta", "partial_json": delta.text}
    return {"type": "thinking_delta", "thinking": delta.text}


class MessageWriter(sse.Writer):
    """Content blocks one after the other, each opened, filled and closed."""

    def __init__(self, generation: Generation):
        self.generation = generation
        self.reader = generation.readers[0]
        self.begun = False
        self.open = False
        self.index = -1  # of the newest block

    def whole(self) -> dict[str, Any]:
        blocks = [whole_block(segment) for segment in self.reader.segments] or [text_block("")]
        return self._message(blocks, *self._ending()) | self.generation.extras()

    def _message(self, blocks: list[dict[str, Any]], reason: str | None, stop: str | None) -> dict[str, Any]:
        return {
            "id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant",
            "model": self.generation.service.name, "content": blocks, "stop_reason": reason, "stop_sequence": stop,
            "usage": self._usage(),
        }  # fmt: skip

    def _ending(self) -> tuple[str, str | None]:
        """Why the answer ended, and the stop sequence if one ended it."""
        answer = self.generation.stream.answers[0]
        reason = self.reader.finish_reason(answer.sample.finish_reason)
        if reason == "tool_calls":
            return "tool_use", None
        stop = answer.stops.push("")[1] if answer.stops is not None and reason == "stop" else None
        return ("stop_sequence", stop) if stop else (STOP_REASONS[reason or "stop"], None)

    def _usage(self) -> dict[str, Any]:
        """In this API, input_tokens leaves out the tokens that were read from the cache."""
        sample = self.generation.stream.answers[0].sample
        cached = sample.timeline.cached_tokens
        return {
            "input_tokens": len(self.generation.stream.prompts[0]) - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": len(sample.token_ids),
        }

    def piece(self, choice: int, event: StreamEvent) -> bytes:
        deltas = self.reader.push(event)
        written = b"" if self.begun else self._start()
        for delta in deltas:
            if delta.opens:
                written += self._close() + self._open(delta.segment)
            if delta.text:
                written += sse.typed_event("content_block_delta", index=self.index, delta=block_delta(delta))
        return written

    def _start(self) -> bytes:
        """Sent with the first token: by then it is known how much of the prompt was cached."""
        self.begun = True
        return sse.typed_event("message_start", message=self._message([], None, None))

    def _open(self, segment: Segment) -> bytes:
        self.index += 1
        self.open = True
        return sse.typed_event("content_block_start", index=self.index, content_block=empty_block(segment))

    def _close(self) -> bytes:
        if not self.open:
            return b""
        self.open = False
        return sse.typed_event("content_block_stop", index=self.index)

    def end(self) -> bytes:
        reason, stop = self._ending()
        delta, extras = {"stop_reason": reason, "stop_sequence": stop}, self.generation.extras()
        written = self._close() + sse.typed_event("message_delta", delta=delta, usage=self._usage(), **extras)
        return written + sse.typed_event("message_stop")

    def problem(self, error: ApiError) -> bytes:
        return sse.typed_event("error", error=anthropic_error(error)["error"])
