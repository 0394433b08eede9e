"""Blocks of a pool of tensors to the host's memory and back, through pinned memory on a GPU.

The pinned memory has two halves: while the device fills or empties one, this process copies the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch

HALF = 64 << 20  # bytes


class BlockStaging:
    def __init__(self, data: torch.Tensor):
        """data: the pool, (blocks, bytes)."""
        self.data = data
        self.each = max(1, HALF // data.shape[1])  # blocks in a half
        self.events = [torch.cuda.Event() for _ in range(2)] if data.is_cuda else []

    @cached_property
    def halves(self) -> list[torch.Tensor]:
        size, pinned = (self.each, self.data.shape[1]), self.data.is_cuda
        return [torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]

    def copy_out(self, blocks: Sequence[int], to: np.ndarray) -> None:
        """to: (blocks, bytes)."""
        before: tuple[int, int, int] | None = None
        for number, first in enumerate(range(0, len(blocks), self.each)):
            some, half = blocks[first : first + self.each], number % 2
            self.halves[half][: len(some)].copy_(self.data[list(some)], non_blocking=True)
            self._mark(half)
            self._land(before, to)
            before = half, first, len(some)
        self._land(before, to)

    def _land(self, arrived: tuple[int, int, int] | None, to: np.ndarray) -> None:
        if arrived is not None:
            half, first, count = arrived
            self._wait(half)
            to[first : first + count] = self.halves[half][:count].numpy()

    def take_in(self, parts: Sequence[tuple[int, bytes | memoryview]]) -> None:
        """Copy these bytes to their blocks. Afterwards all of them are on the device."""
        for number, first in enumerate(range(0, len(parts), self.each)):
            some, half = parts[first : first + self.each], number % 2
            if number > 1:
                self._wait(half)
            rows = self.halves[half].numpy()
            for place, (_, content) in enumerate(some):
                rows[place] = np.frombuffer(content, np.uint8)
            there = self.halves[half][: len(some)].to(self.data.device, non_blocking=True)
            self.data[[block for block, _ in some]] = there
            self._mark(half)
        for half in range(min(2, -(-len(parts) // self.each))):
            self._wait(half)

    def sums(self, blocks: Sequence[int]) -> tuple[int, ...]:
        """A checksum of each block: its words, each times another odd number, added without regard to overflow."""
        words = self.data.view(torch.int32 if self.data.shape[1] % 4 == 0 else torch.uint8)
        factors = torch.arange(words.shape[1], device=words.device) * 2 + 1
        found: list[int] = []
        each = max(1, self.each // 8)
        for first in range(0, len(blocks), each):
            some = words[list(blocks[first : first + each])]
            found += (some * factors).sum(1).tolist()
        return tuple(found)

    def _mark(self, half: int) -> None:
        if self.events:
            self.events[half].record()

    def _wait(self, half: int) -> None:
        """Wait until the device has finished its copies from or to this half."""
        if self.events:
            self.events[half].synchronize()
