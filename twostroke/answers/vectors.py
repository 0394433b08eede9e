"""Vectors of questions. Those of the latest questions are kept, because questions come again."""

from __future__ import annotations

import time

import numpy as np

from twostroke.answers.lookup import Texts

KEPT = 4096
PACE = 0.1  # weight of the last vector in the mean of their times


class Vectors:
    """`make` is called on one thread, `get` on any."""

    def __init__(self, texts: Texts):
        self.texts = texts
        self.pace = 0.0  # seconds that a vector takes
        self._kept: dict[str, np.ndarray] = {}

    def get(self, text: str) -> np.ndarray | None:
        return self._kept.get(text)

    def make(self, text: str) -> np.ndarray:
        began = time.perf_counter()
        vector: np.ndarray = self.texts.embed([text])[0]
        self.pace += PACE * (time.perf_counter() - began - self.pace)
        kept = self._kept
        if len(kept) >= KEPT:
            del kept[next(iter(kept))]
        kept[text] = vector
        return vector

    def forget(self) -> None:
        """From any thread: no question's text stays here."""
        self._kept = {}


def cosine(vector: np.ndarray, stored: bytes) -> float:
    if len(stored) != 4 * len(vector):
        return -1.0
    return float(vector @ np.frombuffer(stored, np.float32))
