"""How the KV cache of an architecture is cut into groups and blocks. Torch-free.

One pool of equal-sized blocks serves every layer. Layers that cache alike are put into groups, each group with its own
block table into that pool: a layer with a sliding window gives old blocks back while a full layer keeps them. A block
holds the entries of BLOCK tokens (of as many as one entry stands for, where that is more) of every layer of one group:

    Gemma 3, 18 layers, one in six full:     group 0 (full)    layers  5 11 17
                                             group 1 (window)  layers  0  1  2
                                             group 2 (window)  layers  3  4  6   …

The layers of a draft model are numbered after the target's and have groups of their own. Those have no window: a draft
model may read a text again from any place on.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Any

from twostroke.model.arch import Arch
from twostroke.model.entry import KVEntry
from twostroke.ops.interface import BLOCK
from twostroke.record import Record, replace

LONG_REQUEST = 32768  # tokens
GROUP_COST = 0.03  # of one more group, as a share of the cache: every step prepares a block table for each


class KVGroup(Record):
    entry: KVEntry  # of each of its layers
    layers: tuple[int, ...]
    draft: bool = False  # they belong to the draft model

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


class KVLayout(Record):
    groups: tuple[KVGroup, ...]
    block_bytes: int  # those of the largest group; a smaller one leaves the rest of its blocks unused

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of one running request, beside its blocks."""
        return sum(len(group.layers) * group.entry.state_bytes for group in self.groups)

    @property
    def token_bytes(self) -> float:
        """Bytes that one more token takes in all layers, without regard to windows."""
        return sum(len(group.layers) * group.entry.bytes / group.entry.tokens for group in self.groups)

    def read_bytes(self, context: int) -> float:
        """Bytes of K and V that a token at the end of `context` tokens reads in all layers of the target."""
        return sum(len(group.layers) * group.entry.read(context) for group in self.groups if not group.draft)

    @property
    def draft_groups(self) -> tuple[int, ...]:
        """The groups of the draft model."""
        return tuple(index for index, group in enumerate(self.groups) if group.draft)

    def document(self) -> dict[str, Any]:
        """The layout as plain data, for a server's description of its cache."""
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


def make_layout(arch: Arch, kv_dtype: str, draft: Arch | None = None) -> KVLayout:
    """Groups of about equal bytes: as many layers each as the kind with the fewest bytes in all has. With a draft model
    the size is the one that wastes least, in few groups."""
    kinds = layers_by_kind(arch, kv_dtype)
    if draft is None and sum(len(layers) for _, layers, _ in kinds) > len(arch.layers):
        return least_of_long_requests(kinds)
    if draft is None:
        return cut(kinds, min(len(layers) * entry.block_bytes for entry, layers, _ in kinds))
    first = len(arch.layers)
    for entry, layers, _ in layers_by_kind(draft, kv_dtype):
        kinds.append((replace(entry, window=None), [first + layer for layer in layers], True))
    sizes = {-(-len(layers) // count) * entry.block_bytes for entry, layers, _ in kinds for count in range(1, 5)}
    fitting = [cut(kinds, size) for size in sizes if size >= max(entry.block_bytes for entry, _, _ in kinds)]
    return min(fitting, key=lambda one: len(one.groups) * one.block_bytes * (1 + GROUP_COST * len(one.groups)))


def least_of_long_requests(kinds: Sequence[LayerKind]) -> KVLayout:
    """The cut with which a long request takes the least memory, in few groups. It is for layers that cache several
    kinds of entries of very different sizes, some for a few tokens and some for all."""
    least = max(entry.block_bytes for entry, _, _ in kinds)
    sizes = {-(-len(layers) // count) * entry.block_bytes for entry, layers, _ in kinds for count in range(1, 9)}
    fitting = [cut(kinds, size) for size in sizes | {least} if size >= least]
    step = min(LONG_REQUEST, 512)
    return min(fitting, key=lambda one: one.blocks_for(LONG_REQUEST, step) * one.block_bytes
               * (1 + GROUP_COST * len(one.groups)))  # fmt: skip


LayerKind = tuple[KVEntry, list[int], bool]  # layers that cache alike, and whether they are the draft model's


def layers_by_kind(arch: Arch, kv_dtype: str) -> list[LayerKind]:
    """The layers by the kind that they cache: those without a window first, then those on a grid: the order in which a
    mixer lists its entries."""
    kinds: dict[KVEntry, list[int]] = {}
    for index, layer in enumerate(arch.layers):
        for entry in layer.mixer.entries(kv_dtype):
            kinds.setdefault(entry, []).append(index)
    order = sorted(kinds.items(), key=lambda kind: _place(kind[0]))
    return [(entry, layers, False) for entry, layers in order]


def _place(entry: KVEntry) -> tuple[bool, bool, int]:
    return entry.window is not None, not entry.grid, entry.window or 0


def cut(kinds: Sequence[LayerKind], size: int) -> KVLayout:
    """Into groups of at most `size` bytes for each block (of one layer, where that has more)."""
    groups = []
    for entry, layers, draft in kinds:
        count = max(1, size // entry.block_bytes)
        groups += [
            KVGroup(entry, tuple(layers[first : first + count]), draft) for first in range(0, len(layers), count)
        ]
    return KVLayout(tuple(groups), max(len(group.layers) * group.entry.block_bytes for group in groups))
