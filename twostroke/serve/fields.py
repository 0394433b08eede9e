"""From a request's bytes to checked fields: types are strict, unknown fields are refused by name. `fates` says which
fields are hints, and which are refused with a sentence.

A payload class says which JSON types its fields have. `SamplingParams` checks the ranges of sampling values, as it does
for callers in Python. Only elements of lists and objects have their range here, where an error can name the element.
"""

from __future__ import annotations

import json
from difflib import get_close_matches
from typing import Annotated, Any, TypeVar
from urllib.parse import parse_qsl

import jiter
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from twostroke.serve.fates import REFUSED_TYPE
from twostroke.serve.transport.errors import ApiError, bad_request

T = TypeVar("T")
MAX_COUNT = 2**31 - 1

LongText = Annotated[str, Field(max_length=4 << 20)]
ShortText = Annotated[str, Field(max_length=256)]
Integer = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Natural = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
TokenId = Natural
OrEmpty = Annotated[T | None, BeforeValidator(lambda value: None if value in ("", {}) else value)]  # means null
Many = Annotated[list[T], Field(fail_fast=True)]  # checked up to its first wrong element
TokenIds = Annotated[Many[TokenId], Field(min_length=1)]


class Payload(BaseModel):
    """Base of every JSON object that a client sends. NaN and infinities are refused, "1" is no number, 1.0 no int."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=(), frozen=True)


P = TypeVar("P", bound=Payload)


def validate(payload: type[P], body: bytes) -> P:
    """The body as `payload`, or a 400 that names the field."""
    try:
        found = payload.model_validate_json(body)
    except ValidationError as error:
        raise explain(payload, error, body) from None
    repeated = repeated_name(body)
    if repeated is not None:
        where = written(repeated)
        raise bad_request(f"{where}: occurs twice in one object; send it once.", where, "repeated_field")
    return found


def validate_query(payload: type[P], query: bytes) -> P:
    """The same for the query of an address, in which every number is a whole number."""
    try:
        pairs = parse_qsl(query.decode("ascii"), keep_blank_values=True, max_num_fields=16)
    except ValueError:
        raise bad_request("The query of the URL cannot be read.", code="invalid_value") from None
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise bad_request(f"{name[:64]}: occurs twice in the query; send it once.", name[:64], "repeated_field")
    values = {name: int(text) if text.isdecimal() and len(text) < 20 else text for name, text in pairs}
    return validate(payload, json.dumps(values).encode())


def explain(payload: type[Payload], error: ValidationError, body: bytes) -> ApiError:
    """One error of many: a refusal with its own sentence, else the error that lies deepest. For a union that is the
    branch which the caller meant."""
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    if any(problem["type"].startswith("json_") for problem in problems):
        why = problems[0]["msg"].removeprefix("Invalid JSON: ")
        return bad_request(f"The body is not JSON: {why}.", code="invalid_json")
    value = jiter.from_json(body, cache_mode="keys")
    located = [(path_of(value, problem["loc"], problem["type"] == "missing"), problem) for problem in problems]
    path, problem = max(located, key=lambda pair: (pair[1]["type"] == REFUSED_TYPE, len(pair[0])))
    where = written(path)
    if problem["type"] == REFUSED_TYPE:
        return bad_request(f"{where}: {problem['msg']}.", where, "unsupported_field")
    if problem["type"] == "extra_forbidden":
        near = get_close_matches(str(path[-1]), list(payload.model_fields), n=1) if len(path) == 1 else []
        hint = f" Did you mean {near[0]!r}?" if near else " Leave it out: GET /openapi.json lists the fields."
        return bad_request(f"{where}: unknown or unsupported field.{hint}", where, "unsupported_field")
    why = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "missing":
        why = "is required: add it"
    elif why.startswith("Input should be"):
        why += got(value, path)
    return bad_request(f"{where or 'The body'}: {why}.", where or None, "invalid_value")


def got(value: Any, path: list[int | str]) -> str:
    """The value there, in words, where it is a number or a short text."""
    for part in path:
        value = value[part]
    number = isinstance(value, (int, float)) and abs(value) < 1e18  # Python refuses to write very long whole numbers
    short = number or (isinstance(value, str) and len(value) <= 32)
    return f", got {json.dumps(value)}" if short else ""


def path_of(value: Any, loc: tuple[int | str, ...], missing: bool) -> list[int | str]:
    """The part of pydantic's location that lies in the document; the rest names branches of unions."""
    path: list[int | str] = []
    for depth, part in enumerate(loc):
        inside = part in value if isinstance(value, dict) else isinstance(value, list) and isinstance(part, int)
        if inside:
            value = value[part]
        elif not (missing and depth == len(loc) - 1):
            continue
        path.append(part)
    return path


def written(path: list[int | str]) -> str:
    """The path written as in messages[0].content, with long names cut."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part[:64]}" if text else part[:64]
    return text[:200]


# ---- names that occur twice in one object --------------------------------------------------------------------------


class _Repeated:
    """Stands for an object in which `name` occurs more than once."""

    def __init__(self, name: str):
        self.name = name


def repeated_name(body: bytes) -> list[int | str] | None:
    """The path of a name that occurs twice in one object of a JSON body, None if there is none.

    Parsers differ in which of the two they use, so a gateway may have checked another value than the one used here.
    """
    try:
        jiter.from_json(body, catch_duplicate_keys=True, cache_mode="keys")
        return None
    except ValueError:
        return _find(json.loads(body, object_pairs_hook=_as_object))


def _as_object(pairs: list[tuple[str, Any]]) -> dict[str, Any] | _Repeated:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            return _Repeated(name)
        found[name] = value
    return found


def _find(value: Any) -> list[int | str] | None:
    if isinstance(value, _Repeated):
        return [value.name]
    if isinstance(value, dict | list):
        for part, inner in value.items() if isinstance(value, dict) else enumerate(value):
            rest = _find(inner)
            if rest is not None:
                return [part, *rest]
    return None
