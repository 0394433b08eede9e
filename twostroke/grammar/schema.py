"""JSON schemas in a form that the grammar library follows exactly. What it would not follow is rewritten or refused.

The library promises a grammar that conforms to the schema, or an error. Four cases are known where its texts do not
validate, and each is handled here: additional property names written twice, names with \\u escapes, control characters,
and pattern classes that exclude quotes. Torch-free.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from twostroke.errors import InputError
from twostroke.grammar.keywords import MAX_DEPTH, change_inside
from twostroke.grammar.unique import CHARACTERS, spell_out
from twostroke.sampling import schema_text

# Between two elements of a JSON text: nothing, one space, or one line break with an indentation. Without this bound a
# model can write white space until its last token.
WHITE_SPACE = r" |\n( {0,32}|\t{0,8})"
# "u" is missing: a name written with \u0061 could repeat a property that is already there.
ESCAPES = 'nrbtf\\"'

_CONTROL = re.compile(r"(?<!\\)(?:\\\\)*\\u00[01]|\x7f")  # control characters in JSON text, without a short escape
_NEVER_WRITTEN = r"\x00-\x07\x0B\x0E-\x1F"  # control characters that no JSON text written here contains
_UNSUPPORTED = re.compile(r"\\x[01]|\\x\{0*1?[0-9a-fA-F]\}|\\u00[01]|\\[0Pc]|\\p(?!L|N|\{L|\{N)")
_FREE_FORMATS = ("binary", "password", "int32", "int64", "float", "double")
_OPERATION = re.compile("&&|--|~~")  # on classes, in the library's language


def read_schema(source: str, name: str = "grammar.source") -> Any:
    """A schema from its text, ready for `inline_schema`."""
    try:
        schema = json.loads(source, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{name}: is not a JSON schema: {error}.") from None
    return safe_schema(schema, name)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def inline_schema(schema: Any) -> str:
    """A safe schema as an expression in a Lark rule."""
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    options = {"whitespace_pattern": WHITE_SPACE, "json_allowed_escapes": ESCAPES}
    return "%json " + schema_text({**schema, "x-guidance": options})


def safe_schema(schema: Any, name: str = "grammar.source", characters: int = CHARACTERS) -> Any:
    """The same schema in a form that the library follows exactly. InputError where there is none. characters: of lists
    without repetition."""
    if not isinstance(schema, (Mapping, bool)):
        raise InputError(f"{name}: a JSON schema is an object, got {type(schema).__name__}.")
    if _CONTROL.search(schema_text(schema, name)):
        raise InputError(f"{name}: has a control character, which no JSON text written here can contain; remove it.")
    return _safe(spell_out(schema, characters)[0], name, 0)


def _safe(schema: Any, name: str, depth: int) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    if depth > MAX_DEPTH:
        raise InputError(f"{name}: is nested deeper than {MAX_DEPTH} levels; flatten it, or use $ref.")
    if "x-guidance" in schema:
        raise InputError(f"{name}: x-guidance is not supported; remove it.")
    _check_counts(schema, name)
    return {
        key: _safe_value(key, value, name, depth + 1)
        for key, value in schema.items()
        if not (key == "format" and value in _FREE_FORMATS)
    }


def close_objects(schema: Any, depth: int = 0) -> Any:
    """The same schema in which objects that say nothing about further properties have none. Parts of an `allOf` stay
    open: each of them names some of the properties only."""
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        return schema
    kept = ("allOf", "not", "if")
    closed = {
        key: value if key in kept else change_inside(key, value, lambda item: close_objects(item, depth + 1))
        for key, value in schema.items()
    }
    open_words = ("additionalProperties", "unevaluatedProperties", "patternProperties", "allOf", "$ref")
    if isinstance(schema.get("properties"), Mapping) and not any(word in schema for word in open_words):
        closed["additionalProperties"] = False
    return closed


def _safe_value(key: str, value: Any, name: str, depth: int) -> Any:
    if key == "pattern" and isinstance(value, str):
        return safe_pattern(value, name)
    if key == "patternProperties" and isinstance(value, Mapping):
        value = {safe_pattern(pattern, name): item for pattern, item in value.items()}
    return change_inside(key, value, lambda item: _safe(item, name, depth))


def _check_counts(schema: Mapping[str, Any], name: str) -> None:
    least, required = schema.get("minProperties", 0), schema.get("required", [])
    known = len(required) if isinstance(required, list) else 0
    if isinstance(least, (int, float)) and least > known + 1:
        # Names of additional properties are free: one could be written twice, and then counts once.
        raise InputError(
            f"{name}: minProperties ({least}) beyond the required properties ({known}) and one more cannot be "
            "guaranteed; name them under required, or lower it."
        )
    if schema.get("uniqueItems") is True:  # after `spell_out` it stays only where no list meets it
        why = "uniqueItems: minItems is larger than maxItems, or than the number of values that an item may have"
        raise InputError(f"{name}: {why}; lower minItems, or allow more.")
    if "uniqueItems" in schema:
        raise InputError(f"{name}: uniqueItems must be true or false, got {str(schema['uniqueItems'])[:40]!r}.")


def safe_pattern(pattern: str, name: str = "grammar.source") -> str:
    """The same pattern in Rust's syntax, which the library reads: JSON schema uses JavaScript's.

    Classes with ^ also exclude the control characters that no JSON text contains: the library reads a class with all
    control characters as one that has quotes and backslashes too. "[" inside a class is escaped.
    """
    unsupported = _UNSUPPORTED.search(pattern)
    out: list[str] = []
    position, inside = 0, False
    while position < len(pattern) and unsupported is None:
        item = pattern[position : position + 2] if pattern[position] == "\\" else pattern[position]
        position += len(item)
        if inside and item == "[":
            item = "\\["
        out.append(item)
        if inside:
            unsupported = _OPERATION.match(pattern, position)
            inside = item != "]"
        elif item == "[":
            inside = True
            position = _open_class(pattern, position, out)
    if unsupported:
        raise InputError(f"{name}: pattern {pattern[:80]!r}: {unsupported[0]!r} is not supported; list the characters.")
    return "".join(out)


def _open_class(pattern: str, position: int, out: list[str]) -> int:
    """The position after the ^ and the dash at the beginning of a class. A dash there stands for itself."""
    if pattern[position : position + 1] == "^":
        out.append("^" + _NEVER_WRITTEN)
        position += 1
    if pattern[position : position + 1] == "-":
        out.append("\\-")
        position += 1
    return position
