"""Made-up questions that look alike and want other answers: another entity, number, negation or text."""

from __future__ import annotations

import random
from collections.abc import Callable

CITIES = ["Paris", "London", "Rome", "Madrid", "Vienna", "Oslo", "Cairo", "Lima", "Delhi", "Quito", "Kyoto", "Perth"]
THINGS = ["a bicycle", "the router", "a passport", "the boiler", "a tent", "the printer", "a piano", "the clutch"]
FORMS = ["How do I repair {thing} in {city}?", "What does it cost to buy {thing} in {city}?",
         "Which shop in {city} sells {thing}?", "Is {thing} allowed in {city}?"]  # fmt: skip


def made(chance: random.Random) -> tuple[str, dict[str, str]]:
    return chance.choice(FORMS), {"city": chance.choice(CITIES), "thing": chance.choice(THINGS)}


def entity_swap(chance: random.Random) -> tuple[str, str]:
    form, words = made(chance)
    other = chance.choice([city for city in CITIES if city != words["city"]])
    lower = chance.random() < 0.5
    pair = form.format(**words), form.format(**(words | {"city": other}))
    return (pair[0].lower(), pair[1].lower()) if lower else pair


def number_swap(chance: random.Random) -> tuple[str, str]:
    form = chance.choice(
        ["What is {} percent of 80?", "How far is {} km in miles?", "Who won in {}?", "Is {} a prime?"]
    )
    first = chance.randint(2, 3000)
    return form.format(first), form.format(first + chance.choice([1, 10, 100, -1]))


def negation_swap(chance: random.Random) -> tuple[str, str]:
    form, words = made(chance)
    whole = form.format(**words)
    return whole, chance.choice([
        whole.replace("How do I", "How do I not"), whole.replace("Is ", "Isn't "),
        whole.replace("does it", "doesn't it"),
        whole.replace("?", " without a licence?"), whole.replace("Which shop", "Which shop never"),
    ])  # fmt: skip


def template_swap(chance: random.Random) -> tuple[str, str]:
    words = [
        " ".join(chance.choices(["sun", "moon", "tree", "river", "glass", "stone", "bread", "salt"], k=6))
        for _ in range(2)
    ]
    form = chance.choice(["Translate into French: {}", "Summarise this text: {}", 'Is "{}" grammatical?'])
    return form.format(words[0]), form.format(words[1])


SWAPS: dict[str, Callable[[random.Random], tuple[str, str]]] = {
    "entity": entity_swap, "number": number_swap, "negation": negation_swap, "template": template_swap,
}  # fmt: skip
