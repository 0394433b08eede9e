"""The BERT family: embeddings, layers in which every token sees its whole text, pooling or a classification head."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from twostroke.embed.description import Description, EncoderArch
from twostroke.embed.texts import Tokens
from twostroke.errors import ModelError
from twostroke.ops.cpu.encode import LANES, EncoderWeights, LayerNorm, NativeEncoder
from twostroke.ops.formats import dequantize
from twostroke.weights.checkpoint import Checkpoint

_PREFIXES = ("", "bert.", "model.")


class EncoderParameters:
    """Tensors of a checkpoint as float32 arrays, checked for their shape."""

    def __init__(self, checkpoint: Checkpoint):
        self.tensors, self.where = checkpoint.tensors, checkpoint.path.name
        names = [prefix for prefix in _PREFIXES if f"{prefix}embeddings.word_embeddings.weight" in self.tensors]
        if not names:
            raise ModelError(f"{self.where}: embeddings.word_embeddings.weight is missing; this is no BERT checkpoint.")
        self.prefix = names[0]

    def get(self, name: str, *shape: int, prefixed: bool = True) -> np.ndarray:
        full = (self.prefix if prefixed else "") + name
        if full not in self.tensors:
            raise ModelError(f"{self.where}: {full} is missing; the checkpoint is incomplete.")
        value = np.ascontiguousarray(dequantize(self.tensors[full]), np.float32)
        if value.shape != shape:
            raise ModelError(f"{self.where}: {full} has shape {value.shape}, expected {shape}.")
        return value

    def linear(self, name: str, outputs: int, inputs: int, prefixed: bool = True) -> tuple[np.ndarray, np.ndarray]:
        return self.get(f"{name}.weight", outputs, inputs, prefixed=prefixed), self.get(
            f"{name}.bias", outputs, prefixed=prefixed
        )

    def norm(self, name: str, width: int) -> LayerNorm:
        return LayerNorm(self.get(f"{name}.weight", width), self.get(f"{name}.bias", width))


def encoder_layer(parameters: EncoderParameters, arch: EncoderArch, index: int) -> EncoderWeights:
    stem, hidden, inner = f"encoder.layer.{index}.", arch.hidden, arch.inner
    parts = [parameters.linear(f"{stem}attention.self.{name}", hidden, hidden) for name in ("query", "key", "value")]
    return EncoderWeights(
        qkv=(np.concatenate([matrix for matrix, _ in parts]), np.concatenate([bias for _, bias in parts])),
        output=parameters.linear(f"{stem}attention.output.dense", hidden, hidden),
        attention_norm=parameters.norm(f"{stem}attention.output.LayerNorm", hidden),
        up=parameters.linear(f"{stem}intermediate.dense", inner, hidden),
        down=parameters.linear(f"{stem}output.dense", hidden, inner),
        feed_norm=parameters.norm(f"{stem}output.LayerNorm", hidden),
    )


class EncoderModel:
    """Gives one row for each text: its vector, or the scores of a cross-encoder's labels."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        arch: EncoderArch,
        description: Description,
        threads: int,
        isa: str = "",
        coded: bool = False,
    ):
        if arch.hidden % LANES or arch.hidden % arch.heads or arch.hidden // arch.heads % LANES:
            raise ModelError(
                f"{checkpoint.path.name}: {arch.heads} heads in {arch.hidden} numbers; multiples of {LANES} are needed."
            )
        parameters = EncoderParameters(checkpoint)
        self.arch, self.description = arch, description
        self.words = parameters.get("embeddings.word_embeddings.weight", arch.vocab, arch.hidden)
        self.places = parameters.get("embeddings.position_embeddings.weight", arch.positions, arch.hidden)
        self.types = parameters.get("embeddings.token_type_embeddings.weight", arch.types, arch.hidden)
        self.norm = parameters.norm("embeddings.LayerNorm", arch.hidden)
        self.head: tuple[tuple[np.ndarray, np.ndarray], ...] = ()
        if description.kind == "cross-encoder":
            pooler = parameters.linear("pooler.dense", arch.hidden, arch.hidden)
            self.head = pooler, parameters.linear("classifier", arch.labels, arch.hidden, prefixed=False)
        layers = [encoder_layer(parameters, arch, index) for index in range(arch.layers)]
        try:
            self.encoder = NativeEncoder(
                layers,
                heads=arch.heads,
                activation=arch.activation,
                eps=arch.eps,
                threads=threads,
                isa=isa,
                coded=coded,
            )
        except ValueError as error:
            raise ModelError(f"{checkpoint.path.name}: {error}. The file is damaged, or not made for this.") from None

    @property
    def width(self) -> int:
        return self.arch.labels if self.head else self.arch.hidden

    def run(self, texts: Sequence[Tokens]) -> np.ndarray:
        """(texts, width) float32."""
        starts = np.zeros(len(texts) + 1, np.int32)
        np.cumsum([len(text.ids) for text in texts], out=starts[1:])
        x = self._embed(texts, starts)
        self.encoder.run(x, starts)
        rows = [x[starts[i] : starts[i + 1]] for i in range(len(texts))]
        return np.stack([self._pool(one) for one in rows])

    def _embed(self, texts: Sequence[Tokens], starts: np.ndarray) -> np.ndarray:
        ids = np.fromiter((token for text in texts for token in text.ids), np.int64, starts[-1])
        types = np.fromiter((t for text in texts for t in text.types or (0,) * len(text.ids)), np.int64, starts[-1])
        places = np.arange(starts[-1]) - np.repeat(starts[:-1], np.diff(starts))
        x: np.ndarray = self.words[ids] + self.types[types]
        x += self.places[places]
        self.encoder.norm(x, self.norm)
        return x

    def _pool(self, rows: np.ndarray) -> np.ndarray:
        if self.head:
            (pooler, shift), (classifier, bias) = self.head
            scores: np.ndarray = classifier @ np.tanh(pooler @ rows[0] + shift) + bias
            return scores
        vector = (
            rows[0].astype(np.float64) if self.description.pooling == "cls" else rows.mean(axis=0, dtype=np.float64)
        )
        return unit(vector) if self.description.normalize else vector.astype(np.float32)


def unit(vector: np.ndarray) -> np.ndarray:
    """The vector with length 1, as float32."""
    length = np.sqrt(np.square(vector.astype(np.float64)).sum())
    return (vector / max(float(length), 1e-12)).astype(np.float32)
