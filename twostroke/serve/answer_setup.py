"""From the command line's options to an answer cache, and its metrics."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Literal

import numpy as np
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from twostroke.answers.cache import AnswerCache
from twostroke.answers.lookup import ALLOWED, CacheOptions
from twostroke.answers.redis import RedisStore
from twostroke.answers.store import AnswerStore, FileStore
from twostroke.answers.topics import Topics
from twostroke.embed.embedder import Embedder
from twostroke.errors import ConfigError
from twostroke.serve.recorder import Recorder

KEY_VARIABLE = "TWOSTROKE_ANSWER_CACHE_KEY"  # shared by all servers of a deployment
SHORT_KEY = 16  # characters


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """The options of the answer cache, as the command line has them."""

    tier: Literal["off", "exact", "semantic"] = "off"
    url: str | None = None
    file: Path | None = None  # of the embedded store
    error: float = 0.01
    ttl: float | None = None
    entries: int = 100_000
    allow: tuple[str, ...] = ()  # what the semantic tier compares although it would not
    record: bool = False  # questions, for `diagnose`
    embedder: Path | None = None  # its folder; of the semantic tier and of recorded questions

    def check(self) -> None:
        """Check the options before anything is fetched."""
        if self.tier == "off" and self.url is not None:
            raise ConfigError("--answer-cache-url: needs --answer-cache exact or semantic.")
        if self.url is not None and len(os.environ.get(KEY_VARIABLE, "")) < SHORT_KEY:
            raise ConfigError(
                f"--answer-cache-url: set {KEY_VARIABLE} to a secret of {SHORT_KEY} characters or more, the same for "
                "all servers of the deployment: entries are authenticated with it."
            )
        self._check_allowed()
        if not 0 < self.error < 1:
            raise ConfigError(f"--answer-cache-error: {self.error:g} is no share of wrong answers; 0.01 is 1 %.")

    def _check_allowed(self) -> None:
        if self.allow and self.tier != "semantic":
            raise ConfigError("--answer-cache-allow: needs --answer-cache semantic.")
        for name in self.allow:
            if name in ("n", "logprobs"):
                raise ConfigError(
                    f"--answer-cache-allow: {name!r}: one answer is stored, without its log-probabilities."
                )
            if name not in ALLOWED:
                raise ConfigError(f"--answer-cache-allow: {name!r} is not known; use {', '.join(ALLOWED)}.")

    @property
    def compares(self) -> bool:
        """Whether questions become vectors."""
        return self.record or self.tier == "semantic"


class Questions:
    """Vectors of questions and answers, one thread's work."""

    def __init__(self, embedder: Embedder):
        self._embedder = embedder

    def embed(self, texts: list[str]) -> np.ndarray:
        tokens = [self._embedder.tokenizer.encode(text, cut=True) for text in texts]
        return self._embedder.run(tokens)


def open_texts(options: AnswerOptions) -> Questions:
    assert options.embedder is not None
    embedder = Embedder.open(options.embedder, threads=1, coded=True)
    embedder.check_vectors()
    return Questions(embedder)


def open_recorder(options: AnswerOptions) -> Recorder:
    """Open the record of questions; called in a thread, as `open_cache` is."""
    return Recorder(Topics(open_texts(options)))


def open_cache(options: AnswerOptions) -> AnswerCache:
    """Open the cache. Called in a thread: it reads the embedder's weights and the stored vectors."""
    assert options.tier != "off"
    texts = open_texts(options) if options.tier == "semantic" else None
    store: AnswerStore
    if options.url is not None:
        store, secret = RedisStore(options.url, options.ttl), digest(os.environ[KEY_VARIABLE].encode())
    else:
        assert options.file is not None
        store, secret = FileStore(options.file, options.entries), file_secret(options.file)
    settings = CacheOptions(tier=options.tier, error=options.error, ttl=options.ttl, allow=frozenset(options.allow))
    return AnswerCache(settings, store, secret, texts)


def digest(secret: bytes) -> bytes:
    return blake2b(secret, digest_size=32, person=b"answers").digest()


def file_secret(path: Path) -> bytes:
    """The key of an embedded store: from the environment, or a random one in a file beside it that its owner reads."""
    given = os.environ.get(KEY_VARIABLE)
    if given:
        return digest(given.encode())
    place = path.with_suffix(path.suffix + ".key")
    try:
        descriptor = os.open(place, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    except FileExistsError:
        return digest(place.read_bytes())
    with os.fdopen(descriptor, "wb") as file:
        secret = secrets.token_hex(32).encode()
        file.write(secret)
    return digest(secret)


class AnswerMetrics(Collector):
    """The counters of an answer cache, read when they are written out."""

    def __init__(self, cache: AnswerCache, model: str, registry: CollectorRegistry):
        self.cache, self.model = cache, model
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        counters, estimate = self.cache.counters, self.cache.estimate()
        hits = CounterMetricFamily(
            "twostroke:answer_cache_hits", "Answers that were known, by tier.", labels=["model_name", "tier"]
        )
        for tier, count in counters.hits.items():
            hits.add_metric([self.model, tier], count)
        yield hits
        totals = {
            "misses": ("Lookups that found nothing.", counters.misses),
            "bypassed": ("Requests that asked not to be looked up.", counters.bypassed),
            "late": ("Lookups beyond their deadline.", counters.late),
            "failures": ("Calls of the store that failed.", counters.failed),
            "stored": ("Answers stored.", counters.stored),
            "refused_entries": ("Entries that were not authentic.", counters.refused),
            "saved_tokens": ("Output tokens that were not computed.", counters.tokens_saved),
            "saved_seconds": ("Seconds that computing them took the first time.", counters.seconds_saved),
        }
        for name, (text, value) in totals.items():
            made = CounterMetricFamily(f"twostroke:answer_cache_{name}", text, labels=["model_name"])
            made.add_metric([self.model], value)
            yield made
        gauges = {
            "error_rate": ("Estimated share of wrong answers of the semantic tier.", estimate.rate),
            "error_upper": ("Upper end of its 95 % interval.", estimate.upper),
            "error_bound": ("The share that is allowed.", self.cache.options.error),
            "threshold": ("Similarity from which answers are shared; 2: none is.", estimate.threshold or 2.0),
            "evidence_pairs": ("Pairs that the estimate rests on.", estimate.pairs),
        }
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(f"twostroke:answer_cache_{name}", text, labels=["model_name"])
            gauge.add_metric([self.model], value)
            yield gauge
