"""Calls whose arguments stand between tags, as Qwen3-Coder, GLM and DeepSeek V4 write them.

A value is text; whether "3" is a number or a string is what the tool's schema says.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping
from functools import partial
from typing import Any

from twostroke.text.formats import Tags, ToolFormat
from twostroke.text.reading import END, SPACE, Characters, Content, Delta, NotACallError, Reading

_WORDS = {"True": "true", "False": "false", "None": "null"}  # Python's, which chat templates write
_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}


class TaggedCalls(Characters):
    def _tagged(self, form: ToolFormat, tags: Tags, char: str) -> Reading:
        """One call up to and including its end mark."""
        name, char = yield from self._tagged_name(tags, char)
        if not self._is_known(name):
            raise NotACallError(char)
        sink = partial(self._emit_arguments, self._begin(name))
        sink("{")
        ends = tuple(mark for mark in (tags.close, form.end) if mark)
        separator = ""
        while True:
            char = yield from self._space(char)
            char, mark = yield from self._tag((tags.key[0], *ends), char, sink)
            self._held.clear()
            if mark in ends:
                break
            key: list[str] = []
            char = yield from self._until((tags.key[1],), char, key.append)
            char = yield from self._argument(tags, name, separator + json.dumps("".join(key), ensure_ascii=False), char)
            separator = ", "
        sink("}")
        if mark == tags.close:
            char = yield from self._space(char)
            char, mark = yield from self._marks((form.end,), char)
            if mark or char == END:
                self._held.clear()
        return char

    def _tagged_name(self, tags: Tags, char: str) -> Generator[None, str, tuple[str, str]]:
        before, after = tags.name
        for wanted in before:
            char = yield from self._expect(wanted, char)
        name = ""
        while char != END and len(name) <= 64 and (char not in after if after else char not in SPACE and char != "<"):
            name += char
            char = yield from self._keep(char)
        for wanted in after:
            char = yield from self._expect(wanted, char)
        return name, char

    def _tag(
        self, marks: tuple[str, ...], char: str, sink: Callable[[str], None]
    ) -> Generator[None, str, tuple[str, str]]:
        """One of these tags. Anything else ends the call, and is content."""
        closed = False

        def stray(text: str) -> Delta:
            nonlocal closed
            closed = True
            sink("}")
            return Content(text)

        char, mark = yield from self._marks(marks, char, stray)
        if mark:
            return char, mark
        if char != END and not closed:
            sink("}")
        if char == END:
            self._held.clear()  # cut short
        raise NotACallError(char)

    def _argument(self, tags: Tags, name: str, opening: str, char: str) -> Reading:
        """One value; `opening`: the text before it in JSON."""
        sink = partial(self._emit_arguments, self.calls - 1)
        is_text: bool | None = None
        if tags.values[0][0]:
            if tags.values[0][0][0] not in SPACE:
                char = yield from self._space(char)
            char, mark = yield from self._tag(tuple(text for text, _ in tags.values), char, sink)
            self._held.clear()
            is_text = dict(tags.values)[mark]
        if tags.lines and char == "\n":
            char = yield
        types = self._types(name, json.loads(opening.removeprefix(", ")))
        ends = (tags.value_end, *((f"\n{tags.value_end}",) if tags.lines else ()))
        if is_text or (is_text is None and types == {"string"}):
            sink(f'{opening}: "')
            char = yield from self._until(ends, char, lambda text: sink(json.dumps(text, ensure_ascii=False)[1:-1]))
            sink('"')
            return char
        value: list[str] = []
        char = yield from self._until(ends, char, value.append)
        sink(f"{opening}: {json_value(''.join(value), types)}")
        return char

    def _types(self, name: str, key: str) -> set[str]:
        """The types that the schema of a tool allows for an argument; none if it does not say."""
        schema = self._names.get(name) if isinstance(self._names, Mapping) else None
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        return allowed_types(properties.get(key) if isinstance(properties, Mapping) else None)


def allowed_types(schema: Any) -> set[str]:
    """The JSON types of a schema's values as far as it says them; empty: it does not."""
    if not isinstance(schema, Mapping):
        return set()
    given = schema.get("type")
    if isinstance(given, str):
        return {given}
    if isinstance(given, list):
        return {item for item in given if isinstance(item, str)}
    for word in ("anyOf", "oneOf"):
        if isinstance(schema.get(word), list):
            found = [allowed_types(item) for item in schema[word]]
            return set().union(*found) if all(found) else set()
    values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else []
    return {_type_of(value) for value in values}


def _type_of(value: object) -> str:
    return "null" if value is None else _TYPES.get(type(value), "object")


def json_value(text: str, types: set[str]) -> str:
    """The text of an argument as JSON. types: those that its schema allows; empty: any."""
    stripped = text.strip()
    try:
        value = json.loads(_WORDS.get(stripped, stripped), parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    found = _type_of(value)
    fits = not types or found in types or (found == "integer" and "number" in types)
    if not fits and "string" in types:
        return json.dumps(text, ensure_ascii=False)
    return json.dumps(value, ensure_ascii=False)


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
