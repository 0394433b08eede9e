"""The OpenAPI document, made from the table of routes and the payload classes that check the requests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic.json_schema import models_json_schema

import twostroke
from twostroke.serve.route import Route

ERRORS = {
    400: "A field is wrong: `param` names it", 401: "No valid API key", 404: "No such route or model",
    403: "An admin key is needed, or the web site is not allowed",
    405: "Not a method of this route",
    408: "The body arrived too slowly, or the answer was read too slowly",
    413: "The body is too large", 415: "The body is not JSON, or compressed", 421: "Not a name of this server",
    429: "The queue, or the key's share, is full: see Retry-After",
    431: "The headers are too large", 503: "The engine is not available: see Retry-After",
}  # fmt: skip


def document(routes: Iterable[Route], locked: bool) -> dict[str, Any]:
    table = list(routes)
    payloads = {route.body for route in table if route.body is not None}
    _, schemas = models_json_schema(
        [(payload, "validation") for payload in sorted(payloads, key=lambda payload: payload.__name__)],
        ref_template="#/components/schemas/{model}",
    )
    paths: dict[str, dict[str, Any]] = {}
    for route in table:
        paths.setdefault(route.path.replace("*", "{name}"), {})[route.method.lower()] = operation(route)
    components: dict[str, Any] = {"schemas": schemas.get("$defs", {})}
    if locked:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "twostroke", "version": twostroke.__version__},
        "paths": paths,
        "components": components,
        **({"security": [{"key": []}]} if locked else {}),
    }


def operation(route: Route) -> dict[str, Any]:
    responses = {str(status): {"description": text} for status, text in ERRORS.items()}
    responses["200"] = {"description": route.summary}
    described: dict[str, Any] = {"summary": route.summary, "responses": responses}
    if route.path.endswith("*"):
        described["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
    if route.query is not None:
        properties = route.query.model_json_schema()["properties"]
        described["parameters"] = [
            {"name": name, "in": "query", "schema": schema} for name, schema in properties.items()
        ]
    if route.body is not None:
        schema = {"$ref": f"#/components/schemas/{route.body.__name__}"}
        described["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return described
