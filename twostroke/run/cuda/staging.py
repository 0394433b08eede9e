"""A step's numbers on their way to the device: one pinned buffer, one copy, views into both ends.

Several host buffers take turns, because a copy may still be under way when the next step is prepared. One device buffer
is enough: copies and kernels of one stream keep their order. Captured steps read buffers of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor

BUFFERS = 3  # on the host, used in turn
ALIGN = 16  # elements: keeps every array on a 64-byte border


@dataclass(frozen=True, slots=True)
class StagedArrays:
    """Arrays of int32 laid one after the other."""

    places: dict[str, tuple[slice, tuple[int, ...]]]
    size: int

    @classmethod
    def lay(cls, shapes: dict[str, tuple[int, ...]]) -> StagedArrays:
        places, offset = {}, 0
        for name, shape in shapes.items():
            size = prod(shape)
            places[name] = (slice(offset, offset + size), shape)
            offset += -(-size // ALIGN) * ALIGN
        return cls(places, offset)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        return {name: flat[place].view(shape) for name, (place, shape) in self.places.items()}


class Staging:
    def __init__(self, device: torch.device, until: Callable[[torch.cuda.Event], None] = torch.cuda.Event.synchronize):
        """until: waits for an event, where that may not be waited for simply."""
        self.device, self.until, self.turn = device, until, 0
        self.events: list[torch.cuda.Event | None] = [None] * BUFFERS
        self.host: list[Tensor] = []
        self.there = torch.empty(0, dtype=torch.int32, device=device)

    def begin(self, arrays: StagedArrays) -> dict[str, np.ndarray]:
        """Host arrays to fill in, zeroed."""
        if not self.host or self.host[0].numel() < arrays.size:
            self._grow(arrays.size)
        self.turn = (self.turn + 1) % BUFFERS
        event = self.events[self.turn]
        if event is not None:
            self.until(event)
        flat = self.host[self.turn].numpy()
        flat[: arrays.size] = 0
        return {name: flat[place].reshape(shape) for name, (place, shape) in arrays.places.items()}

    def filled(self, arrays: StagedArrays) -> np.ndarray:
        """What was filled in, as one array of the host."""
        return self.host[self.turn].numpy()[: arrays.size]

    def send(self, arrays: StagedArrays, into: Tensor | None = None) -> Tensor:
        """What was filled in, on the device; `into` is the buffer to use there."""
        if into is None:
            if self.there.numel() < arrays.size:
                self.there = torch.empty(self.host[0].numel(), dtype=torch.int32, device=self.device)
            into = self.there
        into[: arrays.size].copy_(self.host[self.turn][: arrays.size], non_blocking=True)
        if self.device.type == "cuda":
            event = self.events[self.turn] = self.events[self.turn] or torch.cuda.Event()
            event.record()
        return into

    def _grow(self, size: int) -> None:
        size = max(1 << 16, 2 * size)
        for event in self.events:
            if event is not None:
                self.until(event)
        self.host = [torch.empty(size, dtype=torch.int32, pin_memory=self.device.type == "cuda") for _ in self.events]
