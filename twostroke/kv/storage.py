"""The memory behind the block pool. It is reserved at once and touched only as blocks are written."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from twostroke.kv.host_memory import HostMemory
from twostroke.kv.layout import KVLayout
from twostroke.ops.arrays import reserve, strided_part
from twostroke.ops.interface import Array, KVFormat, KVLayer
from twostroke.record import replace
from twostroke.types import Move

if TYPE_CHECKING:
    import torch

    from twostroke.kv.staging import BlockStaging


class KVStorage:
    """data: (blocks, bytes of a block). A block is one run of bytes: its group's layers one after the other, in each
    layer the parts of its entries one after the other, each as (heads, entries, width)."""

    def __init__(
        self,
        layout: KVLayout,
        blocks: int,
        kv_format: KVFormat,
        device: torch.device | None,
        host_slots: int = 0,
    ):
        """device: the backend's (see ops/interface.py)."""
        self.layout, self.format = layout, kv_format
        self.data = reserve((blocks, layout.block_bytes), "uint8", device)
        self.host = HostMemory(host_slots, self.data) if host_slots else None  # of evicted blocks
        self.place = places(layout)

    def layer(self, layer: int) -> tuple[KVLayer, int]:
        """The layer's views into the pool, and the group whose block table it follows. What it caches beside is in
        `further`, in the order in which its mixer lists its entries."""
        (first, group), *rest = (self._part(*place) for place in self.place[layer])
        return replace(first, further=tuple(rest)), group

    def _part(self, group: int, index: int) -> tuple[KVLayer, int]:
        entry = self.layout.groups[group].entry
        count, offset = entry.span // entry.tokens, index * entry.block_bytes
        parts: dict[str, Array] = {}
        for part in entry.parts:
            scales = part.name.endswith("_scales")
            shape = (part.heads, count) if scales else (part.heads, count, part.width)
            parts[part.name] = strided_part(self.data, offset, shape, part.format)
            offset += count * part.bytes
        return KVLayer(self.format, **parts), group

    def draft_part(self, first: int) -> DraftStorage:
        """The layers of the draft model: the first of them has the number `first`."""
        return DraftStorage(self, first)

    # ---- blocks as bytes -----------------------------------------------------------------------------------------

    def move(self, moves: Sequence[Move]) -> None:
        """Copy blocks to the host and back, before the step that was planned with it."""
        if moves:
            assert self.host is not None, "blocks are to be moved to a host that has no place for them"
            self.host.move(moves)

    @property
    def exchanged_bytes(self) -> int:
        """Bytes of a block as other engines get it."""
        return self.layout.block_bytes

    def export(self, block: int) -> bytes:
        """The bytes of a block of any group. Waits for the device."""
        content = bytearray(self.exchanged_bytes)
        self.export_to([block], memoryview(content))
        return bytes(content)

    def export_to(self, blocks: Sequence[int], out: memoryview) -> None:
        """The bytes of several blocks, one after the other."""
        self._copy_out(blocks, np.frombuffer(out, np.uint8).reshape(len(blocks), self.layout.block_bytes))

    def _copy_out(self, blocks: Sequence[int], to: np.ndarray) -> None:
        """to: (blocks, bytes of a block of this process)."""
        if isinstance(self.data, np.ndarray):
            np.take(self.data, blocks, axis=0, out=to, mode="clip")  # the default copies twice
            return
        self.settle()
        self.staging.copy_out(blocks, to)

    def settle(self) -> None:
        """Wait for blocks that steps in flight bring back from the host or copy to it."""
        if self.host is not None and not isinstance(self.data, np.ndarray) and self.data.is_cuda:
            import torch

            torch.cuda.synchronize()

    def take_in(self, parts: Sequence[tuple[int, bytes | memoryview]]) -> None:
        """Blocks, and the bytes for them that `export` gave, in another process perhaps."""
        if any(len(content) != self.layout.block_bytes for _, content in parts):
            raise ValueError(f"a block has {self.layout.block_bytes} bytes; content of another size arrived")
        if isinstance(self.data, np.ndarray):
            for block, content in parts:
                self.data[block] = np.frombuffer(content, np.uint8)
        else:
            self.staging.take_in(parts)

    @cached_property
    def staging(self) -> BlockStaging:
        from twostroke.kv.staging import BlockStaging  # torch

        return BlockStaging(self.data)


def places(layout: KVLayout) -> dict[int, list[tuple[int, int]]]:
    """For each layer, where each kind of entry that it caches lies: the group, and the layer's index within it."""
    found: dict[int, list[tuple[int, int]]] = {}
    for number, group in enumerate(layout.groups):
        for index, layer in enumerate(group.layers):
            found.setdefault(layer, []).append((number, index))
    return found


class DraftStorage(KVStorage):
    """The draft model's layers in the same memory: layer 0 here is the first of them."""

    def __init__(self, whole: KVStorage, first: int):
        self.layout, self.format, self.data, self.host = whole.layout, whole.format, whole.data, None
        self.place = {layer - first: place for layer, place in whole.place.items() if layer >= first}
