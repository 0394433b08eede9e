"""The part of `LLM` for models that make vectors and scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from twostroke.errors import InputError

if TYPE_CHECKING:
    from twostroke.embed.embedder import Embedder, Ranked


class VectorMethods:
    _closed = False
    _embedder: Embedder | None = None  # of a model that makes vectors

    def embed(self, texts: Sequence[str | Sequence[int]], dimensions: int | None = None) -> np.ndarray:
        """(texts, dimensions) float32: the vectors of texts, or of lists of token ids. For models that make vectors."""
        return self.embedder.embed(texts, dimensions)

    def rank(self, query: str, documents: Sequence[str]) -> list[Ranked]:
        """The documents by their relevance for the query, best first: index and score."""
        return self.embedder.rank(query, documents)

    @property
    def embedder(self) -> Embedder:
        if self._closed:
            raise InputError("this LLM is closed: open another one.")
        if self._embedder is None:
            raise InputError("this model writes text and makes no vectors: open an embedder, such as all-minilm-l6-v2.")
        return self._embedder

    def _embedder_closed(self) -> bool:
        """Gives the embedder back; False where there is none."""
        if self._embedder is None:
            return False
        self._closed, self._embedder = True, None
        return True
