"""Random requests of every API: whole or streamed, greedy or sampled, several samples, grammars of every kind."""

from __future__ import annotations

import random

WORDS = (
    "The",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "the",
    "lazy",
    "dog",
    "while",
    "a",
    "little",
    "engine",
    "reads",
)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}}, "required": ["a"]}


def text(rng: random.Random) -> str:
    return " ".join(rng.choices(WORDS, k=rng.choice([1, 5, 20, 80])))


def sampling(rng: random.Random) -> dict:
    """Fields that all APIs have."""
    if rng.random() < 0.3:
        return {"temperature": 0}
    return {"temperature": rng.choice([0.3, 1.0]), "top_p": rng.choice([0.5, 1.0])}


def more_sampling(rng: random.Random) -> dict:
    """Fields of the APIs with choices."""
    found: dict = {"n": rng.choice([1, 1, 1, 2, 4])}
    if rng.random() < 0.3:
        found |= {"seed": rng.randrange(1000), "presence_penalty": rng.choice([-2.0, 2.0]), "top_k": 7}
    if rng.random() < 0.2:
        found |= {"logit_bias": {str(rng.randrange(300)): rng.choice([-100, 100])}, "stop": ["e", "the"]}
    if rng.random() < 0.3:
        found |= rng.choice(
            [
                {"regex": f"[a-z]{{{rng.randint(1, 40)}}}( [a-z]+)*"},
                {"grammar": f'root ::= "a"{{{rng.randint(1, 40)}}} [b-d]*'},
                {"response_format": {"type": "json_object"}},
                {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}},
            ]
        )
    return found


def random_request(rng: random.Random) -> tuple[str, dict]:
    """(path, body)"""
    body: dict = {"max_tokens": rng.choice([1, 8, 40, 150]), "stream": rng.random() < 0.6, **sampling(rng)}
    messages = [{"role": "user", "content": text(rng)}]
    kind = rng.random()
    if kind < 0.45:
        return "/v1/completions", body | {"prompt": text(rng)} | more_sampling(rng)
    if kind < 0.8:
        return "/v1/chat/completions", body | {"messages": messages} | more_sampling(rng)
    if kind < 0.9:
        return "/v1/messages", body | {"model": "", "messages": messages}
    body["max_output_tokens"] = body.pop("max_tokens")
    return "/v1/responses", body | {"input": text(rng)}
