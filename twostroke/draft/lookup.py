"""Prompt lookup: the tokens that followed the same text earlier, in the request itself or in an earlier answer.

A match is a place in the request's own tokens where the newest tokens stand a second time; the guess is what follows
there. While guesses are right the match simply grows. Else the last KEY tokens are looked up in an index of all earlier
places, and of the newest CANDIDATES the one with the longest common past wins. Where the request has none, earlier
answers of the same tenant are asked (answers.py). Each token is indexed once: the cost for a token does not grow with
the context.
"""

from __future__ import annotations

from collections.abc import Sequence

from twostroke.draft.answers import EarlierAnswers

KEY = 3  # tokens that must agree for a match
CANDIDATES = 8
INDEXED = 4096  # tokens that one call takes in at most: a few milliseconds
COMPARED = 32  # longest past that is compared


class Lookup:
    """The index of one request."""

    def __init__(self, earlier: EarlierAnswers | None = None, salt: bytes = b"") -> None:
        self.earlier, self.salt = earlier, salt
        self.text: Sequence[int] | None = None  # the earlier answer in which the match is; None: the request itself
        self.newest: dict[tuple[int, ...], int] = {}  # KEY tokens -> the position after their newest occurrence
        self.older: dict[int, int] = {}  # such a position -> the one before it with the same KEY tokens
        self.indexed = 0  # tokens before this position have been followed
        self.next = 0  # the position whose token is guessed next; 0: no match
        self.length = 0  # of the match: tokens that agree before it

    def update(self, tokens: Sequence[int]) -> int:
        """Take in the tokens since the last call. Returns the length of the match; 0: there is none."""
        if len(tokens) == self.indexed:
            return self.length  # nothing is new: the newest tokens would be found where they are
        if len(tokens) - self.indexed > INDEXED:  # a long prompt, of which each plan takes in a part
            self._index(tokens, self.indexed + INDEXED)
            return 0
        self._follow(tokens)
        if not self.length and len(tokens) > KEY:
            self.text = None
            self._search(tokens)
            if not self.length and self.earlier is not None and (found := self.earlier.find(self.salt, tokens)):
                self.text, self.next, self.length = found
        self._index(tokens, len(tokens))
        return self.length

    def guess(self, tokens: Sequence[int], most: int) -> list[int]:
        """Up to `most` tokens. A match near the end repeats: its own guesses continue it."""
        if self.text is not None:
            return list(self.text[self.next : self.next + most])
        found = list(tokens[self.next : self.next + most])
        period = len(tokens) - self.next
        while 0 < len(found) < most:
            found.append(found[len(found) - period])
        return found

    def _follow(self, tokens: Sequence[int]) -> None:
        if not self.length:
            return
        text = tokens if self.text is None else self.text
        for position in range(self.indexed, len(tokens)):
            if self.next >= len(text) or text[self.next] != tokens[position]:
                self.length = 0
                return
            self.next += 1
            self.length += 1

    def _search(self, tokens: Sequence[int]) -> None:
        self._index(tokens, len(tokens) - 1)  # the newest KEY tokens are what is looked for
        place = self.newest.get(tuple(tokens[-KEY:]))
        for _ in range(CANDIDATES):
            if place is None:
                return
            length = common_past(tokens, place)
            if length > self.length:
                self.length, self.next = length, place
            place = self.older.get(place)

    def _index(self, tokens: Sequence[int], until: int) -> None:
        for end in range(max(KEY, self.indexed + 1), until + 1):
            key = tuple(tokens[end - KEY : end])
            before = self.newest.get(key)
            if before is not None:
                self.older[end] = before
            self.newest[key] = end
        self.indexed = max(self.indexed, until)


def common_past(tokens: Sequence[int], place: int) -> int:
    """How many tokens before `place` agree with the last tokens."""
    end, length = len(tokens), 0
    while length < min(place, COMPARED) and tokens[place - 1 - length] == tokens[end - 1 - length]:
        length += 1
    return length
