"""Ways to walk through grammars, and schemas to walk through: shared by the tests of grammars."""

from __future__ import annotations

import json
import random
import time

import numpy as np
from hypothesis import strategies as st

from twostroke import SamplingParams
from twostroke.grammar.library import GrammarError
from twostroke.grammar.masks import GrammarState
from twostroke.types import Request, RequestState

END = 2  # <|im_end|> of the tiny tokenizer

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def request(tokenizer, output=(), **params):
    asked = SamplingParams(**params)
    stop_ids = tokenizer.eos_ids | frozenset(asked.stop_token_ids)
    made = RequestState(Request(1, (5, 6, 7), asked, stop_ids=stop_ids))
    made.tokens += output
    return made


def start(compiler, grammar):
    return GrammarState(compiler.compile(grammar))


def texts(tokenizer, allowed):
    return {tokenizer.token_bytes(int(number)) for number in np.flatnonzero(allowed)}


def accepts(compiler, tokenizer, grammar, text):
    state = start(compiler, grammar)
    try:
        for token in tokenizer.encode(text):
            state.advance(token)
    except GrammarError:
        return False
    return state.next_tokens()[1]


def walk(compiler, grammar, seed, steps, hurry=0.5, likes=()):
    """Tokens chosen at random among those allowed: harder than any model. None if it did not end in time.

    likes: tokens that are taken more often than others.
    """
    choice, state = random.Random(seed), start(compiler, grammar)
    for _ in range(steps):
        started = time.thread_time()
        try:
            allowed, may_end = state.next_tokens()
        except GrammarError:
            return None  # out of fuel, which fails one request
        assert time.thread_time() - started < 1
        allowed[[0, 1, END]] = False
        choices = np.flatnonzero(allowed)
        if may_end and (not len(choices) or choice.random() < hurry):
            return list(state.tokens)
        liked = [token for token in likes if allowed[token]]
        state.advance(choice.choice(liked) if liked and choice.random() < 0.6 else int(choice.choice(choices)))
    return None


NAMES = st.sampled_from(["a", "b", "name", "x y", "ключ", 'q"'])
NUMBERS = st.integers(-1000, 1000)

PATTERNS = [
    "^[a-z]{2,4}$",
    "x",
    r"^\d{4}-\d\d$",
    "(ab)+c?",
    '^[^"]{1,4}$',
    r"^[^\\]+$",
    r"^[^\s,]*$",
    "^[^[]?$",
    "^a|b$",
]


def objects(values):
    @st.composite
    def build(draw):
        properties = draw(st.dictionaries(NAMES, values, max_size=3))
        required = draw(st.lists(st.sampled_from(sorted(properties)), unique=True)) if properties else []
        schema = {"type": "object", "properties": properties, "required": required}
        extra = draw(st.one_of(st.just(False), st.just(None), values))
        return schema if extra is None else {**schema, "additionalProperties": extra}

    return build()


def bounded(kind, low, high, numbers):
    return st.tuples(numbers, numbers).map(lambda pair: {"type": kind, low: min(pair), high: max(pair)})


LEAVES = st.one_of(
    st.sampled_from([{"type": t} for t in ("string", "integer", "number", "boolean", "null")]),
    st.sampled_from([{"type": "string", "pattern": p} for p in PATTERNS]),
    st.sampled_from([{"type": "string", "format": f} for f in ("date", "uuid", "ipv4", "time", "email")]),
    st.sampled_from([{"type": ["string", "null"]}, {"const": {"k": [1, "ü"]}}, {"type": "integer", "multipleOf": 7}]),
    st.lists(st.one_of(st.text(max_size=5), NUMBERS, st.none(), st.booleans()), min_size=1, max_size=4).map(
        lambda values: {"enum": values}
    ),
    bounded("string", "minLength", "maxLength", st.integers(0, 6)),
    bounded("integer", "minimum", "maximum", NUMBERS),
    bounded("number", "minimum", "maximum", NUMBERS),
    bounded("number", "exclusiveMinimum", "exclusiveMaximum", NUMBERS).filter(
        lambda s: s["exclusiveMinimum"] < s["exclusiveMaximum"]
    ),
)

SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        objects(inner),
        st.tuples(inner, st.integers(0, 2), st.integers(0, 2)).map(
            lambda v: {"type": "array", "items": v[0], "minItems": v[1], "maxItems": v[1] + v[2]}
        ),
        st.tuples(inner, inner).map(lambda v: {"type": "array", "prefixItems": list(v), "items": False, "minItems": 1}),
        st.lists(inner, min_size=1, max_size=3).map(lambda v: {"anyOf": v}),
        inner.map(lambda v: {"$defs": {"d": v}, "type": "object", "properties": {"p": {"$ref": "#/$defs/d"}}}),
    ),
    max_leaves=6,
).map(lambda schema: {"type": "object", "properties": {"v": schema}, "required": ["v"], "additionalProperties": False})
REFS = json.dumps({"$ref": "#/$defs/d"})


def usable(schema):
    """A reference finds its schema only from the root of a document."""
    return REFS not in json.dumps(schema) or json.dumps(schema).count("$defs") == 0
