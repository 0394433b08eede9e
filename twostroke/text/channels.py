"""Harmony, as gpt-oss writes it: an answer is a series of messages, each with a channel in its header.

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>

analysis is reasoning; a message to a function is a call; all other text is content. Marks and headers are never shown.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

from twostroke.text.formats import HARMONY_ENDS
from twostroke.text.reading import END, Characters, Content, Delta, NotACallError, Reading, Reasoning

MAX_HEADER = 400  # characters; a longer one is content
_OPENINGS = ("<|channel|>", "<|start|>", "to=")
_RECIPIENT = re.compile(r"\bto=functions\.([a-zA-Z0-9_-]{1,64})")


class Channels(Characters):
    def _messages(self, char: str) -> Reading:
        """The whole answer. It may begin inside a message, after a header in the prompt."""
        while char != END:
            before = len(self._held)
            char = yield from self._space(char)
            char, mark = yield from self._marks(_OPENINGS, char)
            if mark:
                del self._held[before:]
                char = yield from self._message(mark, char)
            elif char == END:
                break
            else:
                char = yield from self._body(char, Content)
        self._release()
        return char

    def _message(self, opening: str, char: str) -> Reading:
        header: list[str] = []
        char = yield from self._header(opening, header, char)
        text = "".join(header)
        recipient = _RECIPIENT.search(text)
        if recipient and self._is_known(recipient[1]):
            sink = partial(self._emit_arguments, self._begin(recipient[1]))
            try:
                return (yield from self._until(HARMONY_ENDS, (yield from self._space(char)), sink, strings=True))
            except NotACallError as error:  # max_tokens ended it
                self._held.clear()
                return error.char
        return (yield from self._body(char, Reasoning if "analysis" in text and not recipient else Content))

    def _header(self, opening: str, header: list[str], char: str) -> Reading:
        """The text up to <|message|>. What the end of the answer cuts off is dropped."""
        header.append(opening)
        seen = ""
        while char != END and len(header) < MAX_HEADER:
            seen += char
            header.append(char)
            char = yield
            if seen.endswith("<|message|>"):
                return char
        if char != END:
            self._emit(Content("".join(header)))
        return char

    def _body(self, char: str, kind: Callable[[str], Delta]) -> Reading:
        """A message's text up to and including its end mark."""
        self._release(kind)
        while char != END:
            char = yield from self._space(char)
            self._release(kind)
            char, mark = yield from self._marks(HARMONY_ENDS, char, kind)
            if mark:
                self._held.clear()
                return char
            if char not in ("<", END):
                char = yield from self._pass(char, kind)
        self._release(kind)
        return char
