"""The constants and the input of `Ops.attend_compressed`; what they mean is in compressed.py."""

from __future__ import annotations

from twostroke.ops.interface import Array, Norm, RopeTable
from twostroke.record import Record


class Compressor(Record, eq=False):
    """One entry for `ratio` tokens: a weighted mean of what the tokens left, for each dimension by itself, normed and
    rotated. overlap: a token leaves two vectors, the first for the entry after its own, the second for its own."""

    ratio: int
    dim: int  # of an entry
    overlap: bool
    bias: Array  # (ratio, dim, twice that with overlap) float32: added to the weights' logits
    norm: Norm

    @property
    def width(self) -> int:
        """Numbers that a token leaves, and of its weights' logits."""
        return 2 * self.dim if self.overlap else self.dim


class Indexer(Record, eq=False):
    """Chooses the entries that a query reads: its `chosen` best scores, the lowest index first among equals."""

    heads: int
    dim: int
    chosen: int
    compressor: Compressor  # of its own keys


class CompressedAttention(Record, eq=False):
    """The constants of `attend_compressed`. Rotations turn neighbouring dimensions at the end of a head."""

    heads: int
    dim: int  # of a head, and of the one key that all heads share and that is the value too
    window: int
    scale: float
    rope: RopeTable
    query_norm: Norm  # of each head
    key_norm: Norm
    sinks: Array  # (heads,) float32
    compressor: Compressor | None = None
    indexer: Indexer | None = None


class CompressedRows(Record, eq=False):
    """The products of a step's rows that `attend_compressed` starts from; those it has no use for are None."""

    q: Array  # (T, heads · dim)
    key: Array  # (T, dim)
    state: Array | None  # (T, …): for each compressor what a token leaves and its weights' logits
    index_q: Array | None = None  # (T, heads of the indexer · its dim)
    index_weights: Array | None = None  # (T, heads of the indexer)
