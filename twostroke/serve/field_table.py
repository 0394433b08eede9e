"""The table of every field of every generating route and its fate, as docs/clients.md shows it.

python -m twostroke.serve.field_table      prints it
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel

from twostroke.serve.api.anthropic import MessagesRequest
from twostroke.serve.api.chat import ChatRequest
from twostroke.serve.api.completions import CompletionRequest
from twostroke.serve.api.embeddings import EmbeddingsRequest
from twostroke.serve.api.rerank import RerankRequest, ScoreRequest
from twostroke.serve.api.responses import ResponsesRequest
from twostroke.serve.fates import HINTS, REFUSED, HintFate, fates

ROUTES: dict[str, type[BaseModel]] = {
    "chat": ChatRequest, "completions": CompletionRequest, "responses": ResponsesRequest, "messages": MessagesRequest,
    "embeddings": EmbeddingsRequest, "rerank": RerankRequest, "score": ScoreRequest,
}  # fmt: skip


def payloads_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The payload classes that a field's type contains."""
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from payloads_in(inner)


def fields(payload: type[BaseModel], path: str = "") -> Iterator[tuple[str, str]]:
    """Each field with its fate: "honoured", "hint" or "refused". Fields of inner objects have a path."""
    known = fates(payload)
    for name, field in payload.model_fields.items():
        shown = path + (field.alias or name)
        fate = known.get(field.alias or name)
        if fate is not None:
            yield shown, "hint" if isinstance(fate, HintFate) else "refused"
            continue
        yield shown, "honoured"
        for inner in payloads_in(field.annotation):
            yield from fields(inner, f"{shown}.")


def rows() -> list[tuple[str, str, str, str]]:
    """Fate, field, routes and words, the hints last. A field has one row for each fate that it has."""
    found: dict[tuple[str, str], dict[str, None]] = {}
    for route, payload in ROUTES.items():
        for name, fate in fields(payload):
            found.setdefault((fate, name), {})[route] = None
    order = {"honoured": 0, "refused": 1, "hint": 2}
    made = []
    for (fate, name), routes in sorted(found.items(), key=lambda pair: (order[pair[0][0]], pair[0][1])):
        last = name.rpartition(".")[2]
        words = {"hint": HINTS, "refused": REFUSED}.get(fate, {}).get(last, "")
        made.append((fate, name, ", ".join(routes), words))
    return made


def markdown() -> str:
    """Refusals and hints with their words; honoured fields as a list for each route."""
    lines = ["### Refused, unless null or empty", "", "| field | routes | why, and what to do |", "|---|---|---|"]
    lines += [f"| `{name}` | {routes} | {words} |" for fate, name, routes, words in rows() if fate == "refused"]
    lines += ["", "### Hints, with any value", "", "| field | routes | why it changes nothing |", "|---|---|---|"]
    lines += [f"| `{name}` | {routes} | {words} |" for fate, name, routes, words in rows() if fate == "hint"]
    lines += ["", "### Honoured", ""]
    for route, payload in ROUTES.items():
        names = sorted(dict.fromkeys(name for name, fate in fields(payload) if fate == "honoured" and "." not in name))
        lines.append(f"- **{route}**: {', '.join(f'`{name}`' for name in names)}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
