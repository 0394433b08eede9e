"""Text as it is generated: tokens to whole characters, and stop strings wherever the text is split."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from twostroke.errors import InputError
from twostroke.text.tokenizer import Tokenizer


class StreamDecoder:
    """Tokens to text in whole characters. All texts together are what `decode` returns for all tokens.

    at_start=False: the ids continue a text (an answer to a prompt), so SentencePiece's first space is kept.
    Special tokens have no text, but for those in `visible`.
    """

    __slots__ = ("_skip", "_strip", "_tokenizer", "_utf8")

    def __init__(
        self,
        tokenizer: Tokenizer,
        at_start: bool = True,
        visible: frozenset[int] = frozenset(),
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_ids - visible
        self._strip = at_start and tokenizer.leading_space
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        """The text that these tokens complete. Bytes of an incomplete character wait for the next push."""
        data = b"".join([self._tokenizer.token_bytes(number) for number in ids if number not in self._skip])
        return self._without_first_space(self._utf8.decode(data))

    def flush(self) -> str:
        """The end of the text: bytes that still wait become U+FFFD."""
        return self._without_first_space(self._utf8.decode(b"", final=True))

    def _without_first_space(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text


class _Stop:
    """One stop string, and how many of its first characters the text ends with (Knuth, Morris, Pratt)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.seen = 0
        self._shorter = [0] * len(text)  # by prefix: the length of its longest proper prefix that is also its suffix
        length = 0
        for end in range(1, len(text)):
            while length and text[end] != text[length]:
                length = self._shorter[length - 1]
            length += text[end] == text[length]
            self._shorter[end] = length

    def feed(self, char: str) -> bool:
        """Read one character. True when it completes the stop string."""
        while self.seen and self.text[self.seen] != char:
            self.seen = self._shorter[self.seen - 1]
        self.seen += self.text[self.seen] == char
        return self.seen == len(self.text)


class StopMatcher:
    """Finds the stop string that is complete first, and holds back only text that may be the beginning of one.

    The result does not depend on how the text is split: the stop string that ends first wins, and of those that end
    together the longest. The text before it is emitted.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if isinstance(stops, str) or not all(isinstance(stop, str) and stop for stop in stops):
            raise InputError("stop: must be a list of strings, none of them empty; leave stop out to have none")
        self._stops = [_Stop(stop) for stop in dict.fromkeys(stops)]
        self._first = {stop.text[0] for stop in self._stops}
        self._held = ""
        self._matched: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """The text that can be sent, and the stop string if one is complete. After that no text is returned."""
        if self._matched is not None:
            return "", self._matched
        if not self._held and not any(char in text for char in self._first):
            return text, None  # the common case
        waiting = self._held + text
        for end, char in enumerate(text, len(self._held) + 1):
            complete = [stop.text for stop in self._stops if stop.feed(char)]
            if complete:
                self._held, self._matched = "", max(complete, key=len)
                return waiting[: end - len(self._matched)], self._matched
        sure = len(waiting) - max(stop.seen for stop in self._stops)
        self._held = waiting[sure:]
        return waiting[:sure], None

    def flush(self) -> str:
        """The end of the text: what was held back is not a stop string."""
        held, self._held = self._held, ""
        return held
