"""Where a JSON schema has other schemas in it. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

MAX_DEPTH = 64  # of schemas inside schemas
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # names to schemas
_NESTED = ("allOf", "anyOf", "oneOf", "prefixItems", "items", "additionalProperties", "additionalItems", "not", "if",
           "then", "else", "contains", "propertyNames", "unevaluatedItems", "unevaluatedProperties")  # fmt: skip


def change_inside(key: str, value: Any, change: Callable[[Any], Any]) -> Any:
    """The value of one keyword, with every schema in it changed. Values of const, enum or default are not schemas and
    stay as they are."""
    if key in _MAPS and isinstance(value, Mapping):
        return {name: change(item) for name, item in value.items()}
    if key not in _NESTED:
        return value
    return [change(item) for item in value] if isinstance(value, list) else change(value)
