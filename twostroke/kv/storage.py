"""The tensors behind the block pool. Memory is reserved at once and touched only as blocks are written."""

from __future__ import annotations

import torch
from torch import Tensor

from twostroke.kv.layout import KVLayout
from twostroke.model.arch import Arch
from twostroke.ops.interface import BLOCK, KVFormat, KVLayer

ELEMENT = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "int4": torch.uint8,
    "fp8": torch.float8_e4m3fn,
}


class KVStorage:
    """data: (blocks, layers of a group, 2 (K, V), kv_heads, BLOCK, width): a block is one contiguous run of bytes."""

    def __init__(self, arch: Arch, layout: KVLayout, blocks: int, kv_format: KVFormat, device: torch.device):
        width = arch.head_dim // 2 if kv_format == "int4" else arch.head_dim
        shape = (blocks, layout.layers_per_block, 2, arch.kv_heads, BLOCK)
        self.format = kv_format
        self.data = torch.empty((*shape, width), dtype=ELEMENT[kv_format], device=device)
        self.scales: Tensor | None = None
        if kv_format in ("int8", "int4", "fp8"):
            self.scales = torch.empty(shape, dtype=torch.float32, device=device)
        self.place = {  # layer -> (group, index of the layer within its group)
            layer: (g, i) for g, group in enumerate(layout.groups) for i, layer in enumerate(group.layers)
        }

    def layer(self, layer: int) -> tuple[KVLayer, int]:
        """The layer's views into the pool, and the group whose block table it follows."""
        group, index = self.place[layer]
        keys, values = self.data[:, index, 0], self.data[:, index, 1]
        if self.scales is None:
            return KVLayer(self.format, keys, values), group
        return KVLayer(self.format, keys, values, self.scales[:, index, 0], self.scales[:, index, 1]), group
