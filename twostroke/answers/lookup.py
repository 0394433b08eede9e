"""What a lookup is asked and what it finds; the options and the counters of the cache."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import numpy as np

from twostroke.answers import guard
from twostroke.answers.bound import JudgedPair
from twostroke.answers.entry import Entry

Tier = Literal["exact", "semantic"]
ALLOWED = ("tools", "temperature", *guard.MARKERS)  # what keeps a request from the semantic tier, unless it is allowed


@dataclass(frozen=True, slots=True)
class CacheOptions:
    tier: Tier = "exact"
    error: float = 0.01  # share of wrong answers of the semantic tier
    ttl: float | None = 7 * 86400.0  # seconds
    deadline: float = 0.005  # seconds that a lookup may take, beside the time of a vector
    shadow: float = 0.05  # share of semantic hits that are computed as well
    allow: frozenset[str] = frozenset()  # see ALLOWED


class Texts(Protocol):
    """Makes vectors of length 1; None: texts are not compared by meaning."""

    def embed(self, texts: list[str]) -> np.ndarray: ...


@dataclass(slots=True)
class Query:
    """A request as the cache sees it."""

    tenant: bytes
    exact: bytes = b""  # empty: not determined
    context: bytes = b""  # empty: not compared by meaning
    question: str = ""
    max_age: float | None = None
    begun: Future[Alike] | None = None  # the lookup by meaning


class KnownAnswer(NamedTuple):
    entry: Entry
    tier: Tier
    similarity: float
    hit: str  # id of this hit
    age: float


class Allowed(NamedTuple):
    """A known question that passed the guard and may be shared if it is near enough."""

    entry: Entry
    kind: str


class Alike(NamedTuple):
    """What a lookup by meaning found."""

    allowed: list[Allowed]
    vector: np.ndarray | None  # of the question, where something is allowed or it is kept


class Similar(NamedTuple):
    """A known question that passed the guard."""

    entry: Entry
    kind: str
    similarity: float

    def evidence(self, right: bool) -> JudgedPair:
        return JudgedPair(self.entry.id, self.kind, self.similarity, right)


@dataclass(slots=True)
class Looked:
    """What a lookup found out."""

    found: KnownAnswer | None = None
    vector: np.ndarray | None = None
    near: Similar | None = None  # of a hit that is to be computed as well: what the answer is compared with
    shadow: bool = False  # the hit is to be computed as well
    late: asyncio.Future[Looked] | None = None  # the lookup that goes on


class Computed(NamedTuple):
    """An answer that was computed and ended well."""

    tokens: tuple[int, ...]
    by_string: bool  # a stop string ended it
    prompt_tokens: int
    seconds: float
    decode: Callable[[tuple[int, ...]], str]


@dataclass(slots=True)
class CacheCounters:
    hits: dict[str, int] = field(default_factory=lambda: {"exact": 0, "semantic": 0, "coalesced": 0})
    misses: int = 0
    bypassed: int = 0
    late: int = 0
    failed: int = 0
    stored: int = 0
    refused: int = 0  # entries that were not authentic
    tokens_saved: int = 0
    seconds_saved: float = 0.0
