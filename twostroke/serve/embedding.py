"""A server of an embedder: `twostroke serve all-minilm-l6-v2`. The model computes on a thread of its own, in native
code that gives up the interpreter lock."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from prometheus_client import Counter

from twostroke.config import make_config
from twostroke.embed.batcher import Batcher, ComputedVectors, FullError
from twostroke.embed.embedder import Embedder, open_embedder
from twostroke.embed.texts import Tokens
from twostroke.errors import InputError
from twostroke.metrics.registry import Metrics
from twostroke.serve.base_service import BaseService
from twostroke.serve.transport import errors
from twostroke.serve.transport.auth import Caller, Keys
from twostroke.serve.transport.http import Exchange, GoneError

T = TypeVar("T")


class EmbeddingService(BaseService):
    def __init__(self, path: Path, settings: dict[str, Any], name: str, keys: Keys, metrics: Metrics):
        super().__init__(name, keys, metrics, time.monotonic)
        self._settings, self._given = make_config(**settings), settings
        self._path = path
        self._embedder: Embedder | None = None
        self._batcher: Batcher | None = None
        labels, registry = ["model_name", "phase"], metrics.registry
        self._seconds = Counter(
            "twostroke:embedding_seconds", "Seconds of requests, by phase.", labels, registry=registry
        )
        self._texts = Counter("twostroke:embedding_texts", "Texts computed.", ["model_name"], registry=registry)
        self._tokens = Counter("twostroke:embedding_tokens", "Tokens computed.", ["model_name"], registry=registry)

    def load(self) -> None:
        """Reads the weights. In a thread."""
        self._embedder = open_embedder(self._path, self._given)
        self._batcher = Batcher(self._embedder)

    def stop(self) -> None:
        if self._batcher is not None:
            self._batcher.stop()

    @property
    def embedder(self) -> Embedder:
        assert self._embedder is not None, "check_loaded comes first"
        return self._embedder

    @property
    def max_model_len(self) -> int:
        return self.embedder.max_tokens

    @property
    def key_share(self) -> float:
        return self._settings.key_share

    @property
    def healthy(self) -> bool:
        return self.trouble() is None

    def trouble(self) -> str | None:
        if self._batcher is None:
            return "it is loading"
        return None if self._batcher.alive else "its thread ended"

    def slow(self) -> str | None:
        return None

    def state(self) -> dict[str, Any]:
        batcher = self._batcher
        return {
            "in_flight": self.generating, "steps": batcher.steps if batcher else 0,
            "waiting_tokens": batcher.waiting if batcher else 0,
        }  # fmt: skip

    def check_loaded(self) -> None:
        if self._batcher is None:
            raise errors.ApiError(
                503, "The model is still loading.", code="loading", retry_after=2, reason="unavailable"
            )

    def check_open(self, caller: Caller) -> None:
        self.check_draining()
        self.check_loaded()
        trouble = self.trouble()
        if trouble is not None:
            raise errors.unavailable(f"The model is not available: {trouble}.")

    async def tokenize(self, exchange: Exchange, size: int, function: Callable[..., T], *arguments: Any) -> T:
        """A function that tokenizes. size: characters. What it refuses becomes a 400."""
        try:
            return await self.off_loop(exchange, size, function, *arguments)
        except InputError as error:
            field = str(error).partition(":")[0]
            raise errors.bad_request(str(error), field, "invalid_value") from None

    async def compute(self, exchange: Exchange, texts: Sequence[Tokens]) -> ComputedVectors:
        """A row for each text. A client that disconnects drops what is not computed yet."""
        exchange.release_body()
        assert self._batcher is not None
        try:
            future = self._batcher.submit(texts, exchange.caller.number)
        except FullError:
            raise errors.busy(1, "The server is at capacity") from None

        def drop() -> None:
            future.cancel()

        async with exchange.watched(drop):
            try:
                found = await asyncio.wrap_future(future)
            except asyncio.CancelledError:
                if future.cancelled():
                    raise GoneError from None
                raise
        self._count(texts, found)
        return found

    def _count(self, texts: Sequence[Tokens], found: ComputedVectors) -> None:
        self._seconds.labels(self.name, "queue").inc(found.queue)
        self._seconds.labels(self.name, "prefill").inc(found.compute)
        self._texts.labels(self.name).inc(len(texts))
        self._tokens.labels(self.name).inc(sum(len(text.ids) for text in texts))


def timings(found: ComputedVectors, tokens: int) -> dict[str, Any]:
    """Where the time of a request went: the prefill stroke alone."""
    return {"queue_s": found.queue, "prefill_s": found.compute, "decode_s": 0.0, "prompt_tokens": tokens}
