"""What a layer keeps in the KV cache: sizing, sharing and cost read these numbers alone. Torch-free."""

from __future__ import annotations

from twostroke.ops.interface import BLOCK, KV_BITS
from twostroke.record import Record


class KVPart(Record):
    """One array of a cache entry: `heads` rows of `width` elements."""

    name: str  # the field of ops.interface.KVLayer that shows it
    heads: int
    width: int
    format: str  # of one element

    @property
    def bytes(self) -> int:
        return self.heads * self.width * KV_BITS[self.format] // 8


class KVEntry(Record):
    """What one layer keeps in the KV cache. Storage, sizing, layout and cost know no more of a mixer.

    Most layers need three numbers: the bytes of an entry, the window, the tokens that share an entry. Compressed
    attention has windows on a grid and reads a choice of its entries."""

    parts: tuple[KVPart, ...]  # of one entry
    window: int | None = None  # tokens that a token sees, itself included; None: all before it
    tokens: int = 1  # tokens that share one entry
    state_bytes: int = 0  # fixed, for each running request; no mixer here has any
    grid: int = 0  # a token sees back to the last multiple of this, and `window - grid` tokens before; 0: the window
    most: int = 0  # entries whose first part a token reads at most; 0: all that it sees
    block_tokens: int = BLOCK  # a block has the entries of so many tokens, or one

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)

    @property
    def span(self) -> int:
        """Tokens whose entries of this layer lie in one block."""
        return max(self.block_tokens, self.tokens)

    @property
    def block_bytes(self) -> int:
        return self.bytes * (self.span // self.tokens)

    def first_seen(self, position: int) -> int:
        """The first token whose entry a token at `position` or later can see."""
        if self.window is None:
            return 0
        if self.grid:
            return max(0, position // self.grid * self.grid - (self.window - self.grid))
        return max(0, position - self.window + 1)

    def reach(self) -> tuple[tuple[int | None, float], ...]:
        """What a token reads, as (tokens, bytes of each): of so many tokens before it, None: of all."""
        if self.grid and self.window is not None:  # read when an entry is complete
            return ((self.window // self.grid, float(self.bytes)),)
        if not self.most:
            return ((self.window, self.bytes / self.tokens),)
        first = self.parts[0].bytes
        return (self.most * self.tokens, first / self.tokens), (self.window, (self.bytes - first) / self.tokens)

    def read(self, context: int) -> float:
        """Bytes of entries that a token at the end of `context` tokens reads."""
        return sum(size * (context if tokens is None else min(context, tokens)) for tokens, size in self.reach())
