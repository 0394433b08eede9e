"""Bytes of evicted KV blocks in the host's memory, one slot for each block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import numpy as np

from twostroke.errors import ConfigError
from twostroke.ops.interface import Array
from twostroke.types import Move

PIECE = 1 << 30  # bytes: whoever pins memory for torch gives a power of two at a time


class HostMemory:
    """On a GPU the memory is pinned, and copies take their place in the stream of the step that they are made for:
    after all steps before it, and before its own kernels. Nobody waits for them."""

    def __init__(self, slots: int, parts: Sequence[Array]):
        """parts: arrays of the backend, (blocks, ...) each. What a slot holds is their bytes one after the other."""
        in_numpy = isinstance(parts[0], np.ndarray)
        self.parts = [(bytes_of_array if in_numpy else bytes_of_tensor)(part) for part in parts]  # (blocks, bytes)
        self.copy: Callable[[Array, Array], object] = np.copyto if in_numpy else copy_tensor
        self.spans = [slice(*ends) for ends in pairwise(accumulate([part.shape[1] for part in self.parts], initial=0))]
        size = self.spans[-1].stop
        self.each = max(1, PIECE // size)  # slots in a piece
        try:
            self.pieces = [
                self._piece(min(self.each, slots - first), size, in_numpy) for first in range(0, slots, self.each)
            ]
        except (RuntimeError, MemoryError) as error:
            raise ConfigError(f"kv_offload: the system gave no {slots * size:,} bytes ({error}): lower it.") from None

    def _piece(self, slots: int, size: int, in_numpy: bool) -> Array:
        if in_numpy:
            return np.empty((slots, size), np.uint8)
        import torch

        return torch.empty(slots, size, dtype=torch.uint8, pin_memory=self.parts[0].is_cuda)

    def move(self, moves: Sequence[Move]) -> None:
        for block, slot, to_host in moves:
            here = self.pieces[slot // self.each][slot % self.each]
            for part, span in zip(self.parts, self.spans, strict=True):
                if to_host:
                    self.copy(here[span], part[block])
                else:
                    self.copy(part[block], here[span])


def bytes_of_array(part: Array) -> Array:
    return part.reshape(part.shape[0], -1).view(np.uint8)


def bytes_of_tensor(part: Array) -> Array:
    import torch

    return part.view(part.shape[0], -1).view(torch.uint8)


def copy_tensor(to: Array, values: Array) -> None:
    to.copy_(values, non_blocking=True)
