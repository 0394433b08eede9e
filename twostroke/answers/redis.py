"""The store on Redis 8: vector sets for questions, plain keys for answers and wordings. All servers of a deployment
share it.

Every call has a deadline. After a failure Redis is not asked again for a moment, so that requests go on without it at
once; then it is tried again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from twostroke.answers.store import ALIKE, MAX_EVIDENCE, IndexedEntry, Near, StoreError
from twostroke.errors import ConfigError

T = TypeVar("T")
PREFIX = b"twostroke:answers:"
RETRY = 1.0  # seconds without Redis after a failure
SOCKET = 0.05  # seconds that one call may take


class RedisStore:
    def __init__(self, url: str, ttl: float | None):
        """ttl: seconds after which Redis forgets an entry."""
        try:
            import redis
        except ImportError:
            raise ConfigError("--answer-cache-url needs redis-py: pip install 'twostroke[redis]'.") from None
        try:
            self._redis: Any = redis.Redis.from_url(
                url, socket_timeout=SOCKET, socket_connect_timeout=SOCKET, retry=None, protocol=2
            )
        except ValueError as error:
            raise ConfigError(f"--answer-cache-url: {error}; write redis://HOST:PORT.") from None
        self._error: type[Exception] = redis.RedisError
        self._refusal: type[Exception] = redis.ResponseError  # of a command, by a Redis that answers
        self._sorts = True
        self._ttl = ttl
        self._away_until = 0.0
        self.clock = time.monotonic

    def _call(self, function: Callable[[], T]) -> T:
        if self.clock() < self._away_until:
            raise StoreError("Redis did not answer a moment ago")
        try:
            return function()
        except (self._error, OSError) as error:
            self._away_until = self.clock() + RETRY
            raise StoreError(f"Redis: {type(error).__name__}") from None

    def _name(self, kind: bytes, key: bytes) -> bytes:
        return PREFIX + kind + b":" + key.hex().encode()

    def holds(self, key: bytes) -> None:
        """The same as of `Store`."""

    def exact(self, key: bytes) -> bytes | None:
        def ask() -> bytes | None:
            entry = self._redis.get(self._name(b"exact", key))
            return None if entry is None else self._redis.get(PREFIX + b"entry:" + entry)

        return self._call(ask)

    def alike(self, wording: bytes) -> list[bytes]:
        """The same as of `Store`. SORT without an order gives the values that a list names in one call. Not every user
        of a Redis may call it: then the list and the values are two calls."""
        name = self._name(b"alike", wording)

        def ask() -> list[bytes | None]:
            if self._sorts:
                try:
                    return self._redis.sort(name, start=0, num=ALIKE, by="nosort", get=PREFIX + b"entry:*")
                except self._refusal:
                    self._sorts = False
            found = self._redis.lrange(name, 0, ALIKE - 1)
            return self._redis.mget([PREFIX + b"entry:" + entry for entry in found]) if found else []

        return [value for value in self._call(ask) if value is not None]

    def nearest(self, context: bytes, vector: np.ndarray, count: int) -> list[Near]:
        """VSIM's score is (1 + cosine) / 2."""
        data = np.ascontiguousarray(vector, np.float32).tobytes()
        name = self._name(b"near", context)
        found = self._call(
            lambda: self._redis.execute_command("VSIM", name, "FP32", data, "WITHSCORES", "COUNT", count)
        )
        pairs = zip(found[::2], found[1::2], strict=True)
        return [Near(entry.decode("ascii", "replace"), 2 * float(score) - 1) for entry, score in pairs]

    def get(self, entry: str) -> bytes | None:
        return self._call(lambda: self._redis.get(PREFIX + b"entry:" + entry.encode()))

    def put(self, known: IndexedEntry, vector: np.ndarray | None, sealed: bytes) -> None:
        life = None if self._ttl is None else max(1, int(self._ttl))
        entry = known.id.encode()

        def write() -> None:
            pipe = self._redis.pipeline(transaction=False)
            pipe.set(PREFIX + b"entry:" + entry, sealed, ex=life)
            pipe.zadd(PREFIX + b"latest", {entry: known.created})
            if known.exact:
                pipe.set(self._name(b"exact", known.exact), entry, ex=life)
            if known.wording:
                name = self._name(b"alike", known.wording)
                pipe.lpush(name, entry)
                pipe.ltrim(name, 0, ALIKE - 1)
                if life is not None:
                    pipe.expire(name, life)
            if known.context and vector is not None:
                data = np.ascontiguousarray(vector, np.float32).tobytes()
                pipe.execute_command("VADD", self._name(b"near", known.context), "FP32", data, entry, "NOQUANT")
            pipe.execute()

        self._call(write)

    def hit(self, entry: str) -> None:
        self._call(lambda: self._redis.incr(PREFIX + b"hits:" + entry.encode()))

    def forget(self, entries: list[str]) -> int:
        """Elements of vector sets stay until they are found and turn out to have no entry: see `drop`."""
        names = [entry.encode() for entry in entries]
        if not names:
            return 0
        self._call(lambda: self._redis.zrem(PREFIX + b"latest", *names))
        return int(self._call(lambda: self._redis.delete(*(PREFIX + b"entry:" + name for name in names))))

    def drop(self, context: bytes, entry: str) -> None:
        """Takes an element out of a vector set whose entry is gone."""
        self._call(lambda: self._redis.execute_command("VREM", self._name(b"near", context), entry.encode()))

    def entries(self, limit: int) -> list[IndexedEntry]:
        if limit <= 0:
            return []  # for Redis a range up to -1 is the whole one
        found = self._call(lambda: self._redis.zrevrange(PREFIX + b"latest", 0, limit - 1, withscores=True))
        return [IndexedEntry(entry.decode(), b"", b"", b"", created, 0) for entry, created in found]

    def count(self) -> int:
        return int(self._call(lambda: self._redis.zcard(PREFIX + b"latest")))

    def add_evidence(self, value: bytes) -> None:
        name, record = PREFIX + b"evidence", {b"v": value}
        self._call(lambda: self._redis.xadd(name, record, maxlen=MAX_EVIDENCE, approximate=True))

    def evidence(self, after: str, limit: int) -> list[tuple[str, bytes]]:
        """Evidence from all servers of the deployment."""
        first = f"({after}" if after else "-"
        found = self._call(lambda: self._redis.xrange(PREFIX + b"evidence", first, "+", count=limit))
        return [(mark.decode(), record.get(b"v", b"")) for mark, record in found]

    def close(self) -> None:
        self._redis.close()
