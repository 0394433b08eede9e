"""What a route is."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from twostroke.serve.fields import Payload
from twostroke.serve.transport.http import Exchange

Handler = Callable[[Any, Exchange], Awaitable[None]]  # the first: a `BaseService` of the kind that the table is for


class Route(NamedTuple):
    method: str
    path: str  # a trailing * stands for the rest of the path
    handler: Handler
    summary: str
    body: type[Payload] | None = None
    generates: bool = False  # refused while the engine is not available or its queue is full
    loaded: bool = True  # refused until the model is loaded
    query: type[Payload] | None = None

    def matches(self, path: str) -> bool:
        if self.path.endswith("*"):
            return path.startswith(self.path[:-1]) and len(path) >= len(self.path)
        return path == self.path
