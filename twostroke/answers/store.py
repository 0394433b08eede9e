"""The embedded store: one SQLite file, with keys and vectors in memory. Used from one thread.

An answer is served by its key: of the exact request, or of its question's wording. Vectors lie in one matrix for each
context, and a search for neighbours to learn from multiplies it with the question's vector. Of many vectors only short
sketches are multiplied, and the best candidates are compared in full.
"""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from twostroke.errors import ConfigError

log = logging.getLogger(__name__)
VERSION = 2  # of the tables
TABLES = """
CREATE TABLE IF NOT EXISTS answers (
    id TEXT PRIMARY KEY, tenant BLOB, exact BLOB, context BLOB, vector BLOB, sealed BLOB, created REAL, tokens INTEGER,
    wording BLOB, hits INTEGER DEFAULT 0);
CREATE TABLE IF NOT EXISTS evidence (number INTEGER PRIMARY KEY AUTOINCREMENT, value BLOB);
"""
EVICTED = 0.02  # of the entries, when there are too many
FEW = 4096  # vectors that are compared in full
SKETCH = 32  # numbers of a sketch
BLOCK = 64  # scores of which the highest is taken first
CANDIDATES = 64  # vectors with the best sketches, which are compared in full
ALIKE = 8  # entries of one wording that are found: the latest
UNWRITTEN = 256  # hits that are counted in memory before they are written to the file
MAX_EVIDENCE = 60_000  # records: the oldest go first


class IndexedEntry(NamedTuple):
    """What is kept in memory of an entry."""

    id: str
    tenant: bytes
    exact: bytes
    context: bytes
    created: float
    tokens: int
    wording: bytes = b""  # key of its question's wording; empty: not compared by meaning


class Near(NamedTuple):
    id: str
    similarity: float


class StoreError(Exception):
    """The store did not answer."""


class AnswerStore(Protocol):
    def exact(self, key: bytes) -> bytes | None: ...

    def holds(self, key: bytes) -> bool | None:
        """From any thread, at once: whether there is an entry with this exact key; None: only a lookup can tell."""
        ...

    def alike(self, wording: bytes) -> list[bytes]:
        """The latest entries with this wording."""
        ...

    def nearest(self, context: bytes, vector: np.ndarray, count: int) -> list[Near]: ...

    def get(self, entry: str) -> bytes | None: ...

    def put(self, known: IndexedEntry, vector: np.ndarray | None, sealed: bytes) -> None: ...

    def hit(self, entry: str) -> None: ...

    def forget(self, entries: list[str]) -> int: ...

    def entries(self, limit: int) -> list[IndexedEntry]: ...

    def count(self) -> int: ...

    def add_evidence(self, value: bytes) -> None: ...

    def evidence(self, after: str, limit: int) -> list[tuple[str, bytes]]:
        """Records and their marks, the oldest first. after: the mark of the last one that was read, or empty."""
        ...

    def close(self) -> None: ...


class Rows:
    """The vectors of one context. Removed rows are overwritten by the last one. Where there are many, their sketches
    are compared first: projections to SKETCH numbers, which keep near vectors near."""

    def __init__(self, width: int):
        self.ids: list[str] = []
        self._place: dict[str, int] = {}
        self._matrix = np.zeros((16, width), np.float32)
        self._sketches: np.ndarray | None = None  # where there were ever more than FEW rows

    def add(self, entry: str, vector: np.ndarray) -> None:
        if len(self.ids) == len(self._matrix):
            self._matrix = np.concatenate([self._matrix, np.zeros_like(self._matrix)])
            if self._sketches is not None or len(self.ids) >= FEW:
                self._sketches = self._matrix @ projection(self._matrix.shape[1])
        place = len(self.ids)
        self._matrix[place] = vector
        if self._sketches is not None:
            self._sketches[place] = np.einsum("i,ij->j", vector, projection(len(vector)))
        self._place[entry] = place
        self.ids.append(entry)

    def remove(self, entry: str) -> None:
        place = self._place.pop(entry, None)
        if place is None:
            return
        last = self.ids.pop()
        if last != entry:
            self.ids[place], self._place[last] = last, place
            self._matrix[place] = self._matrix[len(self.ids)]
            if self._sketches is not None:
                self._sketches[place] = self._sketches[len(self.ids)]

    def nearest(self, vector: np.ndarray, count: int) -> list[Near]:
        places = np.arange(len(self.ids))
        rows = self._matrix[: len(self.ids)]
        if self._sketches is not None:
            sketch = np.einsum("i,ij->j", vector, projection(len(vector)))
            places = highest(products(self._sketches[: len(self.ids)], sketch), CANDIDATES)
            rows = self._matrix[places]
        scores = products(rows, vector)
        best = highest(scores, count)
        return [Near(self.ids[places[i]], float(scores[i])) for i in best[np.argsort(-scores[best])]]


