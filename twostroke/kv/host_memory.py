"""Bytes of evicted KV blocks in the host's memory, one slot for each block."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from twostroke.errors import ConfigError
from twostroke.types import Move

PIECE = 1 << 30  # bytes: whoever pins memory for torch gives a power of two at a time


class HostMemory:
    """On a GPU the memory is pinned, and copies take their place in the stream of the step that they are made for:
    after all steps before it, and before its own kernels. Nobody waits for them."""

    def __init__(self, slots: int, parts: Sequence[Tensor]):
        """parts: tensors of the device, (blocks, ...) each. What a slot holds is their bytes one after the other."""
        self.parts = [part.view(part.shape[0], -1).view(torch.uint8) for part in parts]  # (blocks, bytes)
        self.widths = [part.shape[1] for part in self.parts]
        size, pinned = sum(self.widths), self.parts[0].is_cuda
        self.each = max(1, PIECE // size)  # slots in a piece
        try:
            self.pieces = [
                torch.empty(min(self.each, slots - first), size, dtype=torch.uint8, pin_memory=pinned)
                for first in range(0, slots, self.each)
            ]
        except RuntimeError as error:
            raise ConfigError(f"kv_offload: the system gave no {slots * size:,} bytes ({error}): lower it.") from None

    def move(self, moves: Sequence[Move]) -> None:
        for block, slot, to_host in moves:
            here = self.pieces[slot // self.each][slot % self.each].split(self.widths)
            for part, kept in zip(self.parts, here, strict=True):
                if to_host:
                    kept.copy_(part[block], non_blocking=True)
                else:
                    part[block].copy_(kept, non_blocking=True)
