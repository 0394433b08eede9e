"""Arguments between tags as grammar rules: each has its own tag, and its schema binds the value. Torch-free.

A string between tags is written as it is, without quotes and escapes. So its value is any text without the closing tag,
or one of the texts that `enum` or `const` list; other bounds on strings are not enforced.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from twostroke.errors import InputError
from twostroke.grammar.schema import inline_schema
from twostroke.text.formats import Tags
from twostroke.text.tagged_calls import allowed_types

ToExpression = Callable[[str], str]  # from a text to an expression
UNBOUND = ("pattern", "format", "minLength", "maxLength")  # of strings: beyond these grammars
_COMBINED = ("$ref", "allOf", "anyOf", "oneOf", "not", "if", "patternProperties", "dependentSchemas", "minProperties")


def tagged_rules(tags: Tags, write: ToExpression, index: int, schema: Any) -> list[str]:
    """The rule `arguments_<index>`: the arguments that the schema names, in its order, the required ones always."""
    for word in _COMBINED:
        if word in schema:
            raise InputError(
                f"tools[{index}].function.parameters: {word} cannot bind arguments between tags, as this model writes "
                "them; list the arguments under properties, or leave tool_choice at auto."
            )
    required = schema.get("required", [])
    rules, parts = [], []
    for number, (key, value) in enumerate(schema.get("properties", {}).items()):
        rule = f"argument_{index}_{number}"
        rules += _argument(tags, write, rule, key, _rooted(value, schema))
        parts.append(rule if key in required else f"{rule}?")
    return [f"arguments_{index}: " + (" ".join(parts) or '""'), *rules]


def unbound(tools: Any) -> frozenset[str]:
    """The bounds on strings in these tools that rules between tags cannot keep."""
    if isinstance(tools, Mapping):
        own = {word for word in UNBOUND if word in tools} if allowed_types(tools) == {"string"} else set()
        return frozenset(own).union(*(unbound(value) for value in tools.values()))
    return frozenset().union(*(unbound(value) for value in tools)) if isinstance(tools, list) else frozenset()


def _rooted(value: Any, schema: Mapping[str, Any]) -> Any:
    """The schema of one argument by itself, with the definitions that it may refer to."""
    shared = {word: schema[word] for word in ("$defs", "definitions") if word in schema}
    return {**shared, **value} if isinstance(value, Mapping) else value


def _argument(tags: Tags, write: ToExpression, rule: str, key: str, schema: Any) -> list[str]:
    types = allowed_types(schema)
    choices, rules = [], []
    if not types or "string" in types:
        before, after = _around(tags, write, key, True)
        choices.append(f"{before} {rule}_text")
        rules.append(_text_rule(f"{rule}_text", after, schema))
    if types != {"string"}:
        before, after = _around(tags, write, key, False)
        choices.append(f"{before} {rule}_json {after}")
        other = {**schema, "type": sorted(types - {"string"})} if "string" in types else schema
        rules.append(f"{rule}_json: {inline_schema(other)}")
    return [f"{rule}: " + " | ".join(choices), *rules]


def _text_rule(rule: str, after: str, schema: Any) -> str:
    """A text and what stands after it, of which the first occurrence ends the text."""
    given = schema if isinstance(schema, Mapping) else {}
    listed = given.get("enum", [given["const"]] if "const" in given else None)
    if isinstance(listed, list):
        texts = " | ".join(json.dumps(text) for text in listed if isinstance(text, str))
        return f"{rule}: ({texts}) {after}"
    end, length = json.JSONDecoder().raw_decode(after)
    pattern = re.escape(end).replace("/", r"\/").replace("\\\n", r"\n")
    return f"{rule}: {rule}_body {after[length:]}\n{rule}_body[lazy]: /(?s:.*){pattern}/"


def _around(tags: Tags, write: ToExpression, key: str, is_text: bool) -> tuple[str, str]:
    """What stands before a value and after it. The second begins with text."""
    opening = next((text for text, kind in tags.values if kind is is_text), "")
    before, after = tags.argument.format(key=key, open=opening, value="\0").split("\0")
    return write(before), write(after)
