"""Answers on their way to the store, by the exact key of their request: a lookup of one of them waits for it."""

from __future__ import annotations

from concurrent.futures import Future


class Pending:
    """Used from any thread."""

    def __init__(self) -> None:
        self._futures: dict[bytes, Future[None]] = {}

    def begin(self, key: bytes) -> None:
        if key:
            self._futures[key] = Future()

    def end(self, key: bytes) -> None:
        """The answer is in the store, or it will not be."""
        waited = self._futures.pop(key, None)
        if waited is not None and not waited.done():
            waited.set_result(None)

    def get(self, key: bytes) -> Future[None] | None:
        return self._futures.get(key)
