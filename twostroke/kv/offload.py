"""Evicted blocks that the host keeps: the name in each slot, and the copies to be made. Torch-free.

    block on the device ──evicted──▶ slot on the host ──its name is asked for──▶ any block on the device

A copy is decided while a plan is made and belongs to that plan: the runner makes its copies before its step, in the
order in which they were decided. So an evicted block is read before it is written again, and a slot is read before
another block's bytes replace it. What was copied back stays in its slot too, so that it need not be copied when it is
evicted again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from twostroke.kv.addresses import Name
from twostroke.types import Move, Place


class HostPool:
    def __init__(self, slots: int):
        self.total = slots
        self.free = list(range(slots - 1, -1, -1))
        self.slot_of: OrderedDict[Name, int] = OrderedDict()  # least recently used first
        self.name_in: list[Name | None] = [None] * slots
        self.tokens_in: list[tuple[int, ...]] = [()] * slots  # compared on a hit: a hash alone is not proof
        self.filled: set[int] = set()  # slots whose bytes the draft model had computed (see BlockPool.filled)
        self.moves: list[Move] = []  # decided, and not yet part of a plan
        self.offloaded = self.restored = 0  # blocks, since start

    def has(self, name: Name, tokens: tuple[int, ...]) -> bool:
        slot = self.slot_of.get(name)
        return slot is not None and self.tokens_in[slot] == tokens

    def keep(self, block: int, name: Name, tokens: tuple[int, ...], filled: bool = False) -> None:
        """The device gives the block to another request: its bytes go to the host, in place of the least used there."""
        if name in self.slot_of:
            self.slot_of.move_to_end(name)
            if not filled or self.slot_of[name] in self.filled:
                return
            slot = self.slot_of[name]  # the draft model has computed the block since its bytes were copied
        elif self.free:
            slot = self.free.pop()
        elif self.slot_of:
            _, slot = self.slot_of.popitem(last=False)
        else:
            return  # every slot is about to be read
        self.slot_of[name] = slot
        self.name_in[slot], self.tokens_in[slot] = name, tokens
        (self.filled.add if filled else self.filled.discard)(slot)
        self.moves.append(Move(block, Place(slot), away=True))
        self.offloaded += 1

    def claim(self, names: Iterable[Name]) -> list[int]:
        """The slots of these names. No other block gets them until `bring_back` was called for each."""
        return [self.slot_of.pop(name) for name in names]

    def bring_back(self, slot: int, block: int) -> None:
        """Copy a claimed slot to the block. The slot is then the most recently used."""
        name = self.name_in[slot]
        assert name is not None, "a slot without a name was claimed"
        self.slot_of[name] = slot
        self.moves.append(Move(block, Place(slot), away=False))
        self.restored += 1

    def take_moves(self) -> tuple[Move, ...]:
        moves = tuple(self.moves)
        self.moves.clear()
        return moves

    def undo(self, moves: Iterable[Move]) -> set[int]:
        """These copies failed: forget them and those still to be made. Returns the blocks on the device that may not
        have been filled."""
        broken = set()
        for block, place, away in (*moves, *self.take_moves()):
            if not away:
                broken.add(block)
                continue
            slot = place.slot
            name = self.name_in[slot]
            if name is not None:
                del self.slot_of[name]
                self.name_in[slot], self.tokens_in[slot] = None, ()
                self.free.append(slot)
        return broken

    def clear(self) -> None:
        """Forget all names. Copies that were decided are still made and then unused."""
        for slot in self.slot_of.values():
            self.name_in[slot], self.tokens_in[slot] = None, ()
            self.free.append(slot)
        self.slot_of.clear()

    def check(self) -> None:
        """Invariant: every slot is free or holds one name, and names agree both ways."""
        assert len(set(self.free)) == len(self.free), "a slot is free twice"
        assert len(self.free) + len(self.slot_of) == self.total, "a slot is lost"
        assert all(self.name_in[slot] is None for slot in self.free), "a free slot has a name"
        assert all(self.name_in[slot] == name for name, slot in self.slot_of.items()), "names of slots disagree"
