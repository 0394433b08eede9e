"""Several residual streams (mHC): what a part of a layer reads of them, and how its result is added.

    streams ─┬─ norm, product ──▶ read (n) │ add (n) │ mix (n × n), for each row anew
             ├─ Σ read · stream ──▶ the part of the layer ──▶ result
             └─ mixᵀ · streams + add · result ──▶ streams

`mix` is made doubly stochastic by dividing columns and rows by their sums in turn, in float32. Every sum has a few
terms and is written out, so a row's bits depend on that row alone. Streams are float32 on every device. Arrays of NumPy
and of torch; a backend may have kernels of its own (`Ops.streams`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from twostroke.ops.interface import Array, Norm, Ops, Weight
from twostroke.ops.joined import side_by_side
from twostroke.record import Record

if TYPE_CHECKING:
    from twostroke.ops.formats import Stored


class StreamMix(Record, eq=False):
    """How a part of a layer reads several residual streams and adds to them."""

    streams: int
    norm: Norm  # of all streams of a row together
    weight: Weight  # float32, (streams · (2 + streams), streams · hidden); of the head (streams, streams · hidden)
    base: Array  # float32, one for each output of `weight`
    scale: Array  # float32: of reading, adding and mixing; of the head one
    eps: float
    rounds: int  # of making the mixing matrix doubly stochastic


class StreamKernels(Protocol):
    """A backend's own form of the functions below."""

    def pack(self, parts: Sequence[Stored]) -> Weight: ...

    def collapse(self, x: Array, mix: StreamMix) -> tuple[Array, Array]:
        """The second array is not used when x goes to the head."""
        ...

    def expand(self, x: Array, result: Array, weights: Array, streams: int) -> Array: ...


def pack(ops: Ops, parts: Sequence[Stored]) -> Weight:
    """`StreamMix.weight`, which is multiplied in float32 even where activations are narrower."""
    return ops.pack_precisely(parts) if ops.streams is None else ops.streams.pack(parts)


def spread(x: Array, streams: int) -> Array:
    """(T, hidden) -> (T, streams · hidden): every stream begins as the embedding."""
    return np.tile(x, (1, streams)) if isinstance(x, np.ndarray) else x.float().repeat(1, streams)


def collapse(ops: Ops, x: Array, mix: StreamMix) -> tuple[Array, Array]:
    """What a part of a layer reads, (T, hidden), and its weights for `expand`."""
    if ops.streams is not None:
        return ops.streams.collapse(x, mix)
    n = mix.streams
    weights = ops.linear(x, mix.weight, before=mix.norm)  # (T, n · (2 + n))
    base, scale = mix.base, mix.scale
    read = _sigmoid(weights[:, :n] * scale[0] + base[:n]) + mix.eps
    adds = 2 * _sigmoid(weights[:, n : 2 * n] * scale[1] + base[n : 2 * n])
    mixing = (weights[:, 2 * n :] * scale[2] + base[2 * n :]).reshape(-1, n, n)
    flat = _stochastic(mixing, mix).reshape(len(x), n * n)
    return _weighted(x, read, n), side_by_side((adds, flat))


def expand(ops: Ops, x: Array, result: Array, weights: Array, streams: int) -> Array:
    """The streams after a part of a layer: (T, streams · hidden)."""
    if ops.streams is not None:
        return ops.streams.expand(x, result, weights, streams)
    n = streams
    rows = x.reshape(len(x), n, x.shape[1] // n)
    adds, mixing = weights[:, :n], weights[:, n:].reshape(-1, n, n)
    out = rows * 0
    for k in range(n):
        total = mixing[:, 0, k, None] * rows[:, 0]
        for j in range(1, n):
            total = total + mixing[:, j, k, None] * rows[:, j]
        out[:, k] = adds[:, k, None] * result + total
    return out.reshape(x.shape)


def collapse_last(ops: Ops, x: Array, mix: StreamMix) -> Array:
    """What the head reads: (T, hidden)."""
    if ops.streams is not None:
        return ops.streams.collapse(x, mix)[0]
    weights = ops.linear(x, mix.weight, before=mix.norm)  # (T, n)
    return _weighted(x, _sigmoid(weights * mix.scale[0] + mix.base) + mix.eps, mix.streams)


def _stochastic(mixing: Array, mix: StreamMix) -> Array:
    """(T, n, n) logits: softmax of each row, then rounds of dividing by the sums of columns and of rows."""
    n = mix.streams
    top = mixing[:, :, 0]
    for k in range(1, n):
        top = _maximum(top, mixing[:, :, k])
    found = _exp(mixing - top[:, :, None])
    found = found / _sum(found, n, 2)[:, :, None] + mix.eps
    found = found / (_sum(found, n, 1)[:, None, :] + mix.eps)
    for _ in range(mix.rounds - 1):
        found = found / (_sum(found, n, 2)[:, :, None] + mix.eps)
        found = found / (_sum(found, n, 1)[:, None, :] + mix.eps)
    return found


def _sum(x: Array, n: int, axis: int) -> Array:
    """Over an axis of n, one after the other."""
    total = x[:, 0] if axis == 1 else x[:, :, 0]
    for k in range(1, n):
        total = total + (x[:, k] if axis == 1 else x[:, :, k])
    return total


def _weighted(x: Array, weights: Array, n: int) -> Array:
    rows = x.reshape(len(x), n, x.shape[1] // n)
    total = weights[:, 0, None] * rows[:, 0]
    for k in range(1, n):
        total = total + weights[:, k, None] * rows[:, k]
    return total


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + _exp(-x))


def _exp(x: Array) -> Array:
    """e^x in float64, rounded to float32. A value does not depend on its neighbours."""
    if isinstance(x, np.ndarray):
        return np.exp(x.astype(np.float64)).astype(np.float32)
    return x.double().exp().float()


def _maximum(x: Any, y: Any) -> Any:
    return np.maximum(x, y) if isinstance(x, np.ndarray) else x.maximum(y)
