"""Requests whose grammar is being compiled: they join the queue when it is ready, and no step waits for it."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from twostroke.grammar.compile import GrammarCompiler
from twostroke.types import Request

log = logging.getLogger(__name__)


class GrammarQueue:
    """One thread compiles; the thread that steps the engine calls everything else."""

    def __init__(self, compiler: GrammarCompiler, wake: Callable[[], None]):
        self._compiler = compiler
        self._wake = wake  # called from the compiling thread when something is ready
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
        except Exception as problem:  # it was tried before it came here: whatever happens now is ours
            log.exception("a grammar that was found good does not compile")
            error = f"{type(problem).__name__}: {problem}"
        self._done.append((siblings, error))
        self._wake()

    def take(self) -> list[tuple[Request, str | None]]:
        """Requests that may go on now, or cannot: with what went wrong."""
        ready: list[tuple[Request, str | None]] = []
        while self._done:
            siblings, error = self._done.popleft()
            ready += [(request, error) for request in siblings if self._waiting.pop(request.id, None) is not None]
        return ready

    def drop(self, number: int) -> Request | None:
        """Forget a request that nobody wants any more."""
        return self._waiting.pop(number, None)
