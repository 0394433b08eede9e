"""Attention over lists of entries on the native library: the addresses of what each row reads."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

from twostroke.ops.compressed import Core, Reads
from twostroke.ops.compressed_interface import CompressedAttention
from twostroke.ops.cpu.arrays import address
from twostroke.ops.cpu.library import EntriesCall

_FORMATS = {"float32": 0, "float16": 1, "bfloat16": 2}  # KVFormat in kernels.h


class NativeCore(Core):
    def __init__(self, lib: Any, context: int, check: Callable[[int], None]):
        self._lib, self._context, self._check = lib, context, check

    def attend(self, q: np.ndarray, reads: list[Reads], attention: CompressedAttention) -> np.ndarray:
        lists = [addresses(row) for row in reads]
        entries = np.concatenate(lists)
        starts = np.zeros(len(lists) + 1, np.int64)
        np.cumsum([len(one) for one in lists], out=starts[1:])
        q, out = np.ascontiguousarray(q), np.empty(q.shape, np.float32)
        sinks = np.ascontiguousarray(attention.sinks, np.float32)
        kind = _FORMATS[reads[0].parts[0][0].format]
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


def addresses(row: Reads) -> np.ndarray:
    """Where each entry that a row reads begins in memory."""
    found = []
    for places, blocks, offsets in row.parts:
        block, place, _ = places.data.strides
        found.append(places.data.ctypes.data + blocks.astype(np.int64) * block + offsets * place)
    return np.concatenate(found)
