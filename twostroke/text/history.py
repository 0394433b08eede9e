"""Earlier answers as the chat template of a family takes them. The server takes back what it gave."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from twostroke.text.formats import MISTRAL, ToolFormat
from twostroke.text.tools import with_parsed_arguments

ChatMessage = Mapping[str, Any]


def for_family(messages: Sequence[ChatMessage], form: ToolFormat | None) -> list[ChatMessage]:
    """The same messages for a template of this format: arguments as objects or as text, reasoning and calls where the
    template looks for them."""
    parsed = with_parsed_arguments(messages)
    if form is None:
        return list(parsed)
    if form.channels:
        return list(_one_call_each([_with_thinking(message) for message in parsed]))
    if form.family == "kimi":
        parsed = _with_numbered_ids(parsed)
    elif form.begin == MISTRAL.begin:
        parsed = [_with_short_ids(message) for message in parsed]
    if form.text_arguments:
        parsed = [_with_text_arguments(message) for message in parsed]
    return [part for message in parsed for part in _apart(message)] if form.calls_alone else parsed


def _with_text_arguments(message: ChatMessage) -> ChatMessage:
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [_text_call(call) for call in calls]} if isinstance(calls, list) else message


def _text_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or isinstance(function.get("arguments"), str):
        return call
    text = json.dumps(function.get("arguments") or {}, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}


def _apart(message: ChatMessage) -> Iterator[ChatMessage]:
    """Content and calls as two messages; one with calls has no content."""
    if not message.get("tool_calls"):
        yield message
        return
    if message.get("content"):
        yield {name: value for name, value in message.items() if name != "tool_calls"}
    yield {**message, "content": None}


def _with_thinking(message: ChatMessage) -> ChatMessage:
    """Reasoning under the name of these templates. They take either it or content beside a call."""
    thought = message.get("reasoning_content") or ""
    if message.get("role") != "assistant" or not thought:
        return message
    kept = {name: value for name, value in message.items() if name != "reasoning_content"}
    if message.get("tool_calls") and message.get("content"):
        return {**kept, "thinking": f"{thought}\n\n{message['content']}", "content": ""}
    return {**kept, "thinking": thought}


def _one_call_each(messages: Sequence[ChatMessage]) -> Iterator[ChatMessage]:
    """A message with several calls as several messages, each followed by its own results."""
    waiting: list[ChatMessage] = []  # calls whose results may follow
    for message in messages:
        if message.get("role") == "tool" and waiting:
            number = message.get("tool_call_id")
            own = next((call for call in waiting if call["tool_calls"][0].get("id") == number), waiting[0])
            waiting.remove(own)
            yield own
            yield message
            continue
        yield from waiting
        waiting = []
        calls = message.get("tool_calls")
        if not isinstance(calls, list) or len(calls) < 2:
            yield message
            continue
        rest = {name: value for name, value in message.items() if name not in ("thinking", "content")} | {"content": ""}
        waiting = [{**(rest if index else message), "tool_calls": [call]} for index, call in enumerate(calls)]
    yield from waiting


def _with_short_ids(message: ChatMessage) -> ChatMessage:
    """Ids of nine letters and digits, the only ones that Mistral's templates take."""
    calls, number = message.get("tool_calls"), message.get("tool_call_id")
    if isinstance(calls, list):
        message = {**message, "tool_calls": [{**call, "id": _short(call.get("id"))} for call in calls]}
    return {**message, "tool_call_id": _short(number)} if isinstance(number, str) else message


def _short(number: object) -> str:
    return re.sub("[^a-zA-Z0-9]", "", str(number))[-9:].rjust(9, "0")


def _with_numbered_ids(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Calls and results under ids with the name and a count through the conversation, as Kimi's models write them."""
    known: dict[str, str] = {}
    written: list[ChatMessage] = []
    count = 0
    for message in messages:
        calls = message.get("tool_calls")
        if isinstance(calls, list):
            renamed = []
            for call in calls:
                name = call.get("function", {}).get("name") if isinstance(call, Mapping) else None
                number = f"functions.{name}:{count}"
                known[str(call.get("id"))] = number
                renamed.append({**call, "id": number})
                count += 1
            message = {**message, "tool_calls": renamed}
        elif message.get("role") == "tool" and str(message.get("tool_call_id")) in known:
            message = {**message, "tool_call_id": known[str(message["tool_call_id"])]}
        written.append(message)
    return written
