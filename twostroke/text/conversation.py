"""A conversation as one prompt: roles, earlier calls, tools, and an answer that is to be continued."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from twostroke.errors import InputError
from twostroke.text.chat import ChatTemplate, RenderedPrompt, checked_messages
from twostroke.text.formats import tool_format
from twostroke.text.generic_tools import with_described_tools, with_generic_tools
from twostroke.text.history import for_family

ROLES = ("system", "developer", "user", "assistant", "tool")


def render_conversation(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    **arguments: Any,
) -> RenderedPrompt:
    """The prompt for these messages. continue_final_message: it ends with the text of the last message, which is the
    beginning of the answer. This waits for the template's process: do not call it on an event loop."""
    form = tool_format(template.source)
    plain: Sequence[Mapping[str, Any]] = for_family(with_known_roles(checked_messages(messages)), form)
    if form is None and (tools or _has_calls(plain)):
        plain, tools = with_generic_tools(plain, tools, template.takes_system), None
    elif form is not None and tools and "tools" not in template.variables:
        plain, tools = with_described_tools(plain, tools, form, template.takes_system), None
    if not continue_final_message:
        return template.render_checked(plain, tools=tools, add_generation_prompt=add_generation_prompt, **arguments)
    last = plain[-1]
    if last["role"] != "assistant" or last.get("tool_calls"):
        raise InputError("messages: only a text of the assistant at their end can be continued; add one")
    mark = str(secrets.randbits(80))
    marked = [*plain[:-1], {**last, "content": last["content"] + mark}]
    prompt = template.render_checked(marked, tools=tools, add_generation_prompt=False, **arguments)
    if mark not in prompt:
        raise InputError("messages: the model's chat template leaves the last one out, so it cannot be continued")
    return RenderedPrompt(
        prompt.partition(mark)[0], None if prompt.marked is None else prompt.marked.partition(mark)[0]
    )


def with_known_roles(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Chat templates have no role `developer`: it is read as `system`. Other roles than those known are refused."""
    for index, message in enumerate(messages):
        if message["role"] not in ROLES:
            raise InputError(f"messages[{index}].role: must be one of {', '.join(ROLES)}, got {message['role']!r}")
    return [{**message, "role": "system"} if message["role"] == "developer" else message for message in messages]


def _has_calls(messages: Sequence[Mapping[str, Any]]) -> bool:
    return any(message["role"] == "tool" or message.get("tool_calls") for message in messages)
