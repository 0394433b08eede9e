"""Encoders (the BERT family) on the native library: all layers of some texts in one call, the lock released.

A text's rows have the same bits whatever other texts are in the call: see native/encode.h.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from twostroke.ops.cpu.arrays import NativeOwner
from twostroke.ops.cpu.library import EncodeLayer, load_library
from twostroke.record import Record

EncodeActivation = Literal["gelu", "gelu_tanh", "relu"]
ACTIVATIONS: dict[str, int] = {"gelu": 1, "gelu_tanh": 2, "relu": 3}
LANES = 16  # the width and a head's width must be multiples of it


class LayerNorm(Record, eq=False):
    weight: np.ndarray
    shift: np.ndarray


class EncoderWeights(Record, eq=False):
    """One layer in float32: matrices (outputs, inputs) with their biases."""

    qkv: tuple[np.ndarray, np.ndarray]  # q, k and v stacked
    output: tuple[np.ndarray, np.ndarray]
    attention_norm: LayerNorm
    up: tuple[np.ndarray, np.ndarray]
    down: tuple[np.ndarray, np.ndarray]
    feed_norm: LayerNorm


class NativeEncoder:
    def __init__(
        self,
        layers: Sequence[EncoderWeights],
        *,
        heads: int,
        activation: EncodeActivation,
        eps: float,
        threads: int,
        isa: str = "",
        coded: bool = False,
    ):
        """isa: one of `instruction_sets()`, the best when empty. coded: 8 bits for weights and inputs, several times as
        fast, cosines off by about 0.001. ValueError: a weight that float16 cannot hold."""
        self._lib = lib = load_library()
        self._context = lib.ts_new(threads, isa.encode())
        if not self._context:
            raise ValueError(f"no kernels for {isa!r} on this machine")
        weakref.finalize(self, lib.ts_free, self._context)
        self.heads, self.activation, self.eps = heads, ACTIVATIONS[activation], eps
        self.coded = coded
        self._kept: list[Any] = []
        self._layers = (EncodeLayer * len(layers))()
        for call, layer in zip(self._layers, layers, strict=True):
            for name in ("qkv", "output", "up", "down"):
                setattr(call, name, self._pack(*getattr(layer, name)))
            call.attention_norm, call.attention_shift = self._norm(layer.attention_norm)
            call.feed_norm, call.feed_shift = self._norm(layer.feed_norm)

    def _pack(self, matrix: np.ndarray, bias: np.ndarray) -> int:
        matrix, bias = (np.ascontiguousarray(part, np.float32) for part in (matrix, bias))
        outputs, inputs = matrix.shape
        handle = self._lib.ts_encode_pack(
            self._context, matrix.ctypes.data, outputs, inputs, bias.ctypes.data, self.coded
        )
        if not handle:
            raise ValueError(f"a matrix of {outputs} x {inputs} has a number or a width that cannot be held")
        owner = NativeOwner()
        weakref.finalize(owner, self._lib.ts_encode_weight_free, handle)
        self._kept.append(owner)
        return int(handle)

    def _norm(self, norm: LayerNorm) -> tuple[int, int]:
        parts = [np.ascontiguousarray(part, np.float32) for part in (norm.weight, norm.shift)]
        self._kept += parts
        return parts[0].ctypes.data, parts[1].ctypes.data

    def norm(self, x: np.ndarray, norm: LayerNorm) -> None:
        """Layer norm of each row of x (float32, contiguous), in place."""
        weight, shift = (np.ascontiguousarray(part, np.float32) for part in (norm.weight, norm.shift))
        rows, cols = x.shape
        self._check(
            self._lib.ts_layer_norm(
                self._context, x.ctypes.data, rows, cols, weight.ctypes.data, shift.ctypes.data, self.eps
            )
        )

    def run(self, x: np.ndarray, starts: np.ndarray) -> None:
        """All layers, in place. x: (rows, hidden) float32; text i has the rows starts[i] to starts[i + 1]."""
        rows, hidden = x.shape
        starts = np.ascontiguousarray(starts, np.int32)
        if x.dtype != np.float32 or not x.flags.c_contiguous or starts[-1] != rows:
            raise ValueError(f"x of shape {x.shape} and {x.dtype} does not fit texts that end at row {starts[-1]}")
        status = self._lib.ts_encode(
            self._context, ctypes.addressof(self._layers), len(self._layers), self.heads, self.activation, self.eps,
            x.ctypes.data, hidden, starts.ctypes.data, len(starts) - 1,
        )  # fmt: skip
        self._check(status)

    def _check(self, status: int) -> None:
        if status == 1:
            raise MemoryError("no memory for these texts")
        if status:
            raise ValueError(f"the native library refused these texts (status {status})")
