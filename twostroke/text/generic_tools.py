"""Tools for models whose chat template has no form for them: a preamble, calls and results as plain text.

The form is that of Hermes and Qwen, which many models have seen. `text/parse.py` reads the calls back.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from twostroke.text.formats import GENERIC, ToolFormat
from twostroke.text.history import ChatMessage

PREAMBLE = """You can call functions. These are available:
<tools>
{tools}
</tools>
To call a function, answer only with its name and arguments as JSON, in this form:
{example}"""
EXAMPLE = ("the function's name", '{"an argument": "its value"}')


def with_generic_tools(
    messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]] | None, system: bool = True
) -> list[ChatMessage]:
    """Messages of roles that every template knows. system: the template has the role system; without it the preamble
    and the system's text stand at the beginning of the first user message."""
    written: list[ChatMessage] = []
    before = ""  # the role of the message before
    for message in messages:
        role, content = message["role"], message.get("content") or ""
        if role == "tool":  # results that follow each other are one message: some templates want turns to alternate
            first = f"{written.pop()['content']}\n" if before == "tool" else ""
            result = f"{first}<tool_response>\n{content}\n</tool_response>"
            written.append({"role": "user", "content": result})
        elif message.get("tool_calls"):
            calls = "\n".join(_call(call) for call in message["tool_calls"])
            written.append({"role": "assistant", "content": f"{content}\n{calls}" if content else calls})
        else:
            written.append(message)
        before = role
    return _with_opening(written, _preamble(tools, GENERIC) if tools else "", system)


def with_described_tools(
    messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]], form: ToolFormat, system: bool = True
) -> list[ChatMessage]:
    """The messages for a template that writes calls in a form of its own, but does not tell the model which tools there
    are."""
    return _with_opening(list(messages), _preamble(tools, form), system)


def _with_opening(written: list[ChatMessage], opening: str, system: bool) -> list[ChatMessage]:
    if written and written[0].get("role") == "system" and (opening or not system):
        own = str(written.pop(0).get("content") or "")
        opening = f"{own}\n\n{opening}" if own and opening else own or opening
    if not opening:
        return written
    return [{"role": "system", "content": opening}, *written] if system else _before_user(opening, written)


def _preamble(tools: Sequence[Mapping[str, Any]], form: ToolFormat) -> str:
    lines = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    name, arguments = EXAMPLE
    body = arguments if form.head else f'{{"name": "{name}", "{form.arguments}": {arguments}}}'
    call = f"{form.begin}{form.lead.format(name=name)}{body}{form.tail}{form.end}"
    return PREAMBLE.format(tools=lines, example=f"{form.section[0]}{call}{form.section[1]}")


def _call(call: Mapping[str, Any]) -> str:
    function = call.get("function", call)
    written = {"name": function.get("name"), "arguments": function.get("arguments")}
    return f"{GENERIC.begin}\n{json.dumps(written, ensure_ascii=False)}\n{GENERIC.end}"


def _before_user(opening: str, written: list[ChatMessage]) -> list[ChatMessage]:
    for index, message in enumerate(written):
        if message.get("role") == "user":
            content = f"{opening}\n\n{message.get('content') or ''}"
            return [*written[:index], {**message, "content": content}, *written[index + 1 :]]
    return [{"role": "user", "content": opening}, *written]
