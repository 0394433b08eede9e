"""The child process that renders chat templates, in jinja's immutable sandbox. Jinja is imported here and nowhere else.

The sandbox keeps a template away from Python objects and from changing its input. Time, memory and crashes are limited
by the process (`twostroke.confined`). The environment is set up as transformers does it, so prompts are the same.

Control tokens are those that the template writes: its constants are compiled with aliases (`text/controls.py`), so the
same characters in a message are told apart from them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import lru_cache
from typing import Any, NamedTuple

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from twostroke.confined import JsonMessage, answer_messages
from twostroke.text.controls import Controls

MAX_ERROR = 500  # characters of an error that the template caused
_TIME_FORMAT = re.compile(r"(?:[^%]|%[-a-zA-Z%]){0,64}\Z")
_WORD = re.compile(r"[A-Za-z_]{4,32}\Z")
_REFUSED_METHODS = frozenset({"encode", "to_bytes", "translate"})  # bytes are no text; sizes grow without need


class _RefusalError(TemplateError):
    """The template called raise_exception: its sentence is meant for the author of the messages."""


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text for training. Rendering keeps what is inside."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    """Jinja's namespace, without names that jinja itself looks up and without writing out its values."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # `self` must be free as a name
        values = dict(*args[1:], **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(args[0], values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        Namespace.__setitem__(self, name, value)

    def __repr__(self) -> str:
        return "<namespace>"


def _check_name(name: object) -> None:
    if not isinstance(name, str) or name.startswith("_") or name in ("jinja_pass_arg", "unsafe_callable"):
        raise SecurityError(f"a namespace cannot hold {name!r}")


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with what chat templates expect. Access to anything unsafe is an error, never an empty text."""

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation], cache_size=0
        )
        self.filters["tojson"] = _to_json
        self.globals |= {"namespace": _Namespace, "raise_exception": _raise_exception}

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in _REFUSED_METHODS and super().is_safe_attribute(obj, attr, value)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        raise SecurityError(f"access to {attribute!r} of a {type(obj).__name__} is not allowed")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON, without the HTML escapes of jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object = "") -> None:
    raise _RefusalError(str(message))


def _strftime_now(now: datetime) -> Callable[[str], str]:
    def strftime_now(form: str) -> str:
        if not isinstance(form, str) or not _TIME_FORMAT.match(form):
            raise SecurityError("strftime_now takes a short format such as '%d %b %Y'")
        return now.strftime(form)

    return strftime_now


class _Compiled(NamedTuple):
    template: Template
    variables: frozenset[str]  # the names that the template reads
    words: frozenset[str]  # constants that may be names of roles


_environment = _Environment()


@lru_cache(maxsize=4)
def _compile(source: str, controls: Controls) -> _Compiled | str:
    """The compiled template, or what is wrong with it."""
    try:
        tree = _environment.parse(source)
        loading: Any = (nodes.Extends, nodes.Include, nodes.Import, nodes.FromImport)
        if next(tree.find_all(loading), None) is not None:
            return "cannot be compiled: a template may not load another file"
        variables = frozenset(name.name for name in tree.find_all(nodes.Name) if name.ctx == "load")
        texts = {constant.value for constant in tree.find_all(nodes.Const) if isinstance(constant.value, str)}
        _hide_controls(tree, controls)
        words = frozenset(text for text in texts if _WORD.match(text))
        return _Compiled(_environment.from_string(tree), variables, words)
    except TemplateSyntaxError as error:
        return f"line {error.lineno}: {error.message}"
    except Exception as error:  # too deep, numbers too long
        return f"cannot be compiled: {error or type(error).__name__}"


def _hide_controls(tree: nodes.Template, controls: Controls) -> None:
    """Aliases for the control tokens in what the template writes. Texts that it compares with messages stay."""
    for data in tree.find_all(nodes.TemplateData):
        data.data = controls.hide(data.data)
    compared = {id(constant) for constant in _compared(tree)}
    for constant in tree.find_all(nodes.Const):
        if isinstance(constant.value, str) and id(constant) not in compared:
            constant.value = controls.hide(constant.value)


def _compared(tree: nodes.Template) -> Iterator[nodes.Const]:
    """Constants in comparisons, tests, and arguments of the methods and filters of strings."""
    for comparison in tree.find_all((nodes.Compare, nodes.Test)):
        yield from comparison.find_all(nodes.Const)
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Getattr) and hasattr(str, call.node.attr) and call.node.attr != "format":
            for argument in call.args:
                yield from _constants(argument)
    for used in tree.find_all(nodes.Filter):
        if used.name == "replace" and used.args:
            yield from _constants(used.args[0])


def _constants(node: nodes.Node) -> Iterator[nodes.Const]:
    if isinstance(node, nodes.Const):
        yield node
    yield from node.find_all(nodes.Const)


def render(message: JsonMessage, controls: Controls) -> JsonMessage:
    """{"text": UTF-8}, or {"input": …} or {"model": …}: an error of the messages or of the template.

    With "text", "marked" is the prompt with an alias for each control token, where a message spells one too. A message
    with "names" is answered by the names that the template reads.
    """
    compiled = _compile(message["source"], controls)
    if message.get("names"):
        return {"names": [] if isinstance(compiled, str) else sorted(compiled.variables)}
    if isinstance(compiled, str):
        return {"model": f"chat template: {compiled}; use another model, or a prompt instead of messages"}
    for name in message["arguments"]:
        if name not in compiled.variables:
            reason = "this model's chat template never reads it, so nothing would change; leave it out"
            return {"input": f"{name}: {reason}"}
    try:
        return _write_prompt(compiled, message, controls)
    except _RefusalError as error:
        return {"input": f"messages: the model's chat template refuses them: {_short(error, controls)}"}
    except SecurityError as error:
        return {"model": f"chat template: does what templates may not: {_short(error, controls)}; use another model"}
    except RecursionError:
        reason = "calls itself or nests its data without end; use another model"
        return {"input": f"messages: the model's chat template {reason}"}
    except MemoryError:
        return {"input": stopped("it needs more memory than it may use")}
    except _TooLongError:
        return {"input": stopped(f"it wrote more than {message['max_output']} characters")}
    except Exception as error:  # any other mistake of a template depends on these messages
        reason = f"{_short(error, controls) or type(error).__name__}; check roles and contents"
        return {"input": f"messages: the model's chat template cannot render them: {reason}"}


def _write_prompt(compiled: _Compiled, message: JsonMessage, controls: Controls) -> JsonMessage:
    special = {name: controls.hide(text) for name, text in message["special"].items()}
    fixed = special | {"strftime_now": _strftime_now(datetime.fromisoformat(message["now"]))}
    given = {**message["arguments"], **message["variables"]}
    marked = _write(compiled.template, {**fixed, **given}, message["max_output"])
    composed = controls.composed(marked, {*compiled.words, *(one["role"] for one in given["messages"])})
    if composed:  # written by the template, or by a message: then they are marked, and the prompt is written again
        other = controls.mark(given, composed)
        if other != given:
            marked = _write(compiled.template, {**fixed, **other}, message["max_output"])
        marked = controls.hide_composed(marked, composed)
    reply = {"text": _utf8(controls.show(marked))}
    return reply | {"marked": _utf8(marked)} if controls.spelled(marked) else reply


class _TooLongError(Exception):
    """The prompt is longer than it may be."""


def _write(template: Template, variables: dict[str, Any], limit: int) -> str:
    written, texts = 0, []
    for text in template.generate(variables):
        written += len(text)
        if written > limit:
            raise _TooLongError
        texts.append(text)
    return "".join(texts)


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")  # a template may write half a character


def stopped(reason: str) -> str:
    return (
        f"messages: rendering the model's chat template was stopped because {reason}; send a shorter conversation, "
        "or use a model with another template"
    )


def _short(error: Exception, controls: Controls) -> str:
    return controls.show(str(error))[:MAX_ERROR].encode("utf-8", "replace").decode()


def main() -> None:
    def prepare(setup: JsonMessage) -> Callable[[JsonMessage], JsonMessage]:
        controls = Controls(setup.get("controls", ()), setup.get("secret", ""))
        return lambda message: render(message, controls)

    answer_messages(prepare)
