"""From NumPy arrays to the arrays of a backend. Torch is imported only for a backend that computes with tensors, as the
import takes longer than the rest of a start."""

from __future__ import annotations

import mmap
from contextlib import suppress
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from twostroke.ops.interface import KV_BITS, Array, Batch, GroupBlocks

if TYPE_CHECKING:
    import torch

# Formats that NumPy does not know are held as their codes.
_CODES = {"uint8": "u1", "float32": "f4", "float16": "f2", "bfloat16": "u2", "int8": "i1", "int4": "u1", "fp8": "u1"}
_TENSORS = {"int4": "uint8", "fp8": "float8_e4m3fn"}  # torch's names where they differ from ours


def placed(values: np.ndarray, device: torch.device | None) -> Array:
    """The values where a backend with this device wants them."""
    if device is None:
        return values
    import torch

    return torch.from_numpy(values).to(device)


def batch_of_tensors(batch: Batch) -> Batch:
    """The same numbers as tensors, in the same memory."""
    from torch import from_numpy

    return Batch(
        tokens=from_numpy(batch.tokens),
        positions=from_numpy(batch.positions),
        starts=from_numpy(batch.starts),
        contexts=from_numpy(batch.contexts),
        groups=tuple(GroupBlocks(from_numpy(group.slots), from_numpy(group.tables)) for group in batch.groups),
        logit_rows=from_numpy(batch.logit_rows),
    )


def reserve(shape: tuple[int, ...], kv_format: str, device: torch.device | None) -> Array:
    """An uninitialized array of elements in this format."""
    if device is None:
        return reserve_pages(shape, np.dtype(_CODES[kv_format]))
    import torch

    dtype = getattr(torch, _TENSORS.get(kv_format, kv_format))
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.from_numpy(reserve_pages((prod(shape) * dtype.itemsize,), np.dtype("u1"))).view(dtype).view(shape)


def strided_part(data: Array, offset: int, shape: tuple[int, ...], kv_format: str) -> Array:
    """A view of what lies `offset` bytes into each row of data (rows, bytes): (rows, *shape) in this format, the last
    dimension counted in elements of the format."""
    if KV_BITS[kv_format] < 8:
        shape = (*shape[:-1], shape[-1] * KV_BITS[kv_format] // 8)
    if isinstance(data, np.ndarray):
        dtype = np.dtype(_CODES[kv_format])
        inner = np.empty(shape, dtype).strides
        return np.ndarray((len(data), *shape), dtype, data, offset, (data.strides[0], *inner))
    import torch

    typed = data.view(-1).view(getattr(torch, _TENSORS.get(kv_format, kv_format)))
    size = typed.element_size()
    inner = torch.empty(shape, device="meta").stride()
    return typed.as_strided((len(data), *shape), (data.shape[1] // size, *inner), offset // size)


def reserve_pages(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Memory that is touched only as it is written, in large pages: a step over a long context reads a few KiB of every
    block it holds, and with small pages would spend more time finding them than reading them."""
    count = prod(shape)
    if not hasattr(mmap, "MADV_HUGEPAGE") or count == 0:
        return np.empty(shape, dtype)
    memory = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without large pages: the memory is as good as any
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype, count).reshape(shape)
