"""Copies in floats of matrices of few bits, for products of many rows.

Up to some rows a product reads the codes, and gains by their few bytes. With more rows it is bound by arithmetic, and a
copy in floats is faster: made for each product, or once for all where the device has memory to spare.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from twostroke.ops.cuda.kernels.quantized import Narrow, as_float

SOME = 256  # rows up to which the codes are multiplied where a copy would be made for the product
FEW = 64  # and where there is a copy: with more rows a product reads the codes twice


class FloatCopies:
    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype
        self._kept: dict[Narrow, Tensor] = {}

    def rows(self, weight: Narrow) -> int:
        """The most rows that are multiplied by the codes."""
        return FEW if weight in self._kept else SOME

    def of(self, weight: Narrow) -> Tensor:
        kept = self._kept.get(weight)
        return as_float(weight, self.dtype) if kept is None else kept

    def bytes(self, weights: Iterable[Narrow]) -> int:
        return sum(weight.codes.shape[0] * weight.inputs for weight in weights) * self.dtype.itemsize

    def keep(self, weights: Iterable[Narrow]) -> None:
        self._kept |= {weight: as_float(weight, self.dtype) for weight in weights}
