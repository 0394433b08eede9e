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
from twostroke.grammar.tools import tool_grammar
from twostroke.grammar.unique import spell_out
from twostroke.sampling import MAX_GRAMMAR, Grammar
from twostroke.text.formats import HERMES
from twostroke.text.tools import Tool, ToolChoice


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


VALUES = st.lists(st.one_of(st.sampled_from(["a", "ab", "b", 1, 1.0, 10, True, None, [1]]), st.text(max_size=3)))
COUNTS = st.fixed_dictionaries({}, optional={"minItems": st.integers(0, 2), "maxItems": st.integers(0, 5)})


@given(VALUES.filter(bool), COUNTS, st.integers(0, 2**32))
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_lists_of_few_values_have_no_repetition(compiler, tokenizer, values, counts, seed):
    schema = {"type": "array", "items": {"enum": values}, "uniqueItems": True, **counts}
    grammar = Grammar("json_schema", schema)
    try:
        compiler.prepare(grammar)
    except InputError:
        return  # refused is never wrong
    for number in range(6):
        tokens = walk(compiler, grammar, seed + number, 80, hurry=0.1) if spell_out(schema)[1] else None
        if tokens is not None:
            jsonschema.validate(json.loads(tokenizer.decode(tokens)), schema)


COLORS = {"enum": ["red", "green", "blue"], "title": "Color", "type": "string"}


@pytest.mark.parametrize("items", [COLORS, {"$ref": "#/$defs/Color"}])
@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("[]", True), ('["blue"]', True), ('["blue", "red"]', True), ('["green","blue","red"]', True),
        ('["red","red"]', False), ('["red","green","red"]', False), ('["red","green","blue","red"]', False),
    ],
)  # fmt: skip
def test_every_order_is_allowed_and_no_repetition(compiler, tokenizer, items, text, right):
    lists = {"type": "array", "items": items, "uniqueItems": True, "title": "Colors"}
    schema = {"$defs": {"Color": COLORS}, "properties": {"c": lists}, "type": "object", "additionalProperties": False}
    assert accepts(compiler, tokenizer, Grammar("json_schema", schema), f'{{"c":{text}}}') is right


def test_which_lists_a_grammar_can_hold():
    """The others are bound by their items and counts alone, and the server lists `uniqueItems` as ignored."""
    few, six = {"enum": [1, 2, 3]}, {"enum": [1, 2, 3, 4, 5, 6]}
    held = [
        {"items": few}, {"items": {"type": "boolean"}}, {"items": six, "maxItems": 3}, {"items": {}, "maxItems": 1},
        {"items": {"enum": [1, "a", None], "type": ["integer", "null"]}}, {"items": {"const": {"a": 1}}},
        {"items": {"enum": [float("inf"), 10**400], "type": "number"}},
    ]  # fmt: skip
    loose = [
        {"items": {"type": "string"}}, {"items": six}, {}, {"items": few, "contains": {}}, {"items": few, "type": "x"},
        {"prefixItems": [few, few]}, {"items": {"$ref": "#/$defs/missing"}}, {"items": {"$ref": "#"}},
        {"items": {"type": {}, "enum": [1]}}, {"items": {"type": [{}], "enum": [1]}},
        {"items": {"enum": ["a" * 1000, "b" * 1000, "c" * 1000, "d" * 1000]}},  # 64 lists with 260,000 characters
    ]  # fmt: skip
    for more in held + loose:
        schema = {"type": "array", "uniqueItems": True, **more}
        spelled, holds = spell_out(schema)
        assert holds is (more in held) and "uniqueItems" not in spelled
        assert spell_out({"anyOf": [{"type": "null"}, schema]})[1] is holds
    many = {str(number): {"type": "array", "uniqueItems": True, "items": few} for number in range(300)}
    assert spell_out({"properties": many})[1] is False  # each has 16 lists
    assert spell_out({"enum": [{"uniqueItems": True}], "uniqueItems": False}) == (
        {"enum": [{"uniqueItems": True}]},
        True,
    )


def test_lists_that_would_be_too_long_leave_a_forced_call_possible():
    """The tools of a request share one limit for their lists, far below that of a grammar."""
    lists = {"type": "array", "uniqueItems": True, "items": {"enum": ["red", "green", "blue", "black", "white"]}}
    parameters = {"type": "object", "properties": {str(number): lists for number in range(9)}}
    tools = [Tool(f"paint_{number}", parameters) for number in range(10)]
    grammar = tool_grammar(tools, ToolChoice("required"), HERMES)
    assert len(grammar.source) < MAX_GRAMMAR // 2
