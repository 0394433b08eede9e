"""Prompts of real text, for what depends on the text: how often prompt lookup guesses right.

edit       a source file that the answer repeats
questions  questions on many subjects, sampled; there is nothing to repeat
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from importlib.resources import files
from typing import NamedTuple

SOURCES = ("cost/units.py", "bench/ledger.py", "bench/prompts.py", "bench/processor.py", "cost/model/calibration.py",
           "schedule/policy.py")  # fmt: skip
LONGEST = 1600  # characters of a file
QUESTIONS = (
    "Explain in a few sentences why the sky is blue and why sunsets are red.",
    "What should a beginner know before planting tomatoes?",
    "Describe the plot of a film about two sailors who find an island.",
    "How does a bicycle stay upright while it moves?",
    "Write a short letter to a neighbour about a noisy dog.",
    "What are the advantages and disadvantages of working from home?",
    "Tell me a story about a clock maker who could not tell the time.",
    "How do vaccines work?",
    "Suggest three dinners that take less than half an hour.",
    "Why did the Roman Empire fall?",
    "What is the difference between weather and climate?",
    "Give advice to a friend who must speak before many people.",
)


class Text(NamedTuple):
    prompt: str
    output: int  # tokens of the answer


def edit(rng: random.Random) -> Iterator[Text]:
    while True:
        lines = (files("twostroke") / rng.choice(SOURCES)).read_text().splitlines(keepends=True)
        # From another line each time: the same prompt twice would be answered from the earlier answer.
        source = "".join(lines[rng.randrange(len(lines) // 2) :])[:LONGEST]
        prompt = f"Here is a file:\n```python\n{source}\n```\nThe same file again:\n```python\n"
        yield Text(prompt, rng.randint(80, 160))


def questions(rng: random.Random) -> Iterator[Text]:
    while True:
        yield Text(f"Question: {rng.choice(QUESTIONS)}\nAnswer:", rng.randint(60, 140))


TEXTS: dict[str, Callable[[random.Random], Iterator[Text]]] = {"edit": edit, "questions": questions}
TEMPERATURE = {"edit": 0.0, "questions": 0.8}
CHARACTERS = 3.5  # in a token, about: a server counts them
