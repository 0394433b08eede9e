"""Every text that the grammar of a JSON schema allows validates against the schema."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.grammar.walks import PATTERNS, SCHEMAS, accepts, usable, walk
from twostroke import InputError
from twostroke.sampling import Grammar


@given(SCHEMAS.filter(usable), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_whatever_a_schema_allows_validates(compiler, tokenizer, schema, seed):
    grammar = Grammar("json_schema", schema)
    try:
        compiler.prepare(grammar)
    except InputError:
        return  # refused is never wrong
    for number in range(4):
        tokens = walk(compiler, grammar, seed + number, 250)
        if tokens is not None:
            jsonschema.validate(json.loads(tokenizer.decode(tokens)), schema)


@pytest.mark.parametrize(
    "pattern", [*PATTERNS, r"^[^\s\"\\]+@[^@]+$", r"^[^\n]$", '^[^-"]$', r"^[^\]\"]{2}$", "^.[^a]$"]
)
def test_patterns_hold_where_quotes_are_special(compiler, tokenizer, pattern):
    grammar = Grammar("json_schema", {"type": "string", "pattern": pattern})
    compiler.prepare(grammar)
    likes = [tokenizer.encode(char)[0] for char in '\\\\""abx@1-']
    ended = 0
    for seed in range(60):
        tokens = walk(compiler, grammar, seed, 60, likes=likes)
        if tokens is not None:
            ended += 1
            assert re.search(pattern, json.loads(tokenizer.decode(tokens)))
    assert ended > 5


@pytest.mark.parametrize("text", ['{"a":1,"a":"x"}', '{"a":1,"\\u0061":"x"}', '{"a":1,"b":"\\u0061"}'])
def test_no_property_is_written_twice(compiler, tokenizer, text):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    assert not accepts(compiler, tokenizer, Grammar("json_schema", schema), text)
