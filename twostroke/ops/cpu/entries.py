"""Attention over lists of entries on the native library: the addresses of what each row reads."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from twostroke.ops.compressed import EntryKernels, Lists
from twostroke.ops.compressed_interface import CompressedAttention
from twostroke.ops.cpu.arrays import address
from twostroke.ops.cpu.library import EntriesCall

_FORMATS = {"float32": 0, "float16": 1, "bfloat16": 2}  # KVFormat in kernels.h


class NativeCore(EntryKernels):
    def __init__(self, lib: Any, context: int, check: Callable[[int], None]):
        self._lib, self._context, self._check = lib, context, check

    def attend(self, q: np.ndarray, lists: Sequence[Lists], attention: CompressedAttention) -> np.ndarray:
        entries, starts = addresses(lists)
        q, out = np.ascontiguousarray(q), np.empty(q.shape, np.float32)
        sinks = np.ascontiguousarray(attention.sinks, np.float32)
        kind = _FORMATS[lists[0].places.format]
        call = EntriesCall(attention.heads, attention.dim, attention.scale, kind, address(sinks))
        status = self._lib.ts_attend_entries(
            self._context, ctypes.addressof(call), address(entries), address(starts), address(q), len(q), address(out)
        )
        self._check(status)
        return out

    def score(self, q: np.ndarray, weights: np.ndarray, keys: np.ndarray) -> np.ndarray:
        q, weights = np.ascontiguousarray(q), np.ascontiguousarray(weights, np.float32)
        keys, out = np.ascontiguousarray(keys, np.float32), np.empty(len(keys), np.float32)
        status = self._lib.ts_entry_scores(
            self._context, address(q), address(weights), *q.shape, address(keys), len(keys), address(out)
        )
        self._check(status)
        return out


def addresses(lists: Sequence[Lists]) -> tuple[np.ndarray, np.ndarray]:
    """Where each entry that a row reads begins in memory, row after row, in each row kind after kind; and where the
    rows start."""
    starts = np.sum([one.starts for one in lists], axis=0)
    found, before = np.empty(starts[-1], np.int64), np.zeros(len(starts) - 1, np.int64)
    for one in lists:
        block, place, _ = one.places.data.strides
        at = one.places.data.ctypes.data + one.blocks.astype(np.int64) * block + one.offsets * place
        counts = np.diff(one.starts)
        shift = np.repeat(starts[:-1] + before - one.starts[:-1], counts)
        found[np.arange(len(at)) + shift] = at
        before += counts
    return found, starts
