"""/v1/messages and /v1/messages/count_tokens: Anthropic's API."""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from twostroke.engine.answer import StreamEvent
from twostroke.sampling import MAX_STOPS, SamplingParams
from twostroke.serve import sse
from twostroke.serve.api.chat import MAX_MESSAGES
from twostroke.serve.fates import Hint, RefusedField, refusal
from twostroke.serve.fields import Count, LongText, Many, OrEmpty, Payload, ShortText
from twostroke.serve.forms import json_grammar
from twostroke.serve.sampling import (
    ExplainField,
    GenerationHints,
    MessageHints,
    StopString,
    TopK,
    make_params,
    stop_strings,
)
from twostroke.serve.segments import CONTENT, TOOL_CALL, AnswerSegment, SegmentDelta
from twostroke.serve.service import Generation, GenerationInput, Service
from twostroke.serve.structured import AnswerFormat, FormContext, chat_format, function_choice, function_tool
from twostroke.serve.thinking import ThinkingFields, ThinkingOption, template_arguments
from twostroke.serve.transport.errors import ApiError, anthropic_error, bad_request
from twostroke.serve.transport.http import Exchange
from twostroke.text.tools import MAX_TOOLS

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens"}


# ---- the request ---------------------------------------------------------------------------------------------------


class TextBlock(Payload):
    type: Literal["text"]
    text: LongText
    cache_control: Hint = None
    citations: RefusedField = None


class ToolUseBlock(Payload):
    type: Literal["tool_use"]
    id: ShortText
    name: ShortText
    input: dict[str, Any]
    cache_control: Hint = None
    caller: Hint = None


class ToolResultBlock(Payload):
    type: Literal["tool_result"]
    tool_use_id: ShortText
    content: LongText | Annotated[Many[TextBlock], Field(max_length=MAX_MESSAGES)] | None = None
    is_error: bool | None = None
    cache_control: Hint = None


class ThinkingBlock(Payload):
    """The reasoning of an earlier answer. It is not given to the model again."""

    type: Literal["thinking", "redacted_thinking"]
    thinking: LongText | None = None
    signature: Hint = None
    data: Hint = None
    cache_control: Hint = None


def _known_block(value: Any) -> Any:
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind not in BLOCK_TYPES:
        raise refusal(f"{kind[:40]!r} blocks are not read: this server reads text only, no images or documents")
    return value


BLOCK_TYPES = ("text", "tool_use", "tool_result", "thinking", "redacted_thinking")
AnyBlock = Annotated[TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock, Field(discriminator="type")]
Block = Annotated[AnyBlock, BeforeValidator(_known_block)]


class Turn(MessageHints):
    role: Literal["user", "assistant"]
    content: LongText | Annotated[Many[Block], Field(max_length=MAX_MESSAGES)]
    name: Hint = None
    reasoning_content: Hint = None

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


def _only_functions(kind: str | None) -> str | None:
    if kind not in (None, "custom"):
        raise refusal(f"{str(kind)[:40]!r} tools are not run here: nothing is searched, fetched or executed")
    return kind


class AnthropicTool(Payload):
    type: Annotated[str | None, AfterValidator(_only_functions)] = None
    name: ShortText
    description: LongText | None = None
    input_schema: dict[str, Any] = Field(default_factory=dict)
    strict: Hint = None
    cache_control: Hint = None
    eager_input_streaming: Hint = None
    defer_loading: Hint = None
    allowed_callers: Hint = None
    input_examples: Hint = None


class AnthropicChoice(Payload):
    type: Literal["auto", "any", "tool", "none"]
    name: ShortText | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(Payload):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Payload):
    effort: ShortText | None = None
    format: OrEmpty[OutputFormat] = None


