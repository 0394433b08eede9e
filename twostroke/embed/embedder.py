"""`Embedder`: a model that makes vectors of texts, or scores of pairs. Thread-safe; one batch computes at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from twostroke.embed.decoder import DecoderModel
from twostroke.embed.description import describe, encoder_arch
from twostroke.embed.encoder import EncoderModel, unit
from twostroke.embed.texts import TextTokenizer, Tokens
from twostroke.errors import ConfigError, InputError
from twostroke.hardware import usable_cores
from twostroke.weights.checkpoint import Checkpoint, locate, open_checkpoint
from twostroke.weights.describe import load_arch
from twostroke.weights.files import OnProgress

MAX_DECODER_TOKENS = 8192
BATCH_TOKENS = 4096  # of one batch
BATCH_TEXTS = 256
SETTINGS = ("threads", "key_share")  # that an embedder has; the second: of a server


class Model(Protocol):
    @property
    def width(self) -> int: ...

    def run(self, texts: Sequence[Tokens]) -> np.ndarray: ...


@dataclass(frozen=True, slots=True)
class Ranked:
    index: int  # of the document
    score: float  # higher is more relevant


class Embedder:
    def __init__(self, checkpoint: Checkpoint, threads: int = 0, coded: bool = False):
        """threads: 0 for all cores of this process. coded: an encoder's weights and inputs in 8 bits: faster, and its
        cosines are off by about 0.001."""
        self.description = describe(checkpoint)
        self.checkpoint = checkpoint
        threads = threads or usable_cores()
        where = f"{checkpoint.path.name}/config.json"
        self.model: Model
        if self.description.kind == "decoder":
            if coded:
                raise ConfigError("coded: only encoders (the BERT family) have 8-bit products; leave it out.")
            decoder = load_arch(checkpoint)
            longest = min(self.description.max_tokens or MAX_DECODER_TOKENS, MAX_DECODER_TOKENS, decoder.max_positions)
            self.model, vocab = DecoderModel(checkpoint, self.description, threads, longest), decoder.vocab
        else:
            arch = encoder_arch(checkpoint.config, where)
            longest = min(self.description.max_tokens or arch.positions, arch.positions)
            self.model, vocab = EncoderModel(checkpoint, arch, self.description, threads, coded=coded), arch.vocab
        self.max_tokens = longest
        self.tokenizer = TextTokenizer(checkpoint.path, longest, vocab)

    @classmethod
    def open(
        cls, model: str | Path, threads: int = 0, progress: OnProgress | None = None, coded: bool = False
    ) -> Embedder:
        """model: a catalog name, a folder or a hub id."""
        return cls(open_checkpoint(locate(model, progress)), threads, coded)

    @property
    def ranks_only(self) -> bool:
        """A cross-encoder scores pairs; it has no vector of a single text."""
        return self.description.kind == "cross-encoder"

    @property
    def width(self) -> int:
        """Numbers of a vector."""
        return self.model.width

    def check_vectors(self) -> None:
        if self.ranks_only:
            raise InputError("input: this model scores pairs of texts and has no vectors; use rank, or another model.")

    def embed(self, texts: Sequence[str | Sequence[int]], dimensions: int | None = None) -> np.ndarray:
        """(texts, dimensions) float32, each of length 1 where the model says so. Texts, or lists of token ids."""
        if isinstance(texts, str):
            raise InputError("texts: must be a list; put the text into one.")
        self.check_vectors()
        tokens = [self.tokenizer.encode(t) if isinstance(t, str) else self.tokenizer.given(t) for t in texts]
        return shortened(self.run(tokens), dimensions)

    def rank(self, query: str, documents: Sequence[str]) -> list[Ranked]:
        """The documents by their relevance for the query, best first."""
        scores = self.scores([self.pair(query, document) for document in documents])
        return sorted((Ranked(i, score) for i, score in enumerate(scores)), key=lambda one: (-one.score, one.index))

    def pair(self, first: str, second: str) -> tuple[Tokens, ...]:
        """What must be computed to score two texts: the pair itself, or both."""
        if self.ranks_only:
            return (self.tokenizer.encode_pair(first, second),)
        return self.tokenizer.encode(first, cut=True), self.tokenizer.encode(second, cut=True)

    def scores(self, pairs: Sequence[tuple[Tokens, ...]]) -> list[float]:
        return self.scores_of(self.run([tokens for pair in pairs for tokens in pair]))

    def scores_of(self, rows: np.ndarray) -> list[float]:
        """The scores of what `run` gives for pairs: a cross-encoder's score from 0 to 1, or the cosine of both
        vectors."""
        if self.ranks_only:
            return [relevance(row) for row in rows]
        return [float(np.dot(unit(a).astype(np.float64), unit(b))) for a, b in zip(rows[::2], rows[1::2], strict=True)]

    def run(self, texts: Sequence[Tokens]) -> np.ndarray:
        """A row for each text, in batches of bounded size. The rows do not depend on how they are cut."""
        if not texts:
            return np.empty((0, self.width), np.float32)
        return np.concatenate([self.model.run(batch) for batch in batches(texts)])


def open_embedder(path: Path, settings: Mapping[str, Any]) -> Embedder:
    """settings: of an embedder; another one is a ConfigError."""
    unknown = sorted(set(settings) - set(SETTINGS))
    if unknown:
        raise ConfigError(
            f"{unknown[0]}: {path.name} makes vectors and has no such setting; it has {', '.join(SETTINGS)}."
        )
    return Embedder(open_checkpoint(path), settings.get("threads") or 0)


def batches(texts: Sequence[Tokens]) -> list[list[Tokens]]:
    made: list[list[Tokens]] = [[]]
    tokens = 0
    for text in texts:
        if made[-1] and (tokens + len(text.ids) > BATCH_TOKENS or len(made[-1]) == BATCH_TEXTS):
            made.append([])
            tokens = 0
        made[-1].append(text)
        tokens += len(text.ids)
    return made


def relevance(scores: np.ndarray) -> float:
    """One label: its sigmoid. Two: the share of the second."""
    logit = float(scores[0]) if len(scores) == 1 else float(scores[-1]) - float(scores[0])
    return 1 / (1 + math.exp(-min(max(logit, -700.0), 700.0)))


def shortened(vectors: np.ndarray, dimensions: int | None) -> np.ndarray:
    """The first numbers of each vector, of length 1 again: for models that were trained for it."""
    if dimensions is None or dimensions == vectors.shape[1]:
        return vectors
    if not 1 <= dimensions <= vectors.shape[1]:
        raise InputError(f"dimensions: must be from 1 to {vectors.shape[1]}, the width of this model's vectors.")
    return np.stack([unit(row) for row in vectors[:, :dimensions]]) if len(vectors) else vectors[:, :dimensions]
