"""The memory behind the block pool. It is reserved at once and touched only as blocks are written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from twostroke.kv.host_memory import HostMemory
from twostroke.kv.layout import KVLayout
from twostroke.model.arch import Arch
from twostroke.ops.arrays import reserve
from twostroke.ops.interface import BLOCK, Array, KVFormat, KVLayer
from twostroke.types import Move

if TYPE_CHECKING:
    import torch


class KVStorage:
    """data: (blocks, layers of a group, 2 (K, V), kv_heads, BLOCK, width): a block is one contiguous run of bytes."""

    def __init__(
        self,
        arch: Arch,
        layout: KVLayout,
        blocks: int,
        kv_format: KVFormat,
        device: torch.device | None,
        host_slots: int = 0,
    ):
        """device: the backend's (see ops/interface.py)."""
        width = arch.head_dim // 2 if kv_format == "int4" else arch.head_dim
        shape = (blocks, layout.layers_per_block, 2, arch.kv_heads, BLOCK)
        self.format = kv_format
        self.data = reserve((*shape, width), kv_format, device)
        self.scales: Array | None = None
        if kv_format in ("int8", "int4", "fp8"):
            self.scales = reserve(shape, "float32", device)
        self.host: HostMemory | None = None  # of evicted blocks
        if host_slots:
            self.host = HostMemory(host_slots, [self.data] if self.scales is None else [self.data, self.scales])
        self.place = {  # layer -> (group, index of the layer within its group)
            layer: (g, i) for g, group in enumerate(layout.groups) for i, layer in enumerate(group.layers)
        }

    def move(self, moves: Sequence[Move]) -> None:
        """Copy blocks to the host and back, before the step that was planned with it."""
        if moves:
            assert self.host is not None, "blocks are to be moved to a host that has no place for them"
            self.host.move(moves)

    def layer(self, layer: int) -> tuple[KVLayer, int]:
        """The layer's views into the pool, and the group whose block table it follows."""
        group, index = self.place[layer]
        keys, values = self.data[:, index, 0], self.data[:, index, 1]
        if self.scales is None:
            return KVLayer(self.format, keys, values), group
        return KVLayer(self.format, keys, values, self.scales[:, index, 0], self.scales[:, index, 1]), group
