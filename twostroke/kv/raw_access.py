"""The memory of a pool as other processes read it: where it lies, and checksums of its blocks."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

from twostroke.kv.storage import KVStorage


def memory_of(storage: KVStorage) -> tuple[int, int, str, int]:
    """Address, bytes, "DRAM" or "VRAM", and the number of the GPU."""
    data = storage.data
    if isinstance(data, np.ndarray):
        return data.ctypes.data, data.nbytes, "DRAM", 0
    kind, device = ("VRAM", data.get_device()) if data.is_cuda else ("DRAM", 0)
    return data.data_ptr(), data.nbytes, kind, device


def sums_of(storage: KVStorage, blocks: Sequence[int]) -> tuple[int, ...]:
    """A checksum of each block's bytes, the same in other processes with such a pool. Waits for the device."""
    if isinstance(storage.data, np.ndarray):
        return tuple(zlib.crc32(storage.data[block]) for block in blocks)
    storage.settle()
    return storage.staging.sums(blocks)


def use_device(storage: KVStorage) -> None:
    """Use the pool's device on this thread: the first allocation makes the device's context current."""
    if not isinstance(storage.data, np.ndarray) and storage.data.is_cuda:
        import torch

        torch.cuda.set_device(storage.data.device)
        torch.cuda.current_stream().synchronize()
        torch.empty(1, device=storage.data.device)
