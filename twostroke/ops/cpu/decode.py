"""A step of newest tokens as one native call: from token ids to logits, and to the best tokens."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np

from twostroke.ops.cpu.arrays import address, norm_reference
from twostroke.ops.cpu.library import DecodeCall, DecodeGroup
from twostroke.ops.interface import DecodeRow, Norm

_FLOAT32 = np.dtype(np.float32)


class NativeDecode:
    """Made once for a model, its cache and its block tables."""

    def __init__(
        self,
        function: Callable[..., int],
        context: int,
        check: Callable[[int], None],
        layers: Any,
        table: Any,
        scale: float,
        norm: Norm,
        head: Any,
        tables: np.ndarray,
        spans: Sequence[int],
    ):
        """layers: the fused ones. table and head: packed weights. tables: (groups, requests, columns) int32; spans:
        the tokens of a block, for each group."""
        if tables.dtype != np.int32 or tables.strides[2] != 4:
            raise ValueError(f"block tables of {tables.dtype} with strides {tables.strides} are not supported")
        groups = (DecodeGroup * len(spans))()
        for group, every, span in zip(groups, tables, spans, strict=True):
            group.tables, group.stride, group.span = every.ctypes.data, every.strides[0] // 4, span
            group.requests, group.columns = every.shape
        self._call = DecodeCall(
            layers=ctypes.addressof(layers.calls), table=table.handle, head=head.handle,
            groups=ctypes.addressof(groups), norm=norm_reference(norm), layer_count=len(layers.calls),
            group_count=len(spans), hidden=table.inputs, scale=scale,
        )  # fmt: skip
        self._kept = (layers, table, norm, head, tables, groups)  # what the description points into
        self._function, self._check, self._vocab = function, check, head.outputs
        self._given = (context, ctypes.addressof(self._call))

    def __call__(self, rows: Sequence[DecodeRow], best: bool) -> tuple[np.ndarray, list[int] | None]:
        given, count = array("q", chain.from_iterable(rows)), len(rows)
        logits = np.empty((count, self._vocab), _FLOAT32)
        chosen = array("q", bytes(8 * count)) if best else None
        place = chosen.buffer_info()[0] if chosen is not None else None
        status = self._function(*self._given, given.buffer_info()[0], count, address(logits), place)
        if status:
            self._check(status)
        return logits, chosen.tolist() if chosen is not None else None
