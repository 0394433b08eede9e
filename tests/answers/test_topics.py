"""Recorded questions: one number for those that ask the same, in one context only."""

from __future__ import annotations

import pytest

from tests.answers.test_cache import Letters
from twostroke.answers import topics
from twostroke.answers.topics import Topics


def numbers(recorded: Topics, *questions: str, context: bytes = b"c", first: int = 0) -> list[int | None]:
    for place, question in enumerate(questions, first):
        recorded.add_later(place, context, question)
    recorded._thread.submit(lambda: None).result()
    return [recorded.of(place) for place in range(first, first + len(questions))]


def test_questions_that_ask_the_same_have_one_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topics, "ALIKE", 0.8)
    recorded = Topics(Letters())
    found = numbers(recorded, "How do I boil an egg?", "How do I boil the egg?", "How do I boil a fish?", "Where am I?")
    assert found[0] == found[1] != found[2] and found[3] not in found[:3]
    elsewhere = numbers(recorded, "How do I boil an egg?", context=b"another", first=10)
    assert elsewhere[0] not in found
    assert numbers(recorded, "What is my name?", first=20) == [None]  # would not be compared
    recorded.close()
    recorded.add_later(30, b"c", "How do I boil an egg?")
    assert recorded.of(30) is None


def test_the_oldest_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topics, "KEPT", 3)
    recorded = Topics(Letters())
    found = numbers(recorded, *(f"what is number {place} of it" for place in range(5)))
    assert found[:2] == [None, None] and None not in found[2:]
    recorded.close()