class Conversation(GenerationHints, ThinkingFields):
    """The fields that /v1/messages and /v1/messages/count_tokens have in common."""

    model: ShortText
    messages: Annotated[Many[Turn], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: LongText | Annotated[Many[TextBlock], Field(max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[Many[AnthropicTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: OrEmpty[AnthropicChoice] = None
    output_config: OutputConfig | None = None
    output_format: OrEmpty[OutputFormat] = None  # an older name of output_config.format
    diagnostics: Hint = None
    inference_geo: Hint = None
    speed: Hint = None
    user_profile_id: Hint = None
    workspace_id: Hint = None
    container: RefusedField = None
    mcp_servers: RefusedField = None

    def for_template(self) -> list[dict[str, Any]]:
        opening = [{"role": "system", "content": joined(self.system)}] if self.system else []
        return opening + [message for turn in self.messages for message in turn.for_template()]

    def ending(self) -> dict[str, bool]:
        """A text of the assistant at the end is the beginning of the answer."""
        return {"continue_final_message": True} if self.messages[-1].role == "assistant" else {}

    def template_arguments(self, variables: Collection[str]) -> tuple[dict[str, Any], set[str]]:
        options = (
            ThinkingOption("output_config.effort", None if self.output_config is None else self.output_config.effort),
            *self.thinking_options(),
        )
        return template_arguments(variables, options, self.chat_template_kwargs)

    def answer_format(self, context: FormContext) -> AnswerFormat:
        tools = [function_tool(tool.name, tool.description, tool.input_schema) for tool in self.tools or ()]
        wanted = self.tool_choice
        choice: Any = None
        if wanted is not None and wanted.type == "tool":
            if wanted.name is None:
                raise bad_request("tool_choice.name: is missing.", "tool_choice.name")
            choice = function_choice(wanted.name)
        elif wanted is not None:
            choice = "required" if wanted.type == "any" else wanted.type
        single = None if wanted is None else wanted.disable_parallel_tool_use
        form = (self.output_config.format if self.output_config is not None else None) or self.output_format
        grammar = None if form is None else json_grammar(form.schema_, context.closed, "output_config.format")
        return chat_format(context, grammar, tools, choice, None if single is None else not single)


class MessagesRequest(Conversation, ExplainField):
    max_tokens: Count
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0.0, le=1.0)] | None = None  # 1 is the limit of this API
    top_p: float | None = None
    top_k: TopK | None = None
    stop_sequences: Annotated[Many[StopString], Field(max_length=MAX_STOPS)] | None = None
    stream_options: Hint = None

    @property
    def user_name(self) -> str | None:
        """The name that the client gave for its user, for the log."""
        name = self.metadata.get("user_id") if isinstance(self.metadata, dict) else None
        return name[:64] if isinstance(name, str) else super().user_name

    def to_params(self, **more: Any) -> SamplingParams:
        return make_params(
            max_tokens=self.max_tokens, temperature=self.temperature, top_p=self.top_p, top_k=self.top_k,
            stop=stop_strings(self.stop_sequences), **more,
        )  # fmt: skip


class CountTokensRequest(Conversation):
    pass


# ---- the answer ----------------------------------------------------------------------------------------------------


async def handle(service: Service, exchange: Exchange) -> None:
    request = await service.read(MessagesRequest, exchange)
    text, tokens, form = await read(service, exchange, request)
    params = request.to_params(grammar=form.grammar)
    given = GenerationInput(
        [tokens], params, request.explain, form, text, "tools" if form.tools else "output_config.format", request.cache
    )
    generation = await service.generate(exchange, given, request.user_name)
    await sse.reply(generation, MessageWriter(generation), request.stream)


async def count_tokens(service: Service, exchange: Exchange) -> None:
    request = await service.read(CountTokensRequest, exchange)
    _, tokens, _ = await read(service, exchange, request)
    await exchange.respond(200, {"input_tokens": len(tokens)})


async def read(service: Service, exchange: Exchange, request: Conversation) -> tuple[str, list[int], AnswerFormat]:
    """The prompt in text and in tokens, and the format of its answer."""
    service.check_model(request.model)
    form = await service.off_loop(exchange, exchange.weight, request.answer_format, service.forms)
    arguments, hints = request.template_arguments(service.template_variables)
    exchange.ignored |= hints
    messages = await service.off_loop(exchange, exchange.weight, request.for_template)
    text, tokens = await service.render(exchange, messages, tools=form.tools, **request.ending(), **arguments)
    return text, tokens, form


def text_block(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def thinking_block(text: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": text, "signature": ""}


def tool_block(segment: AnswerSegment, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": segment.id, "name": segment.name, "input": arguments}


def whole_block(segment: AnswerSegment) -> dict[str, Any]:
    if segment.kind == CONTENT:
        return text_block(segment.text)
    if segment.kind != TOOL_CALL:
        return thinking_block(segment.text)
    try:
        return tool_block(segment, json.loads(segment.text))
    except ValueError:
        return tool_block(segment, {})  # cut off by max_tokens, as stop_reason says


def empty_block(segment: AnswerSegment) -> dict[str, Any]:
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

    def _open(self, segment: AnswerSegment) -> bytes:
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
