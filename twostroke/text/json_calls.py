"""Calls written as JSON objects with a name and arguments."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from functools import partial

from twostroke.text.reading import END, MAX_DEPTH, Call, Characters, NotACallError, Reading, in_string

ARGUMENTS = ("arguments", "parameters")  # models mix the two up
OTHER_KEYS = ("name", "type", "id")  # further keys that a call may have


class JsonCalls(Characters):
    def _series(self, char: str, bare: bool = False) -> Reading:
        """One object after the other, with semicolons or white space between them."""
        while True:
            char = yield from self._object(char, bare)
            char = yield from self._space(char)
            if char == ";":
                char = yield from self._space((yield from self._keep(char)))
            if char != "{":
                return char

    def _list(self, char: str) -> Reading:
        char = yield from self._expect("[", char)
        while True:
            char = yield from self._space(char)
            char = yield from self._object(char)
            char = yield from self._space(char)
            if char != ",":
                break
            char = yield from self._keep(char)
        char = yield from self._expect("]", char)
        self._held.clear()
        return char

    def _object(self, char: str, bare: bool = False) -> Reading:
        """One call: a name and arguments in any order. It is certain when the arguments open after the name."""
        name: str | None = None
        arguments: str | None = None
        number = -1  # of the call, once it is certain
        char = yield from self._space((yield from self._expect("{", char)))
        while True:
            key, char = yield from self._string(char)
            char = yield from self._space(char)
            char = yield from self._space((yield from self._expect(":", char)))
            if key == "name" and name is None:
                name, char = yield from self._string(char)
                if not self._is_known(name):
                    raise NotACallError(char)
            elif key in ARGUMENTS and arguments is None and name is not None and char == "{":
                number, arguments = self._begin(name), ""
                char = yield from self._value(char, partial(self._emit_arguments, number))
            elif key in ARGUMENTS and arguments is None:
                arguments, char = yield from self._held_value(char)
            elif key in OTHER_KEYS or number >= 0:
                _, char = yield from self._held_value(char)
            else:
                raise NotACallError(char)
            char = yield from self._space(char)
            if char != ",":
                break
            char = yield from self._space((yield from self._keep(char)))
        char = yield from self._expect("}", char)
        if number < 0:
            self._emit_whole_call(name, arguments, bare, char)
        self._held.clear()
        return char

    def _emit_whole_call(self, name: str | None, arguments: str | None, bare: bool, char: str) -> None:
        """A call whose arguments were not streamed: they come before the name, or as a string, or are missing."""
        if name is None or (arguments is None and bare):
            raise NotACallError(char)
        try:
            value = json.loads(arguments) if arguments is not None else None
        except (ValueError, RecursionError):
            raise NotACallError(char) from None
        if not isinstance(value, (dict, str)) and value is not None:
            raise NotACallError(char)
        text = value if isinstance(value, str) else arguments if isinstance(value, dict) else "{}"
        self._emit(Call(self._begin(name), None, str(text)))

    def _string(self, char: str) -> Generator[None, str, tuple[str, str]]:
        """A JSON string, held back: its value and the character after it."""
        if char != '"':
            raise NotACallError(char)
        raw, char = yield from self._held_value(char)
        try:
            return str(json.loads(raw, strict=False)), char
        except ValueError:
            raise NotACallError(char) from None

    def _held_value(self, char: str) -> Generator[None, str, tuple[str, str]]:
        parts: list[str] = []
        char = yield from self._value(char, parts.append, hold=True)
        return "".join(parts), char

    def _value(self, char: str, sink: Callable[[str], None], hold: bool = False) -> Reading:
        """One JSON value, each character passed to `sink`. Only brackets and quotes are checked."""
        open_brackets: list[str] = []
        quoted = escaped = False
        while char != END:
            last = False
            if quoted:
                last = char == '"' and not escaped and not open_brackets
                quoted, escaped = in_string(char, quoted, escaped)
            elif char == '"':
                quoted = True
            elif char in "{[":
                open_brackets.append("}" if char == "{" else "]")
                if len(open_brackets) > MAX_DEPTH:
                    raise NotACallError(char)
            elif char in "}]":
                if not open_brackets:
                    return char  # after a number or a word
                if open_brackets.pop() != char:
                    raise NotACallError(char)
                last = not open_brackets
            elif not open_brackets and char in ", \t\r\n":
                return char
            sink(char)
            char = (yield from self._keep(char)) if hold else (yield)
            if last:
                return char
        raise NotACallError(END)
