"""How the KV cache of an architecture is cut into groups and blocks. Torch-free.

One pool of equal-sized blocks serves every layer. Layers are put into groups of equal layer count, each group with its
own block table into that pool, so that a layer with a sliding window can give old blocks back while a full layer keeps
them. A block holds BLOCK tokens of every layer of one group:

    Gemma 3, 18 layers, one in six full:     group 0 (full)    layers  5 11 17
                                             group 1 (window)  layers  0  1  2
                                             group 2 (window)  layers  3  4  6   …
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from twostroke.model.arch import Arch
from twostroke.ops.interface import BLOCK

KV_ELEMENT_BYTES = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0, "int8": 1.0, "int4": 0.5, "fp8": 1.0}
KV_SCALE_BYTES = {"int8": 4, "int4": 4, "fp8": 4}  # one float32 scale for each token and head


@dataclass(frozen=True, slots=True)
class KVGroup:
    window: int | None
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KVLayout:
    groups: tuple[KVGroup, ...]
    layers_per_block: int  # the largest group; a smaller last group leaves the rest of its blocks unused
    entry_bytes: int  # K and V of one token in one layer

    @property
    def block_bytes(self) -> int:
        return BLOCK * self.layers_per_block * self.entry_bytes

    def blocks_for(self, tokens: int, step: int | None = None) -> int:
        """Blocks one request holds at most on its way to `tokens` tokens, computing up to `step` of them at a time."""
        return sum(group_blocks(group.window, tokens, step or tokens) for group in self.groups)


def group_blocks(window: int | None, tokens: int, step: int) -> int:
    whole = ceil(tokens / BLOCK)
    if window is None:
        return whole
    # The window of the step's first token and the step itself, not aligned to blocks at either end.
    return min(whole, ceil((window - 1 + step) / BLOCK) + 1)


def make_layout(arch: Arch, kv_dtype: str) -> KVLayout:
    kinds: dict[int | None, list[int]] = {}
    for index, layer in enumerate(arch.layers):
        kinds.setdefault(layer.window, []).append(index)
    size = min(len(layers) for layers in kinds.values())
    groups = []
    for window, layers in sorted(kinds.items(), key=lambda kind: (kind[0] is not None, kind[0] or 0)):
        for first in range(0, len(layers), size):
            groups.append(KVGroup(window, tuple(layers[first : first + size])))
    entry = arch.kv_entry_bytes(KV_ELEMENT_BYTES[kv_dtype], KV_SCALE_BYTES.get(kv_dtype, 0))
    return KVLayout(tuple(groups), size, entry)
