"""A Grammar in the one notation the grammar library reads: Lark, with our options. Torch-free.

What a schema says and the library would not hold to is refused here: an answer that ends with "stop" always validates.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from twostroke.errors import InputError
from twostroke.sampling import Grammar, schema_text

# Without "no_forcing" the library would ask the tokenizer, in Python, how to spell every text that has no alternative.
OPTIONS = '\n%llguidance {"no_forcing": true}\n'
# Between two parts of a JSON text: nothing, one space, or one line break with an indentation. Without a bound a model
# that likes white space writes nothing else until its last token.
WHITE_SPACE = r" |\n[ \t]{0,40}"
# Without "u": a name spelled with \u0061 could repeat a property that has been written already.
ESCAPES = 'nrbtf\\"'
MAX_DEPTH = 64  # of schemas inside schemas

_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # names to schemas
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SINGLE = ("additionalProperties", "items", "additionalItems", "unevaluatedItems", "unevaluatedProperties", "not", "if",
           "then", "else", "contains", "propertyNames")  # fmt: skip


def to_lark(grammar: Grammar) -> str:
    """The grammar's source in Lark. It is not compiled yet: the library may still refuse it."""
    if grammar.kind == "json_object":
        return "start: " + inline_schema({"type": "object"}) + OPTIONS
    if grammar.kind == "json_schema":
        return "start: " + inline_schema(read_schema(grammar.source)) + OPTIONS
    if grammar.kind == "regex":
        return _regex(grammar.source) + OPTIONS
    return _ebnf(grammar.source) + OPTIONS


def read_schema(source: str, name: str = "grammar.source") -> Any:
    try:
        schema = json.loads(source, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{name}: is not a JSON schema: {error}.") from None
    check_schema(schema, name)
    return schema


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def check_schema(schema: Any, name: str = "grammar.source") -> None:
    """Refuse what would compile to something else than it says."""
    if not isinstance(schema, (Mapping, bool)):
        raise InputError(f"{name}: a JSON schema is an object, got {type(schema).__name__}.")
    for part, depth in _schemas(schema):
        if depth > MAX_DEPTH:
            raise InputError(f"{name}: is nested deeper than {MAX_DEPTH} levels; flatten it, or use $ref.")
        if "x-guidance" in part:
            raise InputError(f"{name}: x-guidance is not supported; remove it.")
        _check_counts(part, name)


def _check_counts(schema: Mapping[str, Any], name: str) -> None:
    least, required = schema.get("minProperties", 0), schema.get("required", [])
    known = len(required) if isinstance(required, list) else 0
    if isinstance(least, (int, float)) and least > known + 1:
        # The names of further properties are free, so the same one could be written twice and then counts once.
        raise InputError(
            f"{name}: minProperties ({least}) beyond the required properties ({known}) and one more cannot be held to; "
            "name them under required, or lower it."
        )


def _schemas(root: Any) -> Iterator[tuple[Mapping[str, Any], int]]:
    """Every schema inside a schema, with its depth. Values under const, enum and default are not schemas."""
    waiting: list[tuple[Any, int]] = [(root, 0)]
    while waiting:
        schema, depth = waiting.pop()
        if not isinstance(schema, Mapping):
            continue
        yield schema, depth
        for key, value in schema.items():
            if key in _MAPS and isinstance(value, Mapping):
                waiting += [(item, depth + 1) for item in value.values()]
            elif key in _LISTS and isinstance(value, list):
                waiting += [(item, depth + 1) for item in value]
            elif key in _SINGLE:
                waiting.append((value, depth + 1))


def inline_schema(schema: Any) -> str:
    """A schema as a part of a Lark rule."""
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    options = {"whitespace_pattern": WHITE_SPACE, "json_allowed_escapes": ESCAPES}
    return "%json " + schema_text({**schema, "x-guidance": options})


def _regex(source: str) -> str:
    from llguidance import regex_to_lark

    return "start: /" + regex_to_lark(source, "dw") + "/"


def _ebnf(source: str) -> str:
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return any_to_lark(source)
    except Exception as error:  # the converter's own, KeyError and RecursionError among them
        raise InputError(f"grammar.source: cannot be read as EBNF: {error}.") from None
