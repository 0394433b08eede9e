"""/v1/responses: OpenAI's newer API. Nothing is stored, so an earlier response cannot be referred to."""

from __future__ import annotations

import secrets
from collections.abc import Collection
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from twostroke.engine.answer import StreamEvent
from twostroke.sampling import Grammar, SamplingParams
from twostroke.serve import sse
from twostroke.serve.api.chat import MAX_MESSAGES, tool_call
from twostroke.serve.fates import Hint, HintFate, RefusedField, refusal
from twostroke.serve.fields import Count, LongText, Many, OrEmpty, Payload, ShortText
from twostroke.serve.forms import json_grammar
from twostroke.serve.sampling import (
    MAX_TOP_LOGPROBS,
    WITH_STREAM,
    ExplainField,
    GenerationHints,
    MessageHints,
    make_params,
)
from twostroke.serve.segments import CONTENT, TOOL_CALL, AnswerSegment, SegmentDelta
from twostroke.serve.service import Generation, GenerationInput, Service
from twostroke.serve.structured import (
    AnswerFormat,
    FormContext,
    FunctionType,
    chat_format,
    function_choice,
    function_tool,
)
from twostroke.serve.thinking import ThinkingFields, ThinkingOption, template_arguments
from twostroke.serve.transport.errors import ApiError, bad_request
from twostroke.serve.transport.http import Exchange
from twostroke.serve.usage import chat_logprobs
from twostroke.text.tools import MAX_TOOLS

LOGPROBS = "message.output_text.logprobs"


# ---- the request ---------------------------------------------------------------------------------------------------


def _text_only(kind: str) -> str:
    if kind not in ("input_text", "output_text", "text", "refusal"):
        raise refusal(f"{kind[:40]!r} parts are not read: this server reads text only, no images, audio or files")
    return kind


class TextContent(Payload):
    type: Annotated[str, AfterValidator(_text_only)]
    text: LongText | None = None
    refusal: LongText | None = None
    annotations: Annotated[Any, HintFate(([],))] = None
    logprobs: Annotated[Any, HintFate(([],))] = None
    parsed: Hint = None
    prompt_cache_breakpoint: Hint = None

    @model_validator(mode="after")
    def _has_text(self) -> TextContent:
        if self.text is None and self.refusal is None:
            raise ValueError("text is missing")
        return self


ContentParts = LongText | Annotated[Many[TextContent], Field(max_length=MAX_MESSAGES)]


def joined(content: str | list[TextContent]) -> str:
    return content if isinstance(content, str) else "".join(part.text or part.refusal or "" for part in content)


class Item(MessageHints):
    """A part of the input. These fields are those of an answer that a client sends back."""

    status: Hint = None


class MessageItem(Item):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: ContentParts
    name: Hint = None
    reasoning_content: Hint = None

    def for_template(self) -> dict[str, Any]:
        return {"role": "system" if self.role == "developer" else self.role, "content": joined(self.content)}


class CallItem(Item):
    type: Literal["function_call"]
    call_id: ShortText
    name: ShortText
    arguments: LongText
    parsed_arguments: Hint = None

    def for_template(self) -> dict[str, Any]:
        call = tool_call(self.call_id, self.name, self.arguments)
        return {"role": "assistant", "content": "", "tool_calls": [call]}


class ResultItem(Item):
    type: Literal["function_call_output"]
    call_id: ShortText
    output: ContentParts

    def for_template(self) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": self.call_id, "content": joined(self.output)}


class ReasoningItem(Item):
    """The reasoning of an earlier answer. It is not given to the model again."""

    type: Literal["reasoning"]
    summary: Annotated[Any, HintFate(([],))] = None
    content: Annotated[Any, HintFate(([],))] = None
    encrypted_content: Hint = None

    def for_template(self) -> None:
        return


AnyItem = CallItem | ResultItem | ReasoningItem | MessageItem


class TextFormat(Payload):
    type: Literal["text", "json_object", "json_schema"]
    name: ShortText | None = None
    description: Hint = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: Hint = None


