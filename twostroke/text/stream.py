"""Text as it is generated: whole characters out of tokens, and stop strings found across any cut."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from twostroke.errors import InputError
from twostroke.text.tokenizer import Tokenizer


class StreamDecoder:
    """Tokens in, text out, never half a character; everything pushed and flushed together is `decode` of all ids.

    Each token costs its own bytes and nothing more: there is no re-decoding of what was already sent.
    at_start=False says that the ids continue a text (an answer to a prompt), so SentencePiece's first space is real.
    visible: special tokens that are written out all the same.
    """

    __slots__ = ("_between", "_skip", "_strip", "_tokenizer", "_utf8", "_whole")

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special: bool = True,
        at_start: bool = True,
        visible: frozenset[int] = frozenset(),
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_ids - visible if skip_special else frozenset()
        self._strip = at_start and tokenizer.leading_space
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._between = not self._strip  # nothing of what came says how to read what comes
        self._whole = tokenizer.whole

    def push(self, ids: Iterable[int]) -> str:
        """The text these tokens complete. Bytes that may still become a character wait for the next push."""
        data = b"".join([self._tokenizer.token_bytes(number) for number in ids if number not in self._skip])
        text = self._first(self._utf8.decode(data))
        self._between = not (self._strip or self._utf8.getstate()[0])
        return text

    def push_one(self, number: int) -> str:
        """`push` of a single token, which nearly all pushes are."""
        between = self._between
        if between and (known := self._whole.get(number)) is not None:
            return known
        text = self.push((number,))
        if between and self._between and number not in self._tokenizer.special_ids:
            self._whole[number] = text
        return text

    def flush(self) -> str:
        """The end: what still waits can never become a character, and shows as U+FFFD."""
        return self._first(self._utf8.decode(b"", final=True))

    def _first(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text


class _Stop:
    """One stop string and how much of it the text seen so far ends with (Knuth, Morris and Pratt's automaton)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.seen = 0
        self._shorter = [0] * len(text)  # per beginning of the text: its longest shorter beginning it also ends with
        length = 0
        for end in range(1, len(text)):
            while length and text[end] != text[length]:
                length = self._shorter[length - 1]
            length += text[end] == text[length]
            self._shorter[end] = length

    def feed(self, char: str) -> bool:
        """Take one character in; True when it completes the stop string."""
        while self.seen and self.text[self.seen] != char:
            self.seen = self._shorter[self.seen - 1]
        self.seen += self.text[self.seen] == char
        return self.seen == len(self.text)


class StopMatcher:
    """Finds the first stop string to be completed, holding back only text that could still be its beginning.

    Which stop wins does not depend on how the text was cut: the one that ends first, and of those that end together
    the longest. What is emitted is the text before it.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if isinstance(stops, str) or not all(isinstance(stop, str) and stop for stop in stops):
            raise InputError("stop: must be a list of strings, none of them empty; leave stop out to have none")
        self._stops = [_Stop(stop) for stop in dict.fromkeys(stops)]
        self._first = {stop.text[0] for stop in self._stops}
        self._held = ""
        self._matched: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """The text that is safe to send, and the stop string if one is complete. After that nothing is sent."""
        if self._matched is not None:
            return "", self._matched
        if not self._held and not any(char in text for char in self._first):
            return text, None  # the common case, at the speed of a search
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
        """The end: what was held back was no stop string after all."""
        held, self._held = self._held, ""
        return held
