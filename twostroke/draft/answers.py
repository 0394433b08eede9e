"""Earlier answers of a tenant, to look guesses up in: a question that comes again often gets the same answer.

Answers lie under their tenant's salt and are found under that salt alone. All tenants together keep at most `most`
tokens; the answers that were not used for longest go first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

KEY = 3  # tokens that must agree before a place is looked at
PAST = 8  # tokens that must agree for a match: in many texts three tokens agree by chance
TEMPLATE = 16  # the same near an answer's start: the last tokens of a prompt are its chat template's
BEFORE = 32  # of the prompt, kept before an answer: the match begins there
MOST = 1 << 16  # tokens of all tenants; each takes about 250 bytes

TokenText = tuple[int, ...]
TextPlace = tuple[int, int]  # number of a text, and a position in it


class EarlierAnswers:
    def __init__(self, most: int = MOST):
        self.most, self.held, self.number = most, 0, 0
        # By number, least recently used first: the salt, the text, and where the answer starts in it.
        self.texts: OrderedDict[int, tuple[bytes, TokenText, int]] = OrderedDict()
        self.places: dict[bytes, dict[TokenText, TextPlace]] = {}  # salt -> KEY tokens -> the newest place after them

    def add(self, salt: bytes, tokens: Sequence[int], prompt_length: int) -> None:
        """Keep the answer after `prompt_length` tokens."""
        text = tuple(tokens[max(0, prompt_length - BEFORE) :])
        if len(tokens) - prompt_length < PAST or len(text) > self.most:
            return
        self.number += 1
        self.texts[self.number] = (salt, text, min(prompt_length, BEFORE))
        places = self.places.setdefault(salt, {})
        for end in range(KEY, len(text)):
            places[text[end - KEY : end]] = (self.number, end)
        self.held += len(text)
        while self.held > self.most:
            self._forget()

    def find(self, salt: bytes, tokens: Sequence[int]) -> tuple[TokenText, int, int] | None:
        """A text of this tenant in which the last tokens stand, the position after them, and how many agree."""
        place = self.places.get(salt, {}).get(tuple(tokens[-KEY:]))
        if place is None:
            return None
        number, end = place
        _, text, start = self.texts[number]
        agree, known = 0, len(tokens)
        while agree < min(end, known, BEFORE) and text[end - 1 - agree] == tokens[known - 1 - agree]:
            agree += 1
        if agree < (PAST if end >= start + PAST else TEMPLATE):
            return None
        self.texts.move_to_end(number)
        return text, end, agree

    def _forget(self) -> None:
        number, (salt, text, _) = self.texts.popitem(last=False)
        self.held -= len(text)
        places = self.places[salt]
        for end in range(KEY, len(text)):
            key = text[end - KEY : end]
            if places.get(key, (0, 0))[0] == number:
                del places[key]
        if not places:
            del self.places[salt]
