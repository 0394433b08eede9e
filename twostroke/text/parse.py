"""Parses an answer's text into content, reasoning and tool calls while the text arrives.

The parser reads one character at a time, so its deltas do not depend on how the text is split. It is written as
generators: `char = yield` waits for the next character, and each generator returns the first character that it did not
use. Text that may be a call is held back; if it is not a call, it is emitted as content, unchanged.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Generator
from functools import partial

from twostroke.text.channels import Channels
from twostroke.text.formats import ToolFormat
from twostroke.text.json_calls import JsonCalls
from twostroke.text.reading import END, SPACE, Call, Content, Delta, NotACallError, Reading, Reasoning, pauses
from twostroke.text.tagged_calls import TaggedCalls

__all__ = ["Call", "Content", "Delta", "Reasoning", "StreamParser"]

MAX_HEAD = 256  # characters between a call's mark and its arguments


class StreamParser(JsonCalls, TaggedCalls, Channels):
    """Text in, deltas out.

    form: how this model writes calls; None: calls are content. names: the tools that exist, a mapping where their
    schemas are known; a call of any other tool is content. reasoning: the answer may begin with <think>. inside: the
    prompt already contains it.
    """

    def __init__(
        self,
        form: ToolFormat | None = None,
        names: Collection[str] | None = None,
        *,
        reasoning: bool = False,
        inside: bool = False,
    ):
        super().__init__(names)
        self._form = form
        self._reasoning = reasoning or inside
        self._inside = inside
        self._begins = () if form is None else tuple(mark for mark in (form.section[0], form.begin) if mark)
        self._pause = pauses("<" + "".join(mark[0] for mark in self._begins))
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

    # ---- the whole answer ------------------------------------------------------------------------------------------

    def _answer(self) -> Generator[None, str, None]:
        form = self._form
        char = yield
        if form is not None and form.channels:
            yield from self._messages(char)
            return
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
            char, mark = yield from self._marks(("<think>", *self._begins), char)
            if mark == "<think>":
                self._held.clear()
                char = yield from self._think(char)
            elif mark and form is not None:
                return (yield from self._after_mark(form, mark, char))
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
            char, mark = yield from self._marks(self._begins, char)
            if mark:
                return (yield from self._after_mark(form, mark, char))
            if char in SPACE or any(char == mark[0] for mark in self._begins):  # END is in every string
                return char
        return (yield from self._pass(char, Content))

    def _settle(self) -> None:
        """Settle what is held at the end: white space after a call is dropped, other held text is content."""
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
        except NotACallError as error:
            rest = "".join("".join(self._held).split())
            frame = "}" + ("]" if form.listed else form.end)
            cut_short = (
                error.char == END and self.calls > before and (frame.startswith(rest) or frame[1:].startswith(rest))
            )
            if cut_short:
                self._held.clear()
            self._release()
            return error.char

    def _after_mark(self, form: ToolFormat, mark: str, char: str) -> Reading:
        calls = self._section(form, char) if mark == form.section[0] else self._marked(form, char)
        return (yield from self._attempt(form, calls))

    def _section(self, form: ToolFormat, char: str) -> Reading:
        """Calls between two marks of their own."""
        before = self.calls
        while True:
            char = yield from self._space(char)
            char, mark = yield from self._marks((form.begin, form.section[1]), char)
            if mark == form.begin:
                char = yield from self._marked(form, char)
                continue
            if self.calls > before and (mark or char == END):
                self._held.clear()
            if mark:
                return char
            raise NotACallError(char)

    def _marked(self, form: ToolFormat, char: str) -> Reading:
        """What stands after the mark of a call, its end mark included."""
        if form.tags is not None:
            char = char if form.tags.name[0][:1] == " " else (yield from self._space(char))
            return (yield from self._tagged(form, form.tags, char))
        if form.head:
            char = yield from self._headed(form, char)
        else:
            char = yield from self._space(char)
            if form.listed:
                return (yield from self._list(char))
            if form.bare:
                return (yield from self._series(char))
            char = yield from self._object(char)
        char = yield from self._space(char)
        if form.end:
            char, mark = yield from self._marks((form.end,), char)
            if mark or char == END:
                self._held.clear()
        return char

    def _headed(self, form: ToolFormat, char: str) -> Reading:
        """A head with the name, then the arguments as a JSON object."""
        head = ""
        while char not in ("{", END) and len(head) < MAX_HEAD:
            head += char
            char = yield from self._keep(char)
        found = re.fullmatch(form.head, head) if char == "{" else None
        groups = found.groupdict() if found else {}
        name = groups.get("name") or groups.get("first")
        if name is None or not self._is_known(name):
            raise NotACallError(char)
        char = yield from self._value(char, partial(self._emit_arguments, self._begin(name)))
        char = yield from self._space(char)
        while char == "`":  # the end of a fence
            char = yield from self._keep(char)
        return char
