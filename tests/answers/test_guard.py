"""Questions that look alike and want other answers never share one."""

from __future__ import annotations

import random

import pytest

from benchmarks.swaps import SWAPS
from twostroke.answers.guard import compare, fit_for_sharing, wording


@pytest.mark.parametrize("kind", SWAPS)
def test_swaps_are_never_shared(kind: str) -> None:
    chance = random.Random(1)
    shared = []
    for _ in range(1000):
        first, second = SWAPS[kind](chance)
        if first != second and compare(first, second).refusal is None:
            shared.append((first, second))
    assert not shared, shared[:3]


@pytest.mark.parametrize(
    ("first", "second", "kind"),
    [
        ("What is the capital of France?", "what is the capital of france", "same words"),
        ("What is the capital of France?", "what is capital of france", "small words"),
        ("How does a heat pump work?", "How do the heat pumps work?", "small words"),
        ("Explain photosynthesis.", "Please explain photosynthesis", "small words"),
        ("How can I cook rice?", "What is the best way to cook rice?", "small words"),
        ("Which river is the longest?", "What river is the longest?", "small words"),
        ("How do I repair a bicycle?", "How do you fix the bicycle?", "synonyms"),
    ],
)
def test_the_same_question_in_other_words(first: str, second: str, kind: str) -> None:
    assert compare(first, second) == (None, kind) and compare(second, first) == (None, kind)
    assert wording(first) == wording(second)  # so it is found


@pytest.mark.parametrize(
    ("first", "second", "why"),
    [
        ("Is Ann taller than Bob?", "Is Bob taller than Ann?", "words"),
        ("Can one buy a flat from Spain in Italy?", "Can one buy a flat from Italy in Spain?", "words"),
        ("How heavy is 3 kg of gold?", "How heavy is 5 kg of gold?", "numbers"),
        ("How long is 3 km?", "How long is 3 miles?", "units"),
        ('What does "sic" mean?', 'What does "ibid" mean?', "quoted text"),
        ("What does os.fork() do?", "What does os.exec() do?", "code"),
        ("Who leads the WHO?", "Who leads the who?", "names"),
        ("What is a file?", "Что такое файл?", "question word"),
        ("Is it safe?", "Is it not safe?", "negation"),
        ("What is C?", "What is C++?", "symbols"),
        ("What does a barometer do?", "What is a barometer?", "words"),
    ],
)
def test_each_row_of_the_table(first: str, second: str, why: str) -> None:
    assert compare(first, second).refusal == why


@pytest.mark.parametrize(
    ("question", "why"),
    [
        ("What is my balance?", "personal"),
        ("What is the weather today?", "changing"),
        ("Is this a prime number?", "referring"),
        (" ", "length"),
        ("What is a cat?", None),
    ],
)
def test_questions_that_are_not_compared(question: str, why: str | None) -> None:
    assert fit_for_sharing(question) == why
