"""Judges the text of a computed answer: whether it is a refusal, and whether it says the same as another one."""

from __future__ import annotations

from twostroke.answers import guard
from twostroke.answers.vectors import Vectors

AGREE = 0.9  # cosine of two answers that count as the same
REFUSALS = (
    "i'm sorry", "i am sorry", "sorry, ", "i cannot", "i can't", "i can’t", "as an ai", "i'm unable", "i am unable",
)  # fmt: skip


def is_refusal(text: str) -> bool:
    """Whether an answer begins as refusals do: such an answer is not kept."""
    return text.strip().lower().startswith(REFUSALS)


def same_answer(one: str, other: str, vectors: Vectors | None) -> bool:
    """Whether two answers say the same, as far as can be seen: equal, or near with the same numbers."""
    if one == other:
        return True
    if vectors is None or guard.GUARD[0].find(one) != guard.GUARD[0].find(other):
        return False
    first, second = vectors.texts.embed([one[:1000], other[:1000]])
    return float(first @ second) >= AGREE
