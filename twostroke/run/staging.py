"""A step's numbers on their way to the device: one pinned buffer, one copy, views into both ends.

Several host buffers take turns, because a copy may still be under way when the next step is prepared. There is one
device buffer: copies and kernels of one stream keep their order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

ALIGN = 16  # elements: keeps every array on a 64-byte border


@dataclass(frozen=True, slots=True)
class Fields:
    """Arrays of int32 laid one after the other."""

    places: dict[str, tuple[int, tuple[int, ...]]]
    size: int

    @classmethod
    def lay(cls, shapes: dict[str, tuple[int, ...]]) -> Fields:
        places, offset = {}, 0
        for name, shape in shapes.items():
            places[name] = (offset, shape)
            offset += -(-int(np.prod(shape)) // ALIGN) * ALIGN
        return cls(places, offset)


class Staging:
    def __init__(self, device: torch.device, buffers: int = 3):
        self.device, self.turn = device, 0
        self.buffers = buffers
        self.events: list[torch.cuda.Event | None] = [None] * buffers
        self.host: list[Tensor] = []
        self.there = torch.empty(0, dtype=torch.int32, device=device)
        self.old: list[Tensor] = []  # captured steps still read them

    def begin(self, fields: Fields) -> dict[str, np.ndarray]:
        """Host arrays to fill in, zeroed."""
        if self.there.numel() < fields.size:
            self._grow(fields.size)
        self.turn = (self.turn + 1) % self.buffers
        event = self.events[self.turn]
        if event is not None:
            event.synchronize()
        flat = self.host[self.turn].numpy()
        flat[: fields.size] = 0
        return {name: flat[at : at + int(np.prod(shape))].reshape(shape) for name, (at, shape) in fields.places.items()}

    def send(self, fields: Fields) -> dict[str, Tensor]:
        self.there[: fields.size].copy_(self.host[self.turn][: fields.size], non_blocking=True)
        if self.device.type == "cuda":
            event = self.events[self.turn] = self.events[self.turn] or torch.cuda.Event()
            event.record()
        return self.views(fields)

    def views(self, fields: Fields) -> dict[str, Tensor]:
        return {
            name: self.there[at : at + int(np.prod(shape))].view(shape) for name, (at, shape) in fields.places.items()
        }

    def _grow(self, size: int) -> None:
        size = max(1 << 16, 2 * size)
        self.old.append(self.there)
        self.there = torch.empty(size, dtype=torch.int32, device=self.device)
        pin = self.device.type == "cuda"
        for event in self.events:
            if event is not None:
                event.synchronize()
        self.host = [torch.empty(size, dtype=torch.int32, pin_memory=pin) for _ in range(self.buffers)]
