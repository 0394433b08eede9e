"""How the KV cache of an architecture is cut into groups and blocks. Torch-free.

One pool of equal-sized blocks serves every layer. Layers that cache alike are put into groups, each group with its own
block table into that pool: a layer with a sliding window gives old blocks back while a full layer keeps them. A block
holds the entries of BLOCK tokens (of as many as one entry stands for, where that is more) of every layer of one group:

    Gemma 3, 18 layers, one in six full:     group 0 (full)    layers  5 11 17
                                             group 1 (window)  layers  0  1  2
                                             group 2 (window)  layers  3  4  6   …
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any

from twostroke.model.arch import Arch, KVEntry
from twostroke.ops.interface import BLOCK


@dataclass(frozen=True, slots=True)
class KVGroup:
    entry: KVEntry  # of each of its layers
    layers: tuple[int, ...]

    @property
    def window(self) -> int | None:
        return self.entry.window

    @property
    def span(self) -> int:
        """Tokens of one block."""
        return self.entry.span

    def blocks(self, tokens: int, step: int) -> int:
        """Blocks that a request of `tokens` tokens holds at most, computing up to `step` of them at a time."""
        whole = ceil(tokens / self.span)
        if self.window is None:
            return whole
        # The window of the step's first token and the step itself, not aligned to blocks at either end.
        return min(whole, ceil((self.window - 1 + step) / self.span) + 1)


@dataclass(frozen=True, slots=True)
class KVLayout:
    groups: tuple[KVGroup, ...]
    block_bytes: int  # those of the largest group; a smaller one leaves the rest of its blocks unused

    @property
    def state_bytes(self) -> int:
        """Of one running request, beside its blocks."""
        return sum(len(group.layers) * group.entry.state_bytes for group in self.groups)

    @property
    def token_bytes(self) -> float:
        """Bytes that one more token takes in all layers, without regard to windows."""
        return sum(len(group.layers) * group.entry.bytes / group.entry.tokens for group in self.groups)

    def read_bytes(self, context: int) -> float:
        """Bytes of K and V that a token at the end of `context` tokens reads in all layers."""
        return sum(len(group.layers) * group.entry.read(context) for group in self.groups)

    def document(self) -> dict[str, Any]:
        """As plain data, for a server's description of its cache."""
        groups = [
            {
                "window": group.window,
                "layers": list(group.layers),
                "entry_bytes": group.entry.bytes,
                "entry_tokens": group.entry.tokens,
            }
            for group in self.groups
        ]
        return {
            "groups": groups, "block_bytes": self.block_bytes, "block_tokens": BLOCK, "state_bytes": self.state_bytes,
        }  # fmt: skip

    def blocks_for(self, tokens: int, step: int | None = None) -> int:
        """Blocks one request holds at most on its way to `tokens` tokens, computing up to `step` of them at a time."""
        return sum(group.blocks(tokens, step or tokens) for group in self.groups)


def make_layout(arch: Arch, kv_dtype: str) -> KVLayout:
    """Groups of about equal bytes: as many layers each as the kind with the fewest bytes in all has."""
    kinds: dict[KVEntry, list[int]] = {}
    for index, layer in enumerate(arch.layers):
        kinds.setdefault(layer.mixer.entry(kv_dtype), []).append(index)
    size = min(len(layers) * entry.block_bytes for entry, layers in kinds.items())
    groups = []
    for entry, layers in sorted(kinds.items(), key=lambda kind: (kind[0].window is not None, kind[0].window or 0)):
        count = max(1, size // entry.block_bytes)
        groups += [KVGroup(entry, tuple(layers[first : first + count])) for first in range(0, len(layers), count)]
    return KVLayout(tuple(groups), max(len(group.layers) * group.entry.block_bytes for group in groups))