def products(rows: np.ndarray, vector: np.ndarray) -> np.ndarray:
    """Products on this thread alone: threads of a BLAS wait for each other where the engine has the cores."""
    made: np.ndarray = np.einsum("ij,j->i", rows, vector)
    return made


def highest(scores: np.ndarray, count: int) -> np.ndarray:
    """The places of the highest scores, in any order. Of many, those below the best blocks are left out first."""
    if len(scores) <= count:
        return np.arange(len(scores))
    places = np.arange(len(scores))
    blocks = len(scores) // BLOCK
    if blocks > count:
        most = scores[: blocks * BLOCK].reshape(blocks, BLOCK).max(axis=1)
        places = np.flatnonzero(scores >= np.partition(most, -count)[-count])
    found: np.ndarray = places[np.argpartition(scores[places], -count)[-count:]]
    return found


@lru_cache(maxsize=4)
def projection(width: int) -> np.ndarray:
    """Onto SKETCH directions, at right angles to each other, that are always the same."""
    directions, _ = np.linalg.qr(np.random.default_rng(0).standard_normal((width, min(width, SKETCH))))
    return directions.astype(np.float32)


class FileStore:
    def __init__(self, path: Path | None, max_entries: int):
        """path: None keeps everything in memory."""
        self.max_entries = max_entries
        self._known: dict[str, IndexedEntry] = {}
        self._by_exact: dict[bytes, str] = {}
        self._by_wording: dict[bytes, tuple[str, ...]] = {}
        self._rows: dict[bytes, Rows] = {}
        self._hits: dict[str, int] = {}
        self._unwritten: list[str] = []  # entries that were hit
        try:
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))  # only its owner reads questions and answers
            self._data = sqlite3.connect(path or ":memory:", check_same_thread=False, isolation_level=None)
            self._data.execute("PRAGMA journal_mode=WAL")
            self._data.execute("PRAGMA synchronous=NORMAL")
            self._drop_old()
            self._data.executescript(f"{TABLES} PRAGMA user_version={VERSION};")
            self._read()
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"--answer-cache-file {path}: cannot be used: {error}; name another file.") from None

    def _drop_old(self) -> None:
        """Answers in tables of another version: they have no wordings, and can be computed again."""
        tables = {name for (name,) in self._data.execute("SELECT name FROM sqlite_master")}
        if "answers" in tables and self._data.execute("PRAGMA user_version").fetchone() != (VERSION,):
            self._data.execute("DROP TABLE answers")
            log.warning("the answer cache's file is of another version: its answers were dropped")

    def _read(self) -> None:
        columns = "id, tenant, exact, context, created, tokens, wording, vector, hits"
        rows = self._data.execute(f"SELECT {columns} FROM answers ORDER BY created")
        for *fields, vector, hits in rows:
            known = IndexedEntry(*fields)
            self._index(known, np.frombuffer(vector, np.float32) if vector else None)
            self._hits[known.id] = hits

    def _index(self, known: IndexedEntry, vector: np.ndarray | None) -> None:
        self._known[known.id] = known
        if known.exact:
            self._by_exact[known.exact] = known.id
        if known.wording:
            others = (one for one in self._by_wording.get(known.wording, ()) if one != known.id)
            self._by_wording[known.wording] = (known.id, *others)[:ALIKE]
        if known.context and vector is not None:
            self._rows.setdefault(known.context, Rows(len(vector))).add(known.id, vector)

    def holds(self, key: bytes) -> bool:
        return key in self._by_exact

    def exact(self, key: bytes) -> bytes | None:
        entry = self._by_exact.get(key)
        return None if entry is None else self.get(entry)

    def alike(self, wording: bytes) -> list[bytes]:
        """The same as of `Store`."""
        found = (self.get(entry) for entry in self._by_wording.get(wording, ()))
        return [one for one in found if one is not None]

    def nearest(self, context: bytes, vector: np.ndarray, count: int) -> list[Near]:
        rows = self._rows.get(context)
        return [] if rows is None or not rows.ids else rows.nearest(vector, count)

    def get(self, entry: str) -> bytes | None:
        found = self._data.execute("SELECT sealed FROM answers WHERE id = ?", (entry,)).fetchone()
        return None if found is None else found[0]

    def put(self, known: IndexedEntry, vector: np.ndarray | None, sealed: bytes) -> None:
        same = self._by_exact.get(known.exact) if known.exact else None
        if same is not None:
            self.forget([same])
        stored = None if vector is None else np.ascontiguousarray(vector, np.float32).tobytes()
        self._data.execute(
            "INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, 0)",
            (known.id, known.tenant, known.exact, known.context, stored, sealed, known.created, known.tokens,
             known.wording),
        )  # fmt: skip
        self._index(known, vector)
        if len(self._known) > self.max_entries:
            self._evict()

    def _evict(self) -> None:
        """Remove the entries that saved least: tokens × hits; among equals the oldest."""

        def value(known: IndexedEntry) -> tuple[int, float]:
            return known.tokens * self._hits.get(known.id, 0), known.created

        worst = sorted(self._known.values(), key=value)[: max(1, int(EVICTED * self.max_entries))]
        self.forget([known.id for known in worst])

    def hit(self, entry: str) -> None:
        if entry in self._known:
            self._hits[entry] = self._hits.get(entry, 0) + 1
            self._unwritten.append(entry)
        if len(self._unwritten) >= UNWRITTEN:
            self._write_hits()

    def _write_hits(self) -> None:
        rows = [(self._hits[entry], entry) for entry in set(self._unwritten) if entry in self._hits]
        self._unwritten.clear()
        with self._data:
            self._data.execute("BEGIN")
            self._data.executemany("UPDATE answers SET hits = ? WHERE id = ?", rows)

    def forget(self, entries: list[str]) -> int:
        gone = 0
        for entry in entries:
            known = self._known.pop(entry, None)
            if known is None:
                continue
            gone += 1
            self._hits.pop(entry, None)
            if self._by_exact.get(known.exact) == entry:
                del self._by_exact[known.exact]
            self._forget_wording(known)
            if known.context in self._rows:
                self._rows[known.context].remove(entry)
                if not self._rows[known.context].ids:
                    del self._rows[known.context]
            self._data.execute("DELETE FROM answers WHERE id = ?", (entry,))
        return gone

    def _forget_wording(self, known: IndexedEntry) -> None:
        left = tuple(one for one in self._by_wording.pop(known.wording, ()) if one != known.id)
        if left:
            self._by_wording[known.wording] = left

    def entries(self, limit: int) -> list[IndexedEntry]:
        return list(self._latest(limit))

    def _latest(self, limit: int) -> Iterator[IndexedEntry]:
        for number, known in enumerate(reversed(self._known.values())):
            if number == limit:
                return
            yield known

    def count(self) -> int:
        return len(self._known)

    def add_evidence(self, value: bytes) -> None:
        number = self._data.execute("INSERT INTO evidence (value) VALUES (?)", (value,)).lastrowid or 0
        if number % 100 == 0:
            self._data.execute("DELETE FROM evidence WHERE number <= ?", (number - MAX_EVIDENCE,))

    def evidence(self, after: str, limit: int) -> list[tuple[str, bytes]]:
        """The same as of `Store`."""
        asked = "SELECT number, value FROM evidence WHERE number > ? ORDER BY number LIMIT ?"
        return [(str(number), value) for number, value in self._data.execute(asked, (int(after or 0), limit))]

    def close(self) -> None:
        self._write_hits()
        self._data.close()
