"""Parses an answer's text into content, reasoning and tool calls while the text arrives.

The parser reads one character at a time, so its deltas do not depend on how the text is split. It is written as
generators: `char = yield` waits for the next character, and each generator returns the first character that it did not
use. Text that may be a call is held back; if it is not a call, it is emitted as content, unchanged.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Collection, Generator
from functools import partial
from typing import NamedTuple

from twostroke.text.tools import ToolFormat

END = ""  # the character after the last one
SPACE = " \t\r\n"
MAX_DEPTH = 200  # of lists and objects in one value
ARGUMENTS = ("arguments", "parameters")  # models mix the two up
OTHER_KEYS = ("name", "type", "id")  # further keys that a call may have

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


def _pauses(marks: str) -> re.Pattern[str]:
    """Where plain text may end: at the first character of a mark, at the end, and at white space before either."""
    return re.compile(rf"(?<![{SPACE}])[{SPACE}]*(?:[{re.escape(marks)}]|\Z)")


class _NotACallError(Exception):
    """The text is not a call. `char`: the character that shows it, which is not used yet."""

    def __init__(self, char: str):
        self.char = char


class StreamParser:
    """Text in, deltas out.

    form: how this model writes calls; None: calls are content. names: the tools that exist; a call of any other tool is
    content. reasoning: the answer may begin with <think>. inside: the prompt already contains it.
    """

    def __init__(
        self,
        form: ToolFormat | None = None,
        names: Collection[str] | None = None,
        *,
        reasoning: bool = False,
        inside: bool = False,
    ):
        self._form = form
        self._names = names
        self._reasoning = reasoning or inside
        self._inside = inside
        self._deltas: list[Delta] = []
        self._held: list[str] = []  # characters that were read and may belong to a mark or a call
        self._plain: Callable[[str], Delta] | None = None  # the kind of the text up to the next pause
        self._pause = _pauses("<" + (form.begin[0] if form else ""))
        self.calls = 0  # calls that have begun
        self._reader = self._answer()
        next(self._reader)

    def push(self, text: str) -> list[Delta]:
        """The deltas that this text completes."""
        send, position, length = self._reader.send, 0, len(text)
        while position < length:
            if self._plain is not None:  # the common case: no generator runs for each character
                found = self._pause.search(text, position)
                until = found.start() if found else length
                if until > position:
                    self._emit(self._plain(text[position:until]))
                    position = until
                    continue
            send(text[position])
            position += 1
        return self._take()

    def finish(self) -> list[Delta]:
        """The answer has ended: emit what was held back. Do not push after this."""
        with contextlib.suppress(StopIteration):
            self._reader.send(END)
        return self._take()

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

    # ---- the whole answer ------------------------------------------------------------------------------------------

    def _answer(self) -> Generator[None, str, None]:
        form = self._form
        char = yield
        if self._inside:
            char = yield from self._think(char)
        else:
            char = yield from self._start(form, char)
        while char != END:
            char = yield from self._text(form, char)
        self._settle()

    def _start(self, form: ToolFormat | None, char: str) -> Reading:
        """What is possible only at the beginning: reasoning, or a call without a mark."""
        char = yield from self._space(char)
        if self._reasoning:
            char, mark = yield from self._marks(("<think>", form.begin) if form else ("<think>",), char)
            if mark == "<think>":
                self._held.clear()
                char = yield from self._think(char)
            elif mark and form is not None:
                return (yield from self._after_mark(form, char))
        unmarked = form is not None and (form.bare or self._names is not None)  # small models forget the mark
        if form is not None and unmarked and char == "{" and self._holds_only_space():
            char = yield from self._attempt(form, self._series(char, bare=True))
        return char

    def _think(self, char: str) -> Reading:
        """Reasoning up to and including its closing mark. White space next to the marks is dropped."""
        char = yield from self._space(char)
        self._held.clear()
        while char != END:
            char = yield from self._space(char)
            char, mark = yield from self._marks(("</think>",), char, Reasoning)
            if mark:
                self._held.clear()
                char = yield from self._space(char)
                break
            if char not in SPACE and char != "<":
                char = yield from self._pass(char, Reasoning)
        if not self._holds_only_space():
            self._release(Reasoning)
        self._held.clear()
        return char

    def _text(self, form: ToolFormat | None, char: str) -> Reading:
        """Some content, or a call. White space before a call is dropped."""
        if form is not None:
            char = yield from self._space(char)
            char, mark = yield from self._marks((form.begin,), char)
            if mark:
                return (yield from self._after_mark(form, char))
            if char in SPACE or char == form.begin[0]:  # also true for END, which is in every string
                return char
        return (yield from self._pass(char, Content))

    def _pass(self, char: str, kind: Callable[[str], Delta]) -> Reading:
        """A character that is certainly text, and the text after it up to the next pause."""
        self._held.append(char)
        self._release(kind)
        self._plain = kind
        char = yield
        self._plain = None
        return char

    def _settle(self) -> None:
        """At the end: white space after a call is dropped, other held text is content."""
        if self.calls and self._holds_only_space():
            self._held.clear()
        self._release()

    def _holds_only_space(self) -> bool:
        return all(piece in SPACE for piece in self._held)

    # ---- calls -----------------------------------------------------------------------------------------------------

    def _attempt(self, form: ToolFormat, calls: Reading) -> Reading:
        """Read calls. At the first text that is not a call, what is held becomes content."""
        before = self.calls
        try:
            return (yield from calls)
        except _NotACallError as error:
            rest = "".join("".join(self._held).split())
            frame = "}" + ("]" if form.listed else form.end)
            cut_short = (
                error.char == END and self.calls > before and (frame.startswith(rest) or frame[1:].startswith(rest))
            )
            if cut_short:
                self._held.clear()
            self._release()
            return error.char

    def _after_mark(self, form: ToolFormat, char: str) -> Reading:
        return (yield from self._attempt(form, self._marked(form, char)))

    def _marked(self, form: ToolFormat, char: str) -> Reading:
        char = yield from self._space(char)
        if form.listed:
            return (yield from self._list(char))
        if form.bare:
            return (yield from self._series(char))
        char = yield from self._object(char)
        char = yield from self._space(char)
        char, mark = yield from self._marks((form.end,), char)
        if mark or char == END:
            self._held.clear()
        return char

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
                if not name or (self._names is not None and name not in self._names):
                    raise _NotACallError(char)
            elif key in ARGUMENTS and arguments is None and name is not None and char == "{":
                number, arguments = self._begin(name), ""
                char = yield from self._value(char, partial(self._emit_arguments, number))
            elif key in ARGUMENTS and arguments is None:
                arguments, char = yield from self._held_value(char)
            elif key in OTHER_KEYS or number >= 0:
                _, char = yield from self._held_value(char)
            else:
                raise _NotACallError(char)
            char = yield from self._space(char)
            if char != ",":
                break
            char = yield from self._space((yield from self._keep(char)))
        char = yield from self._expect("}", char)
        if number < 0:
            self._emit_whole_call(name, arguments, bare, char)
        self._held.clear()
        return char

    def _begin(self, name: str) -> int:
        self._held.clear()
        self._emit(Call(self.calls, name, ""))
        self.calls += 1
        return self.calls - 1

    def _emit_arguments(self, number: int, text: str) -> None:
        self._emit(Call(number, None, text))

    def _emit_whole_call(self, name: str | None, arguments: str | None, bare: bool, char: str) -> None:
        """A call whose arguments were not streamed: they come before the name, or as a string, or are missing."""
        if name is None or (arguments is None and bare):
            raise _NotACallError(char)
        try:
            value = json.loads(arguments) if arguments is not None else None
        except (ValueError, RecursionError):
            raise _NotACallError(char) from None
        if not isinstance(value, (dict, str)) and value is not None:
            raise _NotACallError(char)
        text = value if isinstance(value, str) else arguments if isinstance(value, dict) else "{}"
        self._emit(Call(self._begin(name), None, str(text)))

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
            raise _NotACallError(char)
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

    def _string(self, char: str) -> Generator[None, str, tuple[str, str]]:
        """A JSON string, held back: its value and the character after it."""
        if char != '"':
            raise _NotACallError(char)
        raw, char = yield from self._held_value(char)
        try:
            return str(json.loads(raw, strict=False)), char
        except ValueError:
            raise _NotACallError(char) from None

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
                quoted = escaped or char != '"'
                escaped = char == "\\" and not escaped
            elif char == '"':
                quoted = True
            elif char in "{[":
                open_brackets.append("}" if char == "{" else "]")
                if len(open_brackets) > MAX_DEPTH:
                    raise _NotACallError(char)
            elif char in "}]":
                if not open_brackets:
                    return char  # after a number or a word
                if open_brackets.pop() != char:
                    raise _NotACallError(char)
                last = not open_brackets
            elif not open_brackets and char in ", \t\r\n":
                return char
            sink(char)
            char = (yield from self._keep(char)) if hold else (yield)
            if last:
                return char
        raise _NotACallError(END)
