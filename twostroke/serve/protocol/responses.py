"""/v1/responses: OpenAI's newer shapes, without what needs a server that remembers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from twostroke.sampling import SamplingParams
from twostroke.serve.errors import bad_request
from twostroke.serve.protocol.base import Name, Shape, Text
from twostroke.serve.protocol.chat import MAX_MESSAGES
from twostroke.serve.protocol.constraints import MAX_TOOLS, Constraints, function_tool
from twostroke.serve.protocol.sampling import MAX_TOP_LOGPROBS, Count, PrefixCache, Share, make_params

LOGPROBS = "message.output_text.logprobs"


class TextContent(Shape):
    type: Literal["input_text", "output_text"]
    text: Text
    annotations: Annotated[list[None], Field(max_length=0)] | None = None
    logprobs: list[Any] | None = None


class MessageItem(Shape):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[TextContent], Field(max_length=MAX_MESSAGES)]
    id: Name | None = None
    status: Name | None = None

    def plain(self) -> dict[str, Any]:
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class CallItem(Shape):
    type: Literal["function_call"]
    call_id: Name
    name: Name
    arguments: Text
    id: Name | None = None
    status: Name | None = None

    def plain(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        call = {"id": self.call_id, "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}


class ResultItem(Shape):
    type: Literal["function_call_output"]
    call_id: Name
    output: Text
    id: Name | None = None
    status: Name | None = None

    def plain(self) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": self.call_id, "content": self.output}


class ReasoningItem(Shape):
    """What an earlier answer thought. Models are not shown it again."""

    type: Literal["reasoning"]
    id: Name | None = None
    summary: list[Any] | None = None
    content: list[Any] | None = None
    encrypted_content: None = None
    status: Name | None = None

    def plain(self) -> None:
        return


Item = CallItem | ResultItem | ReasoningItem | MessageItem


class TextFormat(Shape):
    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    description: Text | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextConfig(Shape):
    format: TextFormat | None = None
    verbosity: None = None


class FunctionTool(Shape):
    type: Literal["function"]
    name: Name
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionChoice(Shape):
    type: Literal["function"]
    name: Name


class ResponsesStreamOptions(Shape):
    include_obfuscation: Literal[False] | None = None


class ResponsesRequest(Shape):
    input: Text | Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES)]
    model: Name | None = None
    instructions: Text | None = None
    max_output_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0.0, le=100.0)] | None = None
    top_p: Share | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    include: Annotated[list[Literal["message.output_text.logprobs"]], Field(max_length=1)] | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    text: TextConfig | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["auto", "none", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    metadata: Annotated[dict[Name, Annotated[str, Field(max_length=512)]], Field(max_length=16)] | None = None
    user: Name | None = None
    store: Literal[False] | None = None  # nothing is kept, so nothing can be referred to later
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    service_tier: Literal["auto", "default"] | None = None
    previous_response_id: None = None
    conversation: None = None
    prompt: None = None
    reasoning: None = None
    max_tool_calls: None = None
    prefix_cache: PrefixCache | None = None

    def plain(self) -> list[dict[str, Any]]:
        opening = [{"role": "system", "content": self.instructions}] if self.instructions else []
        if isinstance(self.input, str):
            return [*opening, {"role": "user", "content": self.input}]
        return opening + merged([message for item in self.input if (message := item.plain()) is not None])

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    def to_params(self, **more: Any) -> SamplingParams:
        if self.top_logprobs and not self.wants_logprobs:
            raise bad_request(f"top_logprobs: only together with include=[{LOGPROBS!r}].", "top_logprobs")
        logprobs = (self.top_logprobs or 0) if self.wants_logprobs else None
        return make_params(
            max_tokens=self.max_output_tokens, unlimited=True, temperature=self.temperature, top_p=self.top_p,
            logprobs=logprobs, **more,
        )  # fmt: skip

    def constraints(self) -> Constraints:
        """Formats and tools as /v1/chat/completions has them."""
        tools = [function_tool(tool.name, tool.description, tool.parameters) for tool in self.tools or ()]
        choice: Any = self.tool_choice
        if isinstance(choice, FunctionChoice):
            choice = {"type": "function", "function": {"name": choice.name}}
        return Constraints.model_validate(
            {"response_format": self._format(), "tools": tools or None, "tool_choice": choice,
             "parallel_tool_calls": self.parallel_tool_calls}
        )  # fmt: skip

    def _format(self) -> dict[str, Any] | None:
        form = self.text.format if self.text is not None else None
        if form is None or form.type != "json_schema":
            return None if form is None else {"type": form.type}
        if form.name is None or form.schema_ is None:
            raise bad_request("text.format: a json_schema needs name and schema.", "text.format")
        schema = {"name": form.name, "description": form.description, "schema": form.schema_, "strict": form.strict}
        return {"type": "json_schema", "json_schema": schema}


def merged(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Calls that follow each other belong to one message."""
    out: list[dict[str, Any]] = []
    for message in messages:
        if out and "tool_calls" in message and out[-1]["role"] == "assistant":
            calls = out[-1].get("tool_calls", []) + message["tool_calls"]
            out[-1] = {**out[-1], "tool_calls": calls}
        else:
            out.append(message)
    return out


def response(number: str, model: str, created: int, request: ResponsesRequest) -> dict[str, Any]:
    """A response that has just begun; `finished` completes it."""
    return {
        "id": number, "object": "response", "created_at": created, "status": "in_progress", "model": model,
        "output": [], "error": None, "incomplete_details": None, "instructions": request.instructions,
        "metadata": request.metadata or {}, "max_output_tokens": request.max_output_tokens,
        "parallel_tool_calls": request.parallel_tool_calls is not False, "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None}, "store": False,
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "top_p": 1.0 if request.top_p is None else request.top_p,
        "text": dumped(request.text) or {"format": {"type": "text"}},
        "tool_choice": dumped(request.tool_choice) or "auto",
        "tools": [dumped(tool) for tool in request.tools or ()], "truncation": "disabled", "usage": None,
        "user": request.user,
    }  # fmt: skip


def dumped(value: Any) -> Any:
    return value.model_dump(exclude_none=True, by_alias=True) if isinstance(value, Shape) else value


def finished(begun: dict[str, Any], output: list[dict[str, Any]], reason: str, used: dict[str, Any]) -> dict[str, Any]:
    cut = reason == "length"
    details = {"reason": "max_output_tokens"} if cut else None
    status = "incomplete" if cut else "completed"
    return {**begun, "status": status, "incomplete_details": details, "output": output, "usage": used}


def failed(begun: dict[str, Any], code: str | None, message: str) -> dict[str, Any]:
    return {**begun, "status": "failed", "error": {"code": code or "server_error", "message": message}}


def usage(prompt: int, cached: int, written: int) -> dict[str, Any]:
    return {
        "input_tokens": prompt, "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": written, "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": prompt + written,
    }  # fmt: skip


def text_part(text: str, logprobs: list[dict[str, Any]] | None) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs or []}


def message_item(number: str, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
    return {"id": number, "type": "message", "status": status, "role": "assistant", "content": content}


def call_item(number: str, call: str, status: str, name: str, arguments: str) -> dict[str, Any]:
    return {
        "id": number, "type": "function_call", "status": status, "call_id": call, "name": name, "arguments": arguments,
    }  # fmt: skip


def reasoning_item(number: str, text: str) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}] if text else []
    return {"id": number, "type": "reasoning", "summary": [], "content": content}
