"""Which recorded questions ask the same, so that `diagnose` can say what a semantic cache would save. Off by default.

Of a question its text and vector are kept in memory, for the latest KEPT questions. A recording shows a number only:
equal numbers for questions that the guard and a high similarity hold to be the same.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Protocol

import numpy as np

from twostroke.answers import guard
from twostroke.answers.store import Rows

log = logging.getLogger(__name__)
KEPT = 4096
ALIKE = 0.9  # similarity from which questions that pass the guard have one topic
NEIGHBOURS = 8
MAX_WAITING = 64  # questions that wait for their vector: more are not recorded


class Embeds(Protocol):
    """Makes vectors of length 1."""

    def embed(self, texts: list[str]) -> np.ndarray: ...


class Asked(NamedTuple):
    context: bytes
    question: str
    topic: int


class Topics:
    def __init__(self, texts: Embeds):
        self._texts = texts
        self._rows: dict[bytes, Rows] = {}
        self._asked: OrderedDict[int, Asked] = OrderedDict()  # by request
        self._next = itertools.count()
        self._waiting = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="topics")

    def add_later(self, request: int, context: bytes, question: str) -> None:
        """context: the key of everything but the question."""
        if self._waiting < MAX_WAITING and guard.fit_for_sharing(question) is None:
            self._waiting += 1
            with contextlib.suppress(RuntimeError):  # it was closed
                self._thread.submit(self._add, request, context, question)

    def _add(self, request: int, context: bytes, question: str) -> None:
        try:
            vector = self._texts.embed([question])[0]
            rows = self._rows.setdefault(context, Rows(len(vector)))
            topic = self._topic(rows, vector, question)
            self._asked[request] = Asked(context, question, next(self._next) if topic is None else topic)
            rows.add(str(request), vector)
            if len(self._asked) > KEPT:
                self._drop(*self._asked.popitem(last=False))
        except Exception:
            log.exception("a question was not recorded")
        finally:
            self._waiting -= 1

    def _topic(self, rows: Rows, vector: np.ndarray, question: str) -> int | None:
        for near in rows.nearest(vector, NEIGHBOURS) if rows.ids else ():
            known = self._asked[int(near.id)]
            if near.similarity >= ALIKE and guard.compare(question, known.question).refusal is None:
                return known.topic
        return None

    def _drop(self, request: int, asked: Asked) -> None:
        self._rows[asked.context].remove(str(request))
        if not self._rows[asked.context].ids:
            del self._rows[asked.context]

    def of(self, request: int) -> int | None:
        found = self._asked.get(request)
        return None if found is None else found.topic

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
