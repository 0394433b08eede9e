"""The specification of compressed attention's products: one row at a time, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from twostroke.ops.compressed import EntryKernels, Lists, attend_compressed
from twostroke.ops.compressed_interface import CompressedAttention, CompressedRows
from twostroke.ops.interface import Batch, KVLayer, Norm, Ops
from twostroke.record import Record, values


class ReferenceCore(EntryKernels):
    def attend(self, q: np.ndarray, lists: Sequence[Lists], attention: CompressedAttention) -> np.ndarray:
        rows = [self._row(one, [part.read(row) for part in lists], attention) for row, one in enumerate(q)]
        return np.stack(rows) if rows else np.empty_like(q)

    def _row(self, q: np.ndarray, entries: list[np.ndarray], attention: CompressedAttention) -> np.ndarray:
        """One query (heads, dim): the softmax over its entries and the sink, which has no value."""
        keys = np.concatenate(entries).astype(np.float64)  # (n, dim)
        scores = np.concatenate((q.astype(np.float64) @ keys.T * attention.scale, attention.sinks[:, None]), axis=1)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        return (weights[:, :-1] @ keys).astype(np.float32)

    def score(self, q: np.ndarray, weights: np.ndarray, keys: np.ndarray) -> np.ndarray:
        products = np.maximum(q.astype(np.float64) @ keys.T.astype(np.float64), 0)
        return (weights.astype(np.float64) @ products).astype(np.float32)


def attend_lists(
    ops: Ops,
    parts: CompressedRows,
    attention: CompressedAttention,
    caches: tuple[tuple[KVLayer, int], ...],
    batch: Batch,
) -> Tensor:
    def norm(x: np.ndarray, one: Norm) -> np.ndarray:
        rows, weight = torch.from_numpy(np.ascontiguousarray(x)), torch.from_numpy(one.weight)
        made: np.ndarray = ops.norm(rows, Norm(weight, one.eps)).numpy()
        return made

    given = [in_numpy(one) for one in (parts, attention, caches, batch)]
    return torch.from_numpy(attend_compressed(ReferenceCore(), norm, *given))


def in_numpy(value: Any) -> Any:
    """The same data as NumPy arrays in the same memory; bfloat16 as its bits."""
    if isinstance(value, Tensor):
        return value.view(torch.int16).numpy().view(np.uint16) if value.dtype == torch.bfloat16 else value.numpy()
    if isinstance(value, tuple):
        return tuple(in_numpy(one) for one in value)
    if isinstance(value, Record):
        return type(value)(**{name: in_numpy(one) for name, one in values(value).items()})
    return value
