"""Tools as clients describe them, checked."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Mapping, Sequence
from typing import Any

import jiter

from twostroke.errors import InputError
from twostroke.record import Record
from twostroke.text.formats import ToolFormat
from twostroke.text.tokenizer import Tokenizer

MAX_TOOLS = 128
MAX_PARAMETERS = 1 << 16  # characters of one tool's schema
MAX_DESCRIPTION = 1 << 14
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}\Z")
_ID_LETTERS = string.ascii_letters + string.digits
_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


class Tool(Record):
    """A function a model may call. `parameters`: a JSON schema of an object."""

    name: str
    parameters: Mapping[str, Any]


class ToolChoice(Record):
    """mode: "auto" (the model decides), "none", "required" (at least one call) or "named" (one call, of `name`)."""

    mode: str
    name: str | None = None

    @property
    def forced(self) -> bool:
        return self.mode in ("required", "named")


def marker_ids(tokenizer: Tokenizer, form: ToolFormat | None) -> frozenset[int]:
    """Special tokens whose text the parser needs, although decoders skip special tokens."""
    texts = ("<think>", "</think>", *(() if form is None else form.marks))
    found = (tokenizer.token_id(text) for text in texts)
    return frozenset(number for number in found if number is not None and number in tokenizer.special_ids)


# ---- what clients send -----------------------------------------------------------------------------------------------


def read_tools(tools: object) -> tuple[Tool, ...]:
    """The tools of a request in the form of OpenAI's API."""
    if tools is None:
        return ()
    if isinstance(tools, (str, bytes)) or not isinstance(tools, Sequence):
        raise InputError("tools: must be a list of objects with type and function")
    if len(tools) > MAX_TOOLS:
        raise InputError(f"tools: has {len(tools)} entries, at most {MAX_TOOLS} are taken")
    known: dict[str, Tool] = {}
    for index, value in enumerate(tools):
        tool = _read_tool(value, f"tools[{index}]")
        if tool.name in known:
            raise InputError(f"tools[{index}].function.name: {tool.name!r} is used twice; give each tool its own name")
        known[tool.name] = tool
    return tuple(known.values())


def _read_tool(value: object, where: str) -> Tool:
    if not isinstance(value, Mapping) or value.get("type") != "function":
        raise InputError(f'{where}.type: only tools of type "function" are supported')
    function = value.get("function")
    if not isinstance(function, Mapping):
        raise InputError(f"{where}.function: must be an object with a name")
    name, description = function.get("name"), function.get("description")
    if not isinstance(name, str) or not _NAME.match(name):
        raise InputError(f"{where}.function.name: must be 1 to 64 letters, digits, underscores or dashes")
    if description is not None and (not isinstance(description, str) or len(description) > MAX_DESCRIPTION):
        raise InputError(f"{where}.function.description: must be a string of at most {MAX_DESCRIPTION} characters")
    return Tool(name, _read_parameters(function.get("parameters"), f"{where}.function.parameters"))


def _read_parameters(value: object, where: str) -> Mapping[str, Any]:
    if value is None:
        return _NO_PARAMETERS
    if not isinstance(value, Mapping):
        raise InputError(f"{where}: must be a JSON schema, an object")
    if value.get("type", "object") != "object":
        raise InputError(f'{where}.type: must be "object": arguments are passed by name')
    try:
        size = len(json.dumps(value, ensure_ascii=False, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"{where}: is not plain JSON data: {error}") from None
    if size > MAX_PARAMETERS:
        raise InputError(f"{where}: has {size} characters, at most {MAX_PARAMETERS} are taken")
    return {"type": "object", **value}


def read_choice(choice: object, tools: Sequence[Tool]) -> ToolChoice:
    """tool_choice of a request. None: "auto" where there are tools."""
    if choice is None:
        return ToolChoice("auto" if tools else "none")
    if choice in ("auto", "none"):
        return ToolChoice(str(choice) if tools else "none")
    if not tools:
        raise InputError("tool_choice: asks for a call, but there are no tools")
    if choice == "required":
        return ToolChoice("required")
    function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise InputError(
            'tool_choice: must be "auto", "none", "required" or {"type": "function", "function": {"name": …}}'
        )
    if all(tool.name != name for tool in tools):
        raise InputError(f"tool_choice.function.name: {name!r} is not among the tools")
    return ToolChoice("named", name)


def with_parsed_arguments(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Messages in which the arguments of earlier calls are objects, as templates expect; clients send JSON text."""
    return [
        {**message, "tool_calls": [_parsed_call(call) for call in calls]}
        if isinstance(message, Mapping) and isinstance(calls := message.get("tool_calls"), list)
        else message
        for message in messages
    ]


def _parsed_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(arguments, str):
        return call
    return {**call, "function": {**function, "arguments": read_arguments(arguments)}}


def read_arguments(text: str) -> Any:
    """The arguments of a call as an object. Those of an answer that `max_tokens` cut are closed where they were cut;
    a text that is no JSON is one argument."""
    try:
        found = jiter.from_json(text.encode() or b"{}", partial_mode="trailing-strings")
    except (ValueError, UnicodeEncodeError):
        return {"text": text}
    return found if isinstance(found, dict) else {"text": text}


def new_call_id() -> str:
    """An id for a call: nine letters and digits, the only form that every family's template accepts."""
    return "".join(secrets.choice(_ID_LETTERS) for _ in range(9))