class TextConfig(Payload):
    format: OrEmpty[TextFormat] = None
    verbosity: Hint = None


class FunctionTool(Payload):
    type: FunctionType
    name: ShortText
    description: LongText | None = None
    parameters: dict[str, Any] | None = None
    strict: Hint = None
    defer_loading: Hint = None
    cache_control: Hint = None


class FunctionChoice(Payload):
    type: Literal["function"]
    name: ShortText


class ResponsesStreamOptions(Payload):
    include_usage: Hint = None
    continuous_usage_stats: Hint = None
    include_obfuscation: Annotated[Any, HintFate((False,))] = None


class ReasoningConfig(Payload):
    effort: ShortText | None = None
    summary: Hint = None
    generate_summary: Hint = None


class ResponsesRequest(ExplainField, GenerationHints, ThinkingFields):
    input: LongText | Annotated[Many[AnyItem], Field(min_length=1, max_length=MAX_MESSAGES)]
    model: ShortText | None = None
    instructions: LongText | None = None
    max_output_tokens: Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    include: Annotated[Any, HintFate(([], [LOGPROBS]))] = None
    stream: bool | None = None
    stream_options: Annotated[ResponsesStreamOptions | None, WITH_STREAM] = None
    text: TextConfig | None = None
    tools: Annotated[Many[FunctionTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: OrEmpty[Literal["auto", "none", "required"] | FunctionChoice] = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningConfig | None = None
    access_programs: Hint = None
    image: Hint = None
    max_tool_calls: Hint = None
    background: RefusedField = None
    conversation: RefusedField = None
    moderation: RefusedField = None
    previous_response_id: RefusedField = None
    prompt: RefusedField = None

    def for_template(self) -> list[dict[str, Any]]:
        opening = [{"role": "system", "content": self.instructions}] if self.instructions else []
        if isinstance(self.input, str):
            return [*opening, {"role": "user", "content": self.input}]
        return opening + merged([message for item in self.input if (message := item.for_template()) is not None])

    @property
    def wants_logprobs(self) -> bool:
        return isinstance(self.include, list) and LOGPROBS in self.include

    def to_params(self, **more: Any) -> SamplingParams:
        if self.top_logprobs and not self.wants_logprobs:
            raise bad_request(f"top_logprobs: only together with include=[{LOGPROBS!r}].", "top_logprobs")
        logprobs = (self.top_logprobs or 0) if self.wants_logprobs else None
        return make_params(
            max_tokens=self.max_output_tokens, unlimited=True, temperature=self.temperature, top_p=self.top_p,
            logprobs=logprobs, **more,
        )  # fmt: skip

    def answer_format(self, context: FormContext) -> AnswerFormat:
        tools = [function_tool(tool.name, tool.description, tool.parameters) for tool in self.tools or ()]
        choice = self.tool_choice
        named = function_choice(choice.name) if isinstance(choice, FunctionChoice) else choice
        form = self._grammar(context.closed)
        return chat_format(context, form, tools, named, self.parallel_tool_calls)

    def _grammar(self, closed: bool) -> Grammar | None:
        form = self.text.format if self.text is not None else None
        if form is None or (form.type == "text" and form.schema_ is None):
            return None
        if form.type == "text":
            raise bad_request("text.format: a text has no schema: send the type json_schema.", "text.format")
        if form.type == "json_schema" and form.schema_ is None:
            raise bad_request("text.format: a json_schema needs a schema.", "text.format")
        return json_grammar(form.schema_, closed, "text.format")

    def template_arguments(self, variables: Collection[str]) -> tuple[dict[str, Any], set[str]]:
        effort = None if self.reasoning is None else self.reasoning.effort
        options = [ThinkingOption("reasoning.effort", effort), *self.thinking_options()]
        return template_arguments(variables, options, self.chat_template_kwargs)


def merged(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Joins tool calls that follow each other into one message."""
    out: list[dict[str, Any]] = []
    for message in messages:
        if out and "tool_calls" in message and out[-1]["role"] == "assistant":
            calls = out[-1].get("tool_calls", []) + message["tool_calls"]
            out[-1] = {**out[-1], "tool_calls": calls}
        else:
            out.append(message)
    return out


# ---- the answer ----------------------------------------------------------------------------------------------------


async def handle(service: Service, exchange: Exchange) -> None:
    request = await service.read(ResponsesRequest, exchange)
    service.check_model(request.model)
    form = await service.off_loop(exchange, exchange.weight, request.answer_format, service.forms)
    params = request.to_params(grammar=form.grammar)
    arguments, hints = request.template_arguments(service.template_variables)
    if request.stream_options is not None and not request.stream:
        hints.add("stream_options")
    exchange.ignored |= hints
    messages = await service.off_loop(exchange, exchange.weight, request.for_template)
    text, tokens = await service.render(exchange, messages, tools=form.tools, **arguments)
    source = "tools" if form.tools else "text.format"
    given = GenerationInput([tokens], params, request.explain, form, text, source, request.cache)
    generation = await service.generate(exchange, given, request.user_name)
    await sse.reply(generation, ResponseWriter(generation, request), request.stream)


def response(head: dict[str, Any], request: ResponsesRequest, params: SamplingParams) -> dict[str, Any]:
    """A response at its beginning. params: with the model's own values where the request has none."""
    return {
        "id": head["id"], "object": "response", "created_at": head["created"], "status": "in_progress",
        "model": head["model"],
        "output": [], "error": None, "incomplete_details": None, "instructions": request.instructions,
        "metadata": request.metadata if isinstance(request.metadata, dict) else {},
        "max_output_tokens": request.max_output_tokens,
        "parallel_tool_calls": request.parallel_tool_calls is not False, "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None} | (dumped(request.reasoning) or {}), "store": False,
        "temperature": params.temperature, "top_p": params.top_p,
        "text": dumped(request.text) or {"format": {"type": "text"}},
        "tool_choice": dumped(request.tool_choice) or "auto",
        "tools": [dumped(tool) for tool in request.tools or ()], "truncation": "disabled", "usage": None,
        "user": request.user_name,
    }  # fmt: skip


def dumped(value: Any) -> Any:
    return value.model_dump(exclude_none=True, by_alias=True) if isinstance(value, Payload) else value


def text_part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


class ResponseWriter(sse.Writer):
    """Items one after the other; the last event carries the whole response."""

    def __init__(self, generation: Generation, request: ResponsesRequest):
        self.generation = generation
        self.reader = generation.readers[0]
        params = generation.stream.answers[0].request.params
        self.begun = response(generation.service.head("resp_"), request, params)
        self.ids: list[str] = []  # of the items
        self.index = -1  # of the newest item
        self.open: AnswerSegment | None = None
        self.sequence = 0

    def whole(self) -> dict[str, Any]:
        sample = self.generation.stream.answers[0].sample
        cut = sample.finish_reason == "length"
        output = []
        for index, segment in enumerate(self.reader.segments):
            scores = self._scores(sample.logprobs) if segment.kind == CONTENT else []
            status = "incomplete" if cut and segment is self.reader.segments[-1] else "completed"
            output.append(self._item(index, segment, status, scores))
        more = {
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": output,
            "usage": self._usage(),
        }
        return self.begun | more | self.generation.extras()

    def _usage(self) -> dict[str, Any]:
        sample = self.generation.stream.answers[0].sample
        prompt, written = len(self.generation.stream.prompts[0]), len(sample.token_ids)
        cached = sample.timeline.cached_tokens
        return {
            "input_tokens": prompt, "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": written, "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + written,
        }  # fmt: skip

    def begin(self) -> bytes:
        started = self._event("response.created", response=self.begun)
        return started + self._event("response.in_progress", response=self.begun)

    def piece(self, choice: int, event: StreamEvent) -> bytes:
        written = b""
        scores = self._scores(event.logprobs)
        for delta in self.reader.push(event):
            if delta.opens:
                written += self._close() + self._open(delta.segment)
            written += self._more(delta, scores)
            scores = []
        return written

    def end(self) -> bytes:
        document = self.whole()
        return self._close(document["status"]) + self._event(f"response.{document['status']}", response=document)

    def problem(self, error: ApiError) -> bytes:
        why = {"code": error.code or "server_error", "message": error.message}
        return self._event("response.failed", response={**self.begun, "status": "failed", "error": why})

    # ---- items -----------------------------------------------------------------------------------------------------

    def _item(self, index: int, segment: AnswerSegment, status: str, scores: list[dict[str, Any]]) -> dict[str, Any]:
        number = self._id(index, segment)
        if segment.kind == CONTENT:
            content = [text_part(segment.text, scores)]
            return {"id": number, "type": "message", "status": status, "role": "assistant", "content": content}
        if segment.kind == TOOL_CALL:
            return {
                "id": number, "type": "function_call", "status": status, "call_id": segment.id, "name": segment.name,
                "arguments": segment.text,
            }  # fmt: skip
        content = [{"type": "reasoning_text", "text": segment.text}] if segment.text else []
        return {"id": number, "type": "reasoning", "summary": [], "content": content}

    def _id(self, index: int, segment: AnswerSegment) -> str:
        prefix = {CONTENT: "msg_", TOOL_CALL: "fc_"}.get(segment.kind, "rs_")
        while len(self.ids) <= index:
            self.ids.append(prefix + secrets.token_hex(12))
        return self.ids[index]

    def _scores(self, logprobs: Any) -> list[dict[str, Any]]:
        return chat_logprobs(self.generation.service.tokenizer, logprobs) if logprobs else []

    # ---- events ----------------------------------------------------------------------------------------------------

    def _event(self, kind: str, /, **fields: Any) -> bytes:
        number, self.sequence = self.sequence, self.sequence + 1
        return sse.typed_event(kind, sequence_number=number, **fields)

    def _place(self) -> dict[str, Any]:
        assert self.open is not None
        return {"item_id": self._id(self.index, self.open), "output_index": self.index}

    def _open(self, segment: AnswerSegment) -> bytes:
        self.index += 1
        self.open = segment
        empty = AnswerSegment(segment.kind, "", segment.number, segment.id, segment.name)
        item = self._item(self.index, empty, "in_progress", [])
        if segment.kind != CONTENT:
            return self._event("response.output_item.added", output_index=self.index, item=item)
        written = self._event("response.output_item.added", output_index=self.index, item=item | {"content": []})
        part = text_part("", [])
        return written + self._event("response.content_part.added", **self._place(), content_index=0, part=part)

    def _more(self, delta: SegmentDelta, scores: list[dict[str, Any]]) -> bytes:
        if not delta.text:
            return b""
        if delta.segment.kind == CONTENT:
            more = {"content_index": 0, "delta": delta.text, "logprobs": scores}
            return self._event("response.output_text.delta", **self._place(), **more)
        if delta.segment.kind == TOOL_CALL:
            return self._event("response.function_call_arguments.delta", **self._place(), delta=delta.text)
        return self._event("response.reasoning_text.delta", **self._place(), content_index=0, delta=delta.text)

    def _close(self, status: str = "completed") -> bytes:
        segment = self.open
        if segment is None:
            return b""
        place = self._place()
        if segment.kind == CONTENT:
            whole = text_part(segment.text, [])
            written = self._event("response.output_text.done", **place, content_index=0, text=segment.text, logprobs=[])
            written += self._event("response.content_part.done", **place, content_index=0, part=whole)
        elif segment.kind == TOOL_CALL:
            more = {"arguments": segment.text, "name": segment.name}
            written = self._event("response.function_call_arguments.done", **place, **more)
        else:
            written = self._event("response.reasoning_text.done", **place, content_index=0, text=segment.text)
        item = self._item(self.index, segment, status, [])
        self.open = None
        return written + self._event("response.output_item.done", output_index=self.index, item=item)
