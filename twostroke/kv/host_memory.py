"""Bytes of evicted KV blocks in the host's memory: one slot for each block, many slots in one allocation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from twostroke.errors import ConfigError
from twostroke.ops.interface import Array
from twostroke.types import Move

ALLOCATION = 1 << 30  # bytes: the allocator of pinned memory rounds up to a power of two


class HostMemory:
    """Memory of the host for blocks. On a GPU it is pinned, and copies are queued in the stream of the steps: after all
    earlier steps, before the kernels of the step that needs them."""

    def __init__(self, slots: int, data: Array):
        """data: the pool, (blocks, bytes). A slot holds the bytes of one block."""
        self.data = data
        in_numpy = isinstance(data, np.ndarray)
        self.copy: Callable[[Array, Array], object] = np.copyto if in_numpy else copy_tensor
        size = data.shape[1]
        self.each = max(1, ALLOCATION // size)  # slots in one allocation
        try:
            self.allocations = [
                self._allocate(min(self.each, slots - first), size, in_numpy) for first in range(0, slots, self.each)
            ]
        except (RuntimeError, MemoryError) as error:
            raise ConfigError(f"kv_offload: the system gave no {slots * size:,} bytes ({error}): lower it.") from None

    def _allocate(self, slots: int, size: int, in_numpy: bool) -> Array:
        if in_numpy:
            return np.empty((slots, size), np.uint8)
        import torch

        return torch.empty(slots, size, dtype=torch.uint8, pin_memory=self.data.is_cuda)

    def move(self, moves: Sequence[Move]) -> None:
        for block, (slot, peer), away in moves:
            assert not peer, "a peer's blocks come through its connection, not in a step"
            here = self.allocations[slot // self.each][slot % self.each]
            if away:
                self.copy(here, self.data[block])
            else:
                self.copy(self.data[block], here)


def copy_tensor(to: Array, values: Array) -> None:
    to.copy_(values, non_blocking=True)
