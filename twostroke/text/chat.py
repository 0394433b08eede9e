"""Messages to one prompt, through the model's own chat template.

The template comes with the checkpoint and is never trusted: it runs in `sandbox.Sandbox` under a time and an output
budget. Clients send messages and a few known arguments, never a template.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from types import CodeType
from typing import Any

from jinja2.environment import Template
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError

from twostroke.errors import InputError, ModelError
from twostroke.text.budget import Budget, BudgetError
from twostroke.text.sandbox import Sandbox

MAX_SOURCE = 1 << 16  # characters of a template: the longest in the wild have half, and compiling takes its time
MAX_OUTPUT = 4 << 20  # characters of a rendered prompt
MAX_SECONDS = 2.0
MAX_DEPTH = 32  # of lists and mappings inside a message

# What a request may pass on to a template besides messages and tools. Anything else is refused by name.
ARGUMENTS = frozenset(
    ("enable_thinking", "thinking", "reasoning_effort", "thinking_budget", "documents", "date_string", "builtin_tools",
     "custom_tools", "tools_in_user_message", "xml_tools", "python_tools", "custom_instructions")
)  # fmt: skip
_TIME_FORMAT = re.compile(r"(?:[^%]|%[-a-zA-Z%]){0,64}\Z")


class _RefusalError(TemplateError):
    """The template called raise_exception: its sentence is meant for whoever wrote the messages."""


class ChatTemplate:
    """A model's chat template. Compiled on first use, so a broken one does not keep its model from completing text.

    special: the texts of bos_token, eos_token, …, which templates refer to by those names.
    """

    def __init__(
        self,
        source: str,
        special: Mapping[str, str] | None = None,
        *,
        seconds: float = MAX_SECONDS,
        max_output: int = MAX_OUTPUT,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self.source = source
        self._special = dict(special or {})
        self._seconds = seconds
        self._max_output = max_output
        self._idle: deque[tuple[Budget, Template]] = deque()  # sandboxes for reuse: each serves one thread at a time
        self._functions: dict[str, Callable[..., Any]] = {
            "raise_exception": _raise_exception,
            "strftime_now": _strftime(now),
        }

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **arguments: Any,
    ) -> str:
        """The prompt for these messages. Encode it with add_special=False: the template writes its own tokens."""
        unknown = sorted(set(arguments) - ARGUMENTS)
        if unknown:
            known = ", ".join(sorted(ARGUMENTS))
            raise InputError(f"{unknown[0]}: is not an argument chat templates may be given; use one of {known}")
        variables = {
            **self._special,
            **{name: _plain(value, name) for name, value in arguments.items()},
            "messages": checked_messages(messages),
            "tools": None if tools is None else _plain(list(tools), "tools"),
            "add_generation_prompt": bool(add_generation_prompt),
        }
        if isinstance(self._code, str):
            raise ModelError(f"chat template: {self._code}; use another model, or a prompt instead of messages")
        for name in arguments:
            if name not in self._read:
                raise InputError(
                    f"{name}: this model's chat template never reads it, so nothing would change; leave it out"
                )
        try:
            return self._run(self._code, variables)
        except _RefusalError as error:
            raise InputError(f"messages: the model's chat template refuses them: {error}") from None
        except BudgetError as error:
            raise InputError(
                f"messages: rendering the model's chat template was stopped because {error}; send a shorter "
                "conversation, or use a model with another template"
            ) from None
        except SecurityError as error:
            raise ModelError(f"chat template: does what templates may not: {error}; use another model") from None
        except RecursionError:
            raise InputError(
                "messages: the model's chat template calls itself or nests its data without end; use another model"
            ) from None
        except Exception as error:  # whatever else a template does wrong, it does with these messages
            raise InputError(
                f"messages: the model's chat template cannot render them: {error or type(error).__name__}; "
                "check roles and contents"
            ) from error

    @cached_property
    def _code(self) -> CodeType | str:
        """The compiled template, or why there is none: a failure is kept too, so it is paid for once."""
        if len(self.source) > MAX_SOURCE:
            return f"has {len(self.source)} characters, more than any honest one"
        try:
            return self._sandbox().compile_template(self.source)
        except TemplateSyntaxError as error:
            return f"line {error.lineno}: {error.message}"
        except Exception as error:  # too deep, numbers too long, tags that load files
            return f"cannot be compiled: {error or type(error).__name__}"

    @cached_property
    def _read(self) -> frozenset[str]:
        """Variables that a template which compiles looks at."""
        return self._sandbox().variables_read(self.source)

    def _sandbox(self) -> Sandbox:
        return Sandbox(Budget(self._seconds), self._functions)

    def _run(self, code: CodeType, variables: dict[str, Any]) -> str:
        try:
            budget, template = self._idle.pop()
        except IndexError:
            sandbox = self._sandbox()
            budget, template = sandbox.budget, Template.from_code(sandbox, code, sandbox.globals)
        budget.start()
        written, parts = 0, []
        for part in template.root_render_func(template.new_context(variables)):
            written += len(part)
            if written > self._max_output:
                raise BudgetError(f"it wrote more than {self._max_output} characters")
            parts.append(part)
        self._idle.append((budget, template))
        return "".join(parts)


def _raise_exception(message: object = "") -> None:
    raise _RefusalError(str(message))


def _strftime(now: Callable[[], datetime]) -> Callable[[str], str]:
    def strftime_now(form: str) -> str:
        if not isinstance(form, str) or not _TIME_FORMAT.match(form):
            raise SecurityError("strftime_now takes a short format such as '%d %b %Y'")
        return now().strftime(form)

    return strftime_now


def checked_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages as plain data of ours: a role each, text as one string, everything else passed through."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise InputError('messages: must be a list such as [{"role": "user", "content": "Hi"}]')
    if not messages:
        raise InputError("messages: is empty; send at least one")
    return [_checked_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _checked_message(message: object, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InputError(f"{where}: must be an object with role and content, got {type(message).__name__}")
    plain: dict[str, Any] = _plain(message, where)
    role = plain.get("role")
    if not isinstance(role, str) or not role:
        raise InputError(f"{where}.role: must be a string such as 'user', got {role!r}")
    if plain.get("content") is None and plain.get("tool_calls"):
        plain["content"] = ""
    elif isinstance(plain.get("content"), list):
        plain["content"] = "\n".join(_part_text(part, where) for part in plain["content"])
    elif not isinstance(plain.get("content"), str):
        kind = "missing" if "content" not in plain else f"a {type(plain['content']).__name__}"
        raise InputError(f"{where}.content: must be a string or a list of text parts, it is {kind}.")
    return plain


def _part_text(part: object, where: str) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise InputError(f'{where}.content: only text parts are read, {{"type": "text", "text": …}}, got {kind!r}')


def _plain(value: Any, where: str, depth: int = 0) -> Any:
    """A copy made of JSON's types only: a template must never hold an object with methods of its own."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):
        return str(value)
    if depth >= MAX_DEPTH:
        raise InputError(f"{where}: is nested deeper than {MAX_DEPTH} levels; flatten it")
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _plain(item, f"{where}.{key}", depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{where}[{index}]", depth + 1) for index, item in enumerate(value)]
    raise InputError(f"{where}: must be plain JSON data, got {type(value).__name__}")
