"""What every kind of server has: a model's name, keys, metrics, threads, and the checks before a request is served."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeVar

from twostroke.metrics.registry import Metrics
from twostroke.serve.fields import Payload
from twostroke.serve.off_loop import Threads
from twostroke.serve.transport import errors
from twostroke.serve.transport.auth import Caller, Keys
from twostroke.serve.transport.http import Exchange

T = TypeVar("T")
P = TypeVar("P", bound=Payload)


class BaseService(ABC):
    def __init__(self, name: str, keys: Keys, metrics: Metrics, clock: Callable[[], float]):
        self.name = name
        self.keys = keys
        self.metrics = metrics
        self.clock = clock
        self.created = int(time.time())
        self.draining = False
        self.generating = 0  # exchanges of generating routes that are under way
        self.threads = Threads()

    @property
    @abstractmethod
    def max_model_len(self) -> int:
        """Tokens of the longest request."""

    @property
    @abstractmethod
    def key_share(self) -> float:
        """The most that one key may have of what other keys leave free; 1 until the model is loaded."""

    @property
    @abstractmethod
    def healthy(self) -> bool: ...

    @abstractmethod
    def trouble(self) -> str | None: ...

    @abstractmethod
    def slow(self) -> str | None: ...

    @abstractmethod
    def state(self) -> dict[str, Any]: ...

    @abstractmethod
    def check_loaded(self) -> None:
        """Raises a 503 for as long as the model has never been loaded."""

    @abstractmethod
    def check_open(self, caller: Caller) -> None:
        """Raises the 429 or 503 of a server that cannot take a generating request of this caller now."""

    def check_draining(self) -> None:
        if self.draining:
            raise errors.unavailable("The server is shutting down.", "shutting_down")

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.name:
            message = f"The model {name[:100]!r} is not served here; {self.name!r} is."
            raise errors.ApiError(404, message, param="model", code="model_not_found", reason="model")

    async def read(self, payload: type[P], exchange: Exchange) -> P:
        """The body of a request, checked."""
        return await self.threads.read(payload, exchange)

    async def off_loop(self, exchange: Exchange, size: int, function: Callable[..., T], *arguments: Any) -> T:
        """Calls the function at once if `size` is small, else in a thread, so that streams keep their pace."""
        return await self.threads.call(exchange, size, function, *arguments)
