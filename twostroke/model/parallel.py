"""A rank's part of a model (tensor parallelism): the same layers with fewer heads, and a sum over ranks at each
residual add. Every rank has the whole residual stream, and the same bits of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from twostroke.errors import RankLostError
from twostroke.kv.storage import KVStorage
from twostroke.model.layers import Branch
from twostroke.model.transformer import LayerRun, Transformer
from twostroke.ops.interface import Array, Batch

Sum = Callable[[Array], Array]  # of what all ranks give, added in the order of the ranks; it may use the memory of it


def not_yet(value: Array) -> Array:
    """The sum of a rank that has not found the others yet."""
    raise RuntimeError("a step before the ranks have found each other")


@contextmanager
def whole_step() -> Iterator[None]:
    """A context for what follows once the other ranks know of a step. They wait for all that this rank gives, so an
    error inside is the end of the engine: RankLostError."""
    try:
        yield
    except Exception as error:
        raise RankLostError(f"a step failed on one rank: {type(error).__name__}: {error}") from error


class ParallelTransformer(Transformer):
    def __init__(self, *parts: Any, sum_ranks: Sum, announce: Callable[[Batch], None] | None = None, **more: Any):
        """announce: of the rank that leads, tells the others of a step."""
        super().__init__(*parts, **more)
        self.sum_ranks = sum_ranks
        self.announce = announce

    def forward(self, batch: Batch, kv: KVStorage) -> Array:
        if self.announce is not None:
            self.announce(batch)
        with whole_step():
            return super().forward(batch, kv)

    def decoder(self, kv: KVStorage, tables: np.ndarray) -> None:
        """Ranks meet at each residual add."""

    def _make_runs(self, kv: KVStorage) -> list[LayerRun]:
        return [self._layer_run(index, kv) for index in range(len(self.layers))]

    def _add(self, x: Array, branch: Branch) -> Array:
        part = self.ops.linear(branch.inner, branch.weight, before=branch.before)
        value = self.sum_ranks(part)
        return x + (value if branch.norm is None else self.ops.norm(value, branch.norm))
