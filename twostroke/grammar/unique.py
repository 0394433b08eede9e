"""Lists without repetition (`uniqueItems`), spelled out where a grammar can hold them. Torch-free.

A grammar cannot compare two items. But where the items come from a few values (enum, const, boolean, null), the lists
without repetition are few too, and can be named one by one, as an enum. Others are not bound: `spell_out` says so, and
the server lists `uniqueItems` as ignored.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from itertools import permutations
from typing import Any

from twostroke.grammar.keywords import MAX_DEPTH, change_inside
from twostroke.sampling import MAX_GRAMMAR

LISTS = 500  # named for one `uniqueItems`: five values have 326. The library follows about 660 at a time
ALL_LISTS = 3_000  # in one schema: half a second to compile
CHARACTERS = MAX_GRAMMAR // 4  # that the lists of one request's schemas have as JSON

_NOTES = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment"}
_ROOT = {"$schema", "$id", "$defs", "definitions"}
_LIST = {"type", "items", "minItems", "maxItems"}


def spell_out(schema: Any, characters: int = CHARACTERS) -> tuple[Any, bool]:
    """The same schema without `uniqueItems`, and whether its lists still have no repetition. Where the word stays, its
    value is no boolean, or no list meets it. characters: how long the lists may be together."""
    speller = _Speller(schema, characters)
    return speller.change(schema), speller.holds


class _Speller:
    def __init__(self, root: Any, characters: int) -> None:
        self.root = root
        self.left, self.characters = ALL_LISTS, characters
        self.holds = True

    def change(self, schema: Any, depth: int = 0) -> Any:
        if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
            return schema
        changed = {
            key: change_inside(key, value, lambda item: self.change(item, depth + 1)) for key, value in schema.items()
        }
        if not isinstance(schema.get("uniqueItems"), bool):
            return changed
        return self._list(changed) if changed.pop("uniqueItems") else changed

    def _list(self, schema: dict[str, Any]) -> dict[str, Any]:
        """A list without repetition. schema: without `uniqueItems` itself."""
        least, most = schema.get("minItems", 0), schema.get("maxItems", math.inf)
        if most in (0, 1):
            return schema
        values = self._values(schema.get("items")) if schema.get("type") == "array" else None
        others = schema.keys() - _LIST - _NOTES - _ROOT
        lengths = None if values is None or others else _lengths(values, least, most)
        if values is None or lengths is None or not self._pay(values, lengths):
            self.holds = False
            return schema
        lists = [list(one) for length in lengths for one in permutations(values, length)]
        if not lists:
            return {**schema, "uniqueItems": True}
        return {**{key: schema[key] for key in schema if key in _ROOT}, "enum": lists}

    def _pay(self, values: list[Any], lengths: range) -> bool:
        """Takes the lists of these lengths from what is left; False: they are too many, or too long."""
        count, size = 0, 0.0
        each = sum(len(json.dumps(value)) + 2 for value in values) / max(1, len(values))
        for length in lengths:
            more = math.perm(len(values), length)
            count += more
            if count > min(LISTS, self.left):
                return False
            size += more * (length * each + 4)
        if size > self.characters:
            return False
        self.left -= count
        self.characters -= int(size)
        return True

    def _values(self, items: Any) -> list[Any] | None:
        """The different values that an item may have. None: they are too many, or not listed."""
        if not isinstance(items, Mapping):
            return None
        given = {key: value for key, value in items.items() if key not in _NOTES}
        if given.keys() == {"$ref"}:
            return self._values(self._definition(given["$ref"]))
        kinds = given.pop("type", None)
        if kinds is not None and not all(isinstance(kind, str) for kind in _as_list(kinds)):
            return None
        if given.keys() == {"enum"} and isinstance(given["enum"], list):
            listed = given["enum"]
        elif given.keys() == {"const"}:
            listed = [given["const"]]
        elif not given and kinds in ("boolean", "null"):
            listed = [True, False, None]
        else:
            return None
        different = {_same(value): value for value in reversed(listed) if kinds is None or _is_of(value, kinds)}
        return list(different.values())[::-1]

    def _definition(self, reference: Any) -> Any:
        """What a reference to `$defs` means, if that is not a reference itself."""
        parts = reference.split("/") if isinstance(reference, str) else []
        if len(parts) != 3 or parts[0] != "#" or parts[1] not in ("$defs", "definitions"):
            return None
        shared = self.root.get(parts[1])
        found = shared.get(parts[2]) if isinstance(shared, Mapping) else None
        return None if isinstance(found, Mapping) and "$ref" in found else found


def _lengths(values: list[Any], least: Any, most: Any) -> range | None:
    """How long a list of different values may be. None: there are too many values, or the bounds are no bounds."""
    if not isinstance(least, int) or not (isinstance(most, int) or most == math.inf) or len(values) > LISTS:
        return None
    return range(max(least, 0), int(min(most, len(values))) + 1)


def _same(value: Any) -> str:
    """A text that equal values share: 1 and 1.0 are equal, and the order of properties does not matter."""
    return json.dumps(json.loads(json.dumps(value), parse_float=_number), sort_keys=True)


def _number(text: str) -> float:
    number = float(text)
    return int(number) if number.is_integer() else number


def _is_of(value: Any, kinds: Any) -> bool:
    """Whether a value has one of the types that a schema names."""
    if isinstance(value, bool) or value is None:
        own = {"null"} if value is None else {"boolean"}
    elif isinstance(value, (int, float)):
        own = {"number", "integer"} if isinstance(value, int) or value.is_integer() else {"number"}
    else:
        own = {"string"} if isinstance(value, str) else {"array"} if isinstance(value, list) else {"object"}
    return not own.isdisjoint(_as_list(kinds))


def _as_list(kinds: Any) -> list[Any]:
    return kinds if isinstance(kinds, list) else [kinds]
