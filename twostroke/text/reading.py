"""Reading an answer one character at a time: deltas, held text, marks. The parts of `parse.py` share it.

Parts are written as generators: `char = yield` waits for the next character, and each generator returns the first
character that it did not use.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Generator
from typing import NamedTuple

END = ""  # the character after the last one
SPACE = " \t\r\n"
MAX_DEPTH = 200  # of lists and objects in one value

Reading = Generator[None, str, str]  # is sent characters; returns the first one that it did not use


class Content(NamedTuple):
    text: str


class Reasoning(NamedTuple):
    text: str


class Call(NamedTuple):
    """More of call `number`. Only the first delta of each call has its name."""

    number: int
    name: str | None
    arguments: str


Delta = Content | Reasoning | Call


def pauses(marks: str) -> re.Pattern[str]:
    """Where plain text may end: at the first character of a mark, at the end, and at white space before either."""
    return re.compile(rf"(?<![{SPACE}])[{SPACE}]*(?:[{re.escape(marks)}]|\Z)")


class NotACallError(Exception):
    """The text is not a call. `char`: the character that shows it, which is not used yet."""

    def __init__(self, char: str):
        self.char = char


class Characters:
    """What has been read of an answer and what is held back. names: of the tools that exist, None: any."""

    def __init__(self, names: Collection[str] | None = None) -> None:
        self._names = names
        self._deltas: list[Delta] = []
        self._held: list[str] = []  # characters that were read and may belong to a mark or a call
        self._plain: Callable[[str], Delta] | None = None  # the kind of the text up to the next pause
        self.calls = 0  # calls that have begun

    def _take(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return deltas

    # ---- deltas ----------------------------------------------------------------------------------------------------

    def _emit(self, delta: Delta) -> None:
        last = self._deltas[-1] if self._deltas else None
        if isinstance(delta, Call):
            if isinstance(last, Call) and last.number == delta.number:
                self._deltas[-1] = Call(last.number, last.name, last.arguments + delta.arguments)
            else:
                self._deltas.append(delta)
        elif type(last) is type(delta) and not isinstance(last, Call):
            self._deltas[-1] = type(delta)(last.text + delta.text)
        elif delta.text:
            self._deltas.append(delta)

    def _release(self, kind: Callable[[str], Delta] = Content) -> None:
        """Emit what was held back as plain text."""
        text = "".join(self._held)
        self._held.clear()
        if text:
            self._emit(kind(text))

    def _begin(self, name: str) -> int:
        self._held.clear()
        self._emit(Call(self.calls, name, ""))
        self.calls += 1
        return self.calls - 1

    def _emit_arguments(self, number: int, text: str) -> None:
        self._emit(Call(number, None, text))

    # ---- characters ------------------------------------------------------------------------------------------------

    def _keep(self, char: str) -> Reading:
        """Hold a character back and read the next one."""
        self._held.append(char)
        return (yield)

    def _space(self, char: str) -> Reading:
        while char != END and char in SPACE:
            char = yield from self._keep(char)
        return char

    def _expect(self, wanted: str, char: str) -> Reading:
        if char != wanted:
            raise NotACallError(char)
        return (yield from self._keep(char))

    def _marks(
        self, marks: tuple[str, ...], char: str, kind: Callable[[str], Delta] = Content
    ) -> Generator[None, str, tuple[str, str]]:
        """The mark at this place, held back, or "". Text that only begins like a mark is released as `kind`.

        No mark contains its own first character twice, so a mark cannot begin inside the beginning of another.
        """
        seen = ""
        while char != END and (marks := tuple(mark for mark in marks if mark.startswith(seen + char))):
            seen += char
            char = yield from self._keep(char)
            if seen in marks:
                return char, seen
        if seen and char != END:
            self._release(kind)
        return char, ""

    def _until(self, marks: tuple[str, ...], char: str, sink: Callable[[str], None], strings: bool = False) -> Reading:
        """Text up to and including one of the marks. The text is passed to `sink`, the mark is dropped. strings: the
        text is JSON, and a mark inside a string belongs to the string."""
        seen = ""
        quoted = escaped = False
        while char != END:
            if not quoted and any(mark.startswith(seen + char) for mark in marks):
                seen += char
                char = yield
                if seen in marks:
                    return char
            elif seen:
                sink(seen)
                seen = ""
            else:
                if strings:
                    quoted, escaped = in_string(char, quoted, escaped)
                sink(char)
                char = yield
        if seen:
            sink(seen)
        raise NotACallError(END)

    def _pass(self, char: str, kind: Callable[[str], Delta]) -> Reading:
        """A character that is certainly text, and the text after it up to the next pause."""
        self._held.append(char)
        self._release(kind)
        self._plain = kind
        char = yield
        self._plain = None
        return char

    def _is_known(self, name: str | None) -> bool:
        return bool(name) and (self._names is None or name in self._names)


def in_string(char: str, quoted: bool, escaped: bool) -> tuple[bool, bool]:
    """Whether the character after this one of a JSON text is inside a string, and whether it is escaped. quoted and
    escaped: the same of this character."""
    if not quoted:
        return char == '"', False
    return escaped or char != '"', char == "\\" and not escaped
