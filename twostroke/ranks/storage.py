"""The KV cache of an engine with several ranks, as its leading rank sees it.

Each rank has the same blocks, with its own heads in them. As bytes, which other engines get, a block is the parts of
all ranks in their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from twostroke.kv.storage import KVStorage
from twostroke.ranks.group import Ranks


class RankedStorage(KVStorage):
    def __init__(self, ranks: Ranks, *given: Any):
        """given: as for `KVStorage`, of the part of this rank."""
        super().__init__(*given)
        self.ranks = ranks

    @property
    def exchanged_bytes(self) -> int:
        return self.ranks.parts * self.layout.block_bytes

    def export_to(self, blocks: Sequence[int], out: memoryview) -> None:
        parts = np.frombuffer(out, np.uint8).reshape(len(blocks), self.ranks.parts, self.layout.block_bytes)
        self.ranks.ask_for(blocks)
        own = np.empty((len(blocks), self.layout.block_bytes), np.uint8)
        self._copy_out(blocks, own)
        parts[:, 0] = own
        for rank, content in self.ranks.answers():
            parts[:, rank] = np.frombuffer(content, np.uint8).reshape(len(blocks), -1)

    def take_in(self, parts: Sequence[tuple[int, bytes | memoryview]]) -> None:
        size = self.layout.block_bytes
        if any(len(content) != self.exchanged_bytes for _, content in parts):
            raise ValueError(f"a block has {self.exchanged_bytes} bytes; content of another size arrived")
        super().take_in([(block, content[:size]) for block, content in parts])
        for rank in range(1, self.ranks.parts):
            for block, content in parts:
                self.ranks.give(rank, block, content[rank * size : (rank + 1) * size])
