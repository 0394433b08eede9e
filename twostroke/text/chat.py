"""Messages to one prompt, through the model's own chat template.

The template comes with the checkpoint and is not trusted: `text/render.py` renders it in a child process with limits on
time, memory and output. Clients send messages and a few known arguments, never a template.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from twostroke.confined import Confined, LimitError
from twostroke.errors import InputError, ModelError
from twostroke.text.controls import Controls

MAX_SOURCE = 1 << 16  # characters of a template: twice the longest that is in use
MAX_OUTPUT = 4 << 20  # characters of a rendered prompt
MAX_SECONDS = 2.0  # CPU time of one rendering
MAX_MEMORY = 256 << 20  # bytes that one rendering may allocate
MAX_DEPTH = 32  # of lists and mappings inside a message

# What a request may pass on to a template besides messages and tools. Any other name is refused.
ARGUMENTS = frozenset(
    ("enable_thinking", "thinking", "reasoning_effort", "thinking_budget", "documents", "date_string", "builtin_tools",
     "custom_tools", "tools_in_user_message", "xml_tools", "python_tools", "custom_instructions")
)  # fmt: skip


def renderer(seconds: float = MAX_SECONDS, controls: Controls | None = None) -> Confined:
    """A child process that renders templates. It starts with the first message. controls: of the vocabulary."""
    setup = {} if controls is None else {"controls": controls.texts, "secret": controls.secret}
    return Confined("twostroke.text.render", lambda: setup, seconds=seconds, memory=MAX_MEMORY)


class RenderedPrompt(str):
    """A rendered conversation. `Tokenizer.encode` reads as control tokens only those that the template wrote."""

    marked: str | None  # the same with an alias for each control token, where a message spells one as text

    def __new__(cls, text: str, marked: str | None = None) -> RenderedPrompt:
        prompt = super().__new__(cls, text)
        prompt.marked = marked
        return prompt


class ChatTemplate:
    """A model's chat template. Compiled on first use, so a broken one does not keep its model from completing text.

    special: the texts of bos_token, eos_token, …, which templates refer to by those names. process: where it is
    rendered; templates may share one.
    """

    def __init__(
        self,
        source: str,
        special: Mapping[str, str] | None = None,
        *,
        process: Confined | None = None,
        max_output: int = MAX_OUTPUT,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self.source = source
        self._special = dict(special or {})
        self._process = process or renderer()
        self._max_output = max_output
        self._now = now
        self._variables: frozenset[str] | None = None
        self._takes_system: bool | None = None

    @property
    def variables(self) -> frozenset[str]:
        """The names that the template reads; none if it cannot be compiled. The first call waits for the process."""
        if self._variables is None:
            try:
                self._variables = frozenset(self._answer({"names": True}).get("names", ()))
            except InputError:
                self._variables = frozenset()
        return self._variables

    @property
    def takes_system(self) -> bool:
        """Whether the template has a form for the role system. The first call waits for the process."""
        if self._takes_system is None:
            try:
                self.render([{"role": "system", "content": "a"}, {"role": "user", "content": "b"}])
                self._takes_system = True
            except InputError:
                self._takes_system = False
        return self._takes_system

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **arguments: Any,
    ) -> RenderedPrompt:
        """The prompt for these messages. Encode it with add_special=False: the template writes its own tokens.

        This waits for the child process, at most a few seconds: do not call it on an event loop.
        """
        return self.render_checked(
            checked_messages(messages), add_generation_prompt=add_generation_prompt, tools=tools, **arguments
        )

    def render_checked(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **arguments: Any,
    ) -> RenderedPrompt:
        """The prompt for messages that `checked_messages` made."""
        unknown = sorted(set(arguments) - ARGUMENTS)
        if unknown:
            known = ", ".join(sorted(ARGUMENTS))
            raise InputError(f"{unknown[0]}: is not an argument chat templates may be given; use one of {known}")
        variables = {
            "messages": list(messages),
            "tools": None if tools is None else _plain(list(tools), "tools"),
            "add_generation_prompt": bool(add_generation_prompt),
        }
        given = {name: _plain(value, name) for name, value in arguments.items()}
        if len(self.source) > MAX_SOURCE:
            raise ModelError(
                f"chat template: has {len(self.source)} characters, at most {MAX_SOURCE} are read; use another model, "
                "or a prompt instead of messages"
            )
        return self._ask({"variables": variables, "arguments": given})

    def close(self) -> None:
        """End the child process. The next rendering starts a new one."""
        self._process.close()

    def _ask(self, message: dict[str, Any]) -> RenderedPrompt:
        answer = self._answer(message)
        if "text" in answer:
            marked = answer.get("marked")
            return RenderedPrompt(_from_utf8(answer["text"]), None if marked is None else _from_utf8(marked))
        raise ModelError(answer["model"]) if "model" in answer else InputError(answer["input"])

    def _answer(self, message: dict[str, Any]) -> dict[str, Any]:
        message |= {
            "source": self.source,
            "special": self._special,
            "max_output": self._max_output,
            "now": self._now().isoformat(),
        }
        try:
            return self._process.ask(message)
        except LimitError:
            raise InputError(
                "messages: the model's chat template did not finish within its time and memory; send a shorter "
                "conversation, or use a model with another template"
            ) from None
        except OverflowError:
            raise InputError("messages: has a whole number with more than 64 bits; send it as a string") from None
        except UnicodeError:
            raise InputError("messages: has half a character (a lone surrogate); send valid UTF-8") from None


def _from_utf8(data: bytes) -> str:
    return str(data, "utf-8", "surrogatepass")


def checked_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies of the messages as plain data: each has a role, and its text as one string. Other fields are kept."""
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
    if plain.get("content") is None and (plain.get("tool_calls") or role == "assistant"):
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
    """A copy made of JSON's types only."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):
        return str(value)
    if depth >= MAX_DEPTH:
        raise InputError(f"{where}: is nested deeper than {MAX_DEPTH} levels; flatten it")
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {
            str(key): item if type(item) is str else _plain(item, f"{where}.{key}", depth + 1)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [
            item if type(item) is str else _plain(item, f"{where}[{index}]", depth + 1)
            for index, item in enumerate(value)
        ]
    raise InputError(f"{where}: must be plain JSON data, got {type(value).__name__}")
