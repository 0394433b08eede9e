"""Made-up prompts: equal parts become equal text, as words or as token ids."""

from __future__ import annotations

import random

from twostroke.cost.simulation.trace import Arrival

# Short common words: one token each in almost every vocabulary.
_COMMON = (
    "the of and to in is that it was for on are as with his they at be this have from or one had by word but not what "
    "all were we when your can said there use an each which she do how their if will up other about out many then "
    "them these so some her would make like him into time has look two more write go see number no way could people "
    "my than first water been call who oil its now find long down day did get come made may part"
)
WORDS = _COMMON.split()


def text(arrival: Arrival) -> str:
    words: list[str] = []
    for content, length in arrival.parts:
        rng = random.Random(content)
        words += rng.choices(WORDS, k=length)
    return " ".join(words)


def token_ids(arrival: Arrival, vocabulary: int, first: int = 256) -> list[int]:
    """Ids from `first` on: special tokens mostly have the lowest or the highest ids."""
    ids: list[int] = []
    last = max(first + 1, int(0.9 * vocabulary))
    for content, length in arrival.parts:
        rng = random.Random(content)
        ids += [rng.randrange(min(first, last - 1), last) for _ in range(length)]
    return ids
