"""/v1/chat/completions: what is asked, and the answer whole or in chunks."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from twostroke.sampling import SamplingParams
from twostroke.serve.errors import bad_request
from twostroke.serve.protocol.base import Name, Shape, Text
from twostroke.serve.protocol.constraints import Constraints
from twostroke.serve.protocol.sampling import MAX_TOP_LOGPROBS, Count, Sampling
from twostroke.text.chat import ARGUMENTS

MAX_MESSAGES = 4096
Role = Literal["system", "developer", "user", "assistant", "tool"]


class TextPart(Shape):
    type: Literal["text"]
    text: Text


class CalledFunction(Shape):
    name: Name
    arguments: Text


class ToolCall(Shape):
    id: Name
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class Message(Shape):
    role: Role
    content: Text | Annotated[list[TextPart], Field(max_length=MAX_MESSAGES)] | None = None
    name: Name | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=128)] | None = None
    tool_call_id: Name | None = None
    reasoning_content: Text | None = None
    refusal: None = None  # what an answer carries that a client sends back as it came
    annotations: Annotated[list[None], Field(max_length=0)] | None = None
    audio: None = None
    function_call: None = None

    def plain(self) -> dict[str, Any]:
        """For the chat template, which knows no developers."""
        message = self.model_dump(exclude_none=True, exclude={"annotations"})
        if self.role == "developer":
            message["role"] = "system"
        return message


class ChatRequest(Sampling, Constraints):
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    reasoning_effort: Name | None = None
    chat_template_kwargs: dict[Name, Any] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    modalities: Annotated[list[Literal["text"]], Field(min_length=1, max_length=1)] | None = None

    def to_params(self, **more: Any) -> SamplingParams:
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise bad_request("max_tokens and max_completion_tokens mean the same: send one.", "max_tokens")
        if self.top_logprobs is not None and not self.logprobs:
            raise bad_request("top_logprobs: only together with logprobs=true.", "top_logprobs")
        longest = self.max_tokens or self.max_completion_tokens
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return self.params(max_tokens=longest, unlimited=True, logprobs=logprobs, **more)

    def template_arguments(self) -> dict[str, Any]:
        arguments = dict(self.chat_template_kwargs or {})
        for name in arguments:
            if name not in ARGUMENTS:
                raise bad_request(f"chat_template_kwargs: {name!r} may not be set.", "chat_template_kwargs")
        if self.reasoning_effort is not None:
            arguments["reasoning_effort"] = self.reasoning_effort
        return arguments


def completion(head: dict[str, Any], choices: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
    return {**head, "object": "chat.completion", "choices": choices, "usage": usage}


def message(text: str, reasoning: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
    document: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
    if reasoning:
        document["reasoning_content"] = reasoning
    if calls:
        document["tool_calls"] = calls
    return document


def call(number: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}


def choice(
    index: int, written: dict[str, Any], reason: str | None, logprobs: list[dict[str, Any]] | None
) -> dict[str, Any]:
    return {"index": index, "message": written, "logprobs": scored(logprobs), "finish_reason": reason}


def chunk(head: dict[str, Any], choices: list[dict[str, Any]]) -> dict[str, Any]:
    return {**head, "object": "chat.completion.chunk", "choices": choices}


def delta(
    index: int, content: dict[str, Any], reason: str | None = None, logprobs: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    return {"index": index, "delta": content, "logprobs": scored(logprobs), "finish_reason": reason}


def scored(logprobs: list[dict[str, Any]] | None) -> dict[str, Any] | None:
    return None if logprobs is None else {"content": logprobs, "refusal": None}
