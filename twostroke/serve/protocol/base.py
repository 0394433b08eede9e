"""The one validator: strict types, unknown fields refused by name, bounds before anything is allocated."""

from __future__ import annotations

import json
from difflib import get_close_matches
from typing import Annotated, Any, TypeVar
from urllib.parse import parse_qsl

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from twostroke.serve.errors import ApiError, bad_request
from twostroke.serve.protocol.repeated import repeated

Text = Annotated[str, Field(max_length=4 << 20)]
Name = Annotated[str, Field(max_length=256)]


class Shape(BaseModel):
    """Base of everything a client may send. NaN and infinities are no numbers, "1" is no number, 1.0 is no int."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=(), frozen=True)


S = TypeVar("S", bound=Shape)


def validate(shape: type[S], body: bytes) -> S:
    """The body as `shape`, or a 400 that names the field."""
    try:
        found = shape.model_validate_json(body)
    except ValidationError as error:
        raise explain(shape, error, body) from None
    twice = repeated(body)
    if twice is not None:
        where = written(twice)
        raise bad_request(f"{where}: is there twice in one object; send it once.", where, "repeated_field")
    return found


def validate_query(shape: type[S], query: bytes) -> S:
    """The same for what follows the question mark of an address, where all numbers are whole."""
    try:
        pairs = parse_qsl(query.decode("ascii"), keep_blank_values=True, max_num_fields=16)
    except ValueError:
        raise bad_request("The query of the address cannot be read.", code="invalid_value") from None
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise bad_request(f"{name[:64]}: is there twice in the address; send it once.", name[:64], "repeated_field")
    values = {name: int(text) if text.isdecimal() and len(text) < 20 else text for name, text in pairs}
    return validate(shape, json.dumps(values).encode())


def explain(shape: type[Shape], error: ValidationError, body: bytes) -> ApiError:
    """One error of many: the one that lies deepest, which for a union is the branch the caller meant."""
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    if any(problem["type"].startswith("json_") for problem in problems):
        why = problems[0]["msg"].removeprefix("Invalid JSON: ")
        return bad_request(f"The body is not JSON: {why}.", code="invalid_json")
    value = json.loads(body)
    located = [(path_of(value, problem["loc"], problem["type"] == "missing"), problem) for problem in problems]
    path, problem = max(located, key=lambda pair: len(pair[0]))
    where = written(path)
    if problem["type"] == "extra_forbidden":
        near = get_close_matches(str(path[-1]), list(shape.model_fields), n=1) if len(path) == 1 else []
        hint = f" Did you mean {near[0]!r}?" if near else ""
        return bad_request(f"{where}: unknown or unsupported field.{hint}", where, "unsupported_field")
    if problem["type"] == "none_required":
        return bad_request(f"{where}: is not supported here; leave it out.", where, "unsupported_field")
    why = problem["msg"].removeprefix("Value error, ")
    return bad_request(f"{where or 'The body'}: {why}.", where or None, "invalid_value")


def path_of(value: Any, loc: tuple[int | str, ...], missing: bool) -> list[int | str]:
    """The part of a validator's location that lies in the document; the rest names branches of unions."""
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
    """messages[0].content, as people write it; cut where a client made it long."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part[:64]}" if text else part[:64]
    return text[:200]
