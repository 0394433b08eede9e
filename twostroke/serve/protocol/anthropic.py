"""/v1/messages: Anthropic's shapes, and how they become the ones the rest of the server knows."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field

from twostroke.sampling import MAX_STOPS, SamplingParams
from twostroke.serve.errors import bad_request
from twostroke.serve.protocol.base import Name, Shape, Text
from twostroke.serve.protocol.chat import MAX_MESSAGES
from twostroke.serve.protocol.constraints import MAX_TOOLS, Constraints, function_tool
from twostroke.serve.protocol.sampling import MAX_COUNT, Count, PrefixCache, Share, StopString, Unit, make_params

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens"}


class CacheControl(Shape):
    """Prompts are cached without being told to; the mark is understood and changes nothing."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(Shape):
    type: Literal["text"]
    text: Text
    cache_control: CacheControl | None = None
    citations: None = None


class ToolUseBlock(Shape):
    type: Literal["tool_use"]
    id: Name
    name: Name
    input: dict[str, Any]
    cache_control: CacheControl | None = None


class ToolResultBlock(Shape):
    type: Literal["tool_result"]
    tool_use_id: Name
    content: Text | Annotated[list[TextBlock], Field(max_length=MAX_MESSAGES)] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


class ThinkingBlock(Shape):
    """What an earlier answer thought. Models are not shown it again."""

    type: Literal["thinking"]
    thinking: Text
    signature: Text | None = None


Block = Annotated[TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock, Field(discriminator="type")]


class Turn(Shape):
    role: Literal["user", "assistant"]
    content: Text | Annotated[list[Block], Field(max_length=MAX_MESSAGES)]

    def plain(self) -> list[dict[str, Any]]:
        """One turn may be several messages: results of tools have a role of their own."""
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


class AnthropicTool(Shape):
    type: Literal["custom"] | None = None
    name: Name
    description: Text | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: CacheControl | None = None


class AnthropicChoice(Shape):
    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class NoThinking(Shape):
    type: Literal["disabled"]


class Metadata(Shape):
    user_id: Name | None = None


class Conversation(Shape):
    """What /v1/messages and its count_tokens have in common."""

    model: Name
    messages: Annotated[list[Turn], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: Text | Annotated[list[TextBlock], Field(max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[list[AnthropicTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: AnthropicChoice | None = None
    thinking: NoThinking | None = None
    cache_control: CacheControl | None = None

    def plain(self) -> list[dict[str, Any]]:
        if self.messages[-1].role == "assistant":
            raise bad_request("messages: the last one must be the user's: no answer can be begun for it.", "messages")
        opening = [{"role": "system", "content": joined(self.system)}] if self.system else []
        return opening + [message for turn in self.messages for message in turn.plain()]

    def constraints(self) -> Constraints:
        """Tools as OpenAI's API has them."""
        tools = [function_tool(tool.name, tool.description, tool.input_schema) for tool in self.tools or ()]
        choice: Any = None
        if self.tool_choice is not None:
            choice = {"auto": "auto", "any": "required", "none": "none"}.get(self.tool_choice.type)
            if self.tool_choice.type == "tool":
                if self.tool_choice.name is None:
                    raise bad_request("tool_choice.name: is missing.", "tool_choice.name")
                choice = {"type": "function", "function": {"name": self.tool_choice.name}}
        alone = self.tool_choice is not None and self.tool_choice.disable_parallel_tool_use
        return Constraints.model_validate(
            {"tools": tools or None, "tool_choice": choice, "parallel_tool_calls": False if alone else None}
        )


class MessagesRequest(Conversation):
    max_tokens: Count
    stream: bool | None = None
    temperature: Unit | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Field(ge=0, le=MAX_COUNT)] | None = None
    stop_sequences: Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    prefix_cache: PrefixCache | None = None

    def to_params(self, **more: Any) -> SamplingParams:
        return make_params(
            max_tokens=self.max_tokens, temperature=self.temperature, top_p=self.top_p, top_k=self.top_k,
            stop=self.stop_sequences, **more,
        )  # fmt: skip


class CountTokensRequest(Conversation):
    pass


def usage(prompt: int, cached: int, written: int) -> dict[str, Any]:
    """Here input_tokens are those that were not read from the cache."""
    return {
        "input_tokens": prompt - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": written,
    }


def message(
    number: str, model: str, blocks: list[dict[str, Any]], reason: str | None, stop: str | None, used: dict[str, Any]
) -> dict[str, Any]:
    return {
        "id": number, "type": "message", "role": "assistant", "model": model, "content": blocks,
        "stop_reason": reason, "stop_sequence": stop, "usage": used,
    }  # fmt: skip


def text_block(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def thinking_block(text: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": text, "signature": ""}


def tool_block(number: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": number, "name": name, "input": arguments}


def block_start(index: int, block: dict[str, Any]) -> dict[str, Any]:
    return {"type": "content_block_start", "index": index, "content_block": block}


def block_delta(index: int, kind: str, field: str, text: str) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": index, "delta": {"type": kind, field: text}}


def block_stop(index: int) -> dict[str, Any]:
    return {"type": "content_block_stop", "index": index}


def message_delta(reason: str, stop: str | None, used: dict[str, Any]) -> dict[str, Any]:
    return {"type": "message_delta", "delta": {"stop_reason": reason, "stop_sequence": stop}, "usage": used}
