"""The pool of KV blocks: which are held, and which can be found again by their content. Torch-free.

A block is always in exactly one state:

    free ──take──▶ held (references ≥ 1) ──last release──▶ cached (named, unreferenced) ──evicted──▶ free
                     ▲                                        │
                     └──────────────── hold ◀─────────────────┘       an unnamed block goes straight back to free

Names are chained hashes of the tokens up to and including the block. A name is published as soon as a plan will fill
the block (pending), so that requests that arrive together share the work, and revoked if that step fails.
"""

from __future__ import annotations

from collections import OrderedDict

from twostroke.kv.addresses import Name
from twostroke.kv.offload import HostPool


class BlockPool:
    def __init__(self, blocks: int, keep_cached: bool = True, host: HostPool | None = None):
        self.total = blocks
        self.keep_cached = keep_cached  # False: a block is forgotten when its last holder releases it
        self.host = host  # takes the content of blocks that are evicted
        self.references = [0] * blocks
        self.free = list(range(blocks - 1, -1, -1))
        self.cached: OrderedDict[int, None] = OrderedDict()  # unreferenced but named, least recently used first
        self.by_name: dict[Name, int] = {}
        self.name_of: list[Name | None] = [None] * blocks
        self.shared = 0  # blocks with more than one reference
        self.tokens_of: list[tuple[int, ...]] = [()] * blocks  # compared on a hit: a hash alone is not proof
        self.filled: set[int] = set()  # blocks of the draft model that it has computed; it may leave others out

    @property
    def available(self) -> int:
        """Blocks that `take` can give without a preemption."""
        return len(self.free) + len(self.cached)

    def take(self) -> int:
        """A block of unspecified content with one reference. The caller has checked `available`."""
        if self.free:
            block = self.free.pop()
        else:
            block, _ = self.cached.popitem(last=False)
            name = self.name_of[block]
            if self.host is not None and name is not None:
                self.host.keep(block, name, self.tokens_of[block], block in self.filled)
            self.forget(block)
        self.filled.discard(block)
        self.references[block] = 1
        return block

    def hold(self, block: int) -> None:
        if self.references[block] == 0:
            del self.cached[block]
        self.references[block] += 1
        if self.references[block] == 2:
            self.shared += 1

    def release(self, block: int) -> None:
        self.references[block] -= 1
        if self.references[block]:
            self.shared -= self.references[block] == 1
            return
        if self.name_of[block] is not None and self.keep_cached:
            self.cached[block] = None
        else:
            self.forget(block)
            self.free.append(block)

    def publish(self, block: int, name: Name, tokens: tuple[int, ...]) -> bool:
        """Let other requests find the block under `name`. False: an equal block has it, and this one gets none."""
        if name in self.by_name:
            return False
        self.by_name[name] = block
        self.name_of[block] = name
        self.tokens_of[block] = tokens
        return True

    def find(self, name: Name, tokens: tuple[int, ...]) -> int | None:
        block = self.by_name.get(name)
        if block is None or self.tokens_of[block] != tokens:
            return None
        return block

    def forget(self, block: int) -> None:
        """Take the name away: no other request will find the block. Requests that hold it keep it."""
        name = self.name_of[block]
        if name is not None:
            del self.by_name[name]
            self.name_of[block] = None
            self.tokens_of[block] = ()

    def revoke(self, block: int) -> None:
        """Forget a block that has a name but was never filled."""
        self.forget(block)
        if self.references[block] == 0 and block in self.cached:
            del self.cached[block]
            self.free.append(block)

    def clear(self) -> None:
        """Forget all cached blocks."""
        for block in list(self.cached):
            self.revoke(block)
        if self.host is not None:
            self.host.clear()

    def check(self) -> None:
        """Invariant: free + held + cached = all, each block in one state, names consistent both ways."""
        held = {block for block, count in enumerate(self.references) if count > 0}
        free, cached = set(self.free), set(self.cached)
        assert len(free) == len(self.free), "a block is free twice"
        assert not (held & free or held & cached or free & cached), "a block is in two states"
        assert len(held) + len(free) + len(cached) == self.total, "a block is lost"
        assert all(self.name_of[block] is not None for block in cached), "a cached block has no name"
        assert all(self.name_of[block] is None for block in free), "a free block has a name"
        assert self.shared == sum(count > 1 for count in self.references), "shared blocks are miscounted"
        for name, block in self.by_name.items():
            assert self.name_of[block] == name, "names disagree"
        if self.host is not None:
            self.host.check()
