"""Requests whose grammar is being compiled. They are submitted when it is ready, and no step waits for it."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from twostroke.grammar.compile import GrammarCompiler
from twostroke.types import Request

log = logging.getLogger(__name__)


class GrammarQueue:
    """A thread of its own compiles. All methods are called by the thread that steps the engine."""

    def __init__(self, compiler: GrammarCompiler, wake: Callable[[], None]):
        self._compiler = compiler
        self._wake = wake  # called in the compiling thread when a grammar is ready
        self._waiting: dict[int, Request] = {}
        self._done: deque[tuple[list[Request], str | None]] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")

    def add(self, siblings: list[Request]) -> None:
        self._waiting.update((request.id, request) for request in siblings)
        self._thread.submit(self._compile, siblings)

    def _compile(self, siblings: list[Request]) -> None:
        grammar = siblings[0].params.grammar
        assert grammar is not None
        error = None
        try:
            self._compiler.compile(grammar)
        except Exception as problem:  # the grammar was tried before: this is an error of ours
            log.exception("a grammar that passed its check does not compile")
            error = f"{type(problem).__name__}: {problem}"
        self._done.append((siblings, error))
        self._wake()

    def take(self) -> list[tuple[Request, str | None]]:
        """Requests whose grammar is ready, each with what went wrong, if anything did."""
        ready: list[tuple[Request, str | None]] = []
        while self._done:
            siblings, error = self._done.popleft()
            ready += [(request, error) for request in siblings if self._waiting.pop(request.id, None) is not None]
        return ready

    def drop(self, number: int) -> Request | None:
        """Remove an aborted request. None: it is not waiting here."""
        return self._waiting.pop(number, None)
