"""Compressed attention (DeepSeek V4): its description, and the layer that runs it.

    hidden ─┬─ q_a, norm ─┬─ q_b ──▶ q of each head                       ┐
            │             └─ index_q ──▶ q of the indexer (CSA)           │ one softmax over window, entries and sink;
            ├─ key ──▶ one key for all heads, which is the value too      │ the result is rotated back
            └─ state ──▶ what the token leaves for compressed entries     ┘
    result ─ o_a: a product for each group of heads ─ o_b ──▶ added to the stream

A layer is a plain window, or a window and one entry for `ratio` tokens: of CSA (with an indexer, which chooses the
entries that a query reads; two entries share each token) or of HCA. `ops/compressed.py` has the rest. Torch-free.
"""

from __future__ import annotations

from math import lcm

from twostroke.model.arch import Product, Rope, seen_pairs
from twostroke.model.entry import KVEntry, KVPart
from twostroke.model.layers import Branch, PackedProduct
from twostroke.ops.compressed_interface import CompressedAttention, CompressedRows
from twostroke.ops.interface import BLOCK, KV_SCALE_BYTES, Array, Batch, KVLayer, Norm, Ops, Weight
from twostroke.ops.joined import side_by_side
from twostroke.record import Record

ENTRIES = 8  # of CSA in a block: the states of a few tokens are large, and all blocks of a pool are of one size


class IndexArch(Record):
    """What chooses the entries that a query reads."""

    heads: int
    dim: int
    chosen: int


class CompressedArch(Record):
    """What compressed attention is, as data."""

    heads: int
    dim: int  # of a head and of the shared key
    rope_dim: int  # rotated, at the end of a head
    window: int
    query_rank: int
    groups: int  # of heads, each with a product of its own to `output_rank`
    output_rank: int
    ratio: int = 0  # tokens of an entry; 0: the window alone
    index: IndexArch | None = None  # CSA; None: a query reads all entries
    rope: Rope | None = None

    @property
    def kind(self) -> str:
        return "compressed"

    @property
    def width(self) -> int:
        """The elements of all query heads together."""
        return self.heads * self.dim

    @property
    def overlap(self) -> bool:
        """Each token is part of two entries."""
        return self.index is not None

    @property
    def state(self) -> int:
        """Numbers that a token leaves until its entries are complete: values and the logits of their weights."""
        if not self.ratio:
            return 0
        return 2 * self.dim if self.index is None else 4 * (self.dim + self.index.dim)

    def products(self, hidden: int) -> tuple[Product, ...]:
        index = self.index
        return (
            Product("down", hidden, self.query_rank + self.dim + self.state + (index.heads if index else 0)),
            Product("queries", self.query_rank, self.width),
            *((Product("index_queries", self.query_rank, index.heads * index.dim),) if index else ()),
            Product("output_groups", self.width // self.groups, self.groups * self.output_rank),
            Product("output", self.groups * self.output_rank, hidden),
        )

    def attention_flops(self, start: int, count: int) -> int:
        """q·k and p·v over the window and the entries, and the scores of the indexer."""
        pairs = seen_pairs(start, count, self.window)
        scored = 0
        if self.ratio:
            entries = seen_pairs(start, count, None) // self.ratio
            read = (
                entries
                if self.index is None
                else seen_pairs(start, count, self.index.chosen * self.ratio) // self.ratio
            )
            pairs += read
            scored = 2 * entries * self.index.heads * self.index.dim if self.index is not None else 0
        return 4 * pairs * self.width + scored

    def entries(self, kv_dtype: str) -> tuple[KVEntry, ...]:
        """Compressed entries (with the keys of the indexer), states, raw keys: the order in which layouts keep them."""
        raw = KVEntry(self._key("keys", self.dim, kv_dtype), self.window)
        if not self.ratio:
            return (raw,)
        parts = self._key("keys", self.dim, kv_dtype)
        if self.index is not None:
            parts += self._index_key(kv_dtype)
        most = self.index.chosen if self.index else 0
        made = KVEntry(
            parts, None, self.ratio, most=most, block_tokens=lcm(BLOCK, ENTRIES * self.ratio) if most else BLOCK
        )
        span = 2 * self.ratio if self.overlap else self.ratio
        state = KVEntry((KVPart("keys", 1, self.state, "float32"),), span, grid=self.ratio)
        return made, state, raw

    def _key(self, name: str, dim: int, kv_dtype: str) -> tuple[KVPart, ...]:
        """In formats with scales the rotated part keeps 16 bits, as the published cache has it."""
        if kv_dtype not in KV_SCALE_BYTES:
            return (KVPart(name, 1, dim, kv_dtype),)
        scales = KVPart("key_scales", 1, -(-(dim - self.rope_dim) // 64), "fp8")
        return KVPart(name, 1, dim - self.rope_dim, kv_dtype), KVPart("rotated", 1, self.rope_dim, "bfloat16"), scales

    def _index_key(self, kv_dtype: str) -> tuple[KVPart, ...]:
        assert self.index is not None
        scales = (KVPart("value_scales", 1, 1, "float32"),) if kv_dtype in KV_SCALE_BYTES else ()
        return KVPart("values", 1, self.index.dim, kv_dtype), *scales

    def stores(self, kv_dtype: str) -> bool:
        return kv_dtype not in KV_SCALE_BYTES

    def small_weights(self) -> int:
        """Norms, sinks and the biases of places."""
        own = self.query_rank + self.dim + self.heads
        if not self.ratio:
            return own
        index = self.index.dim * (1 + 2 * self.ratio) if self.index is not None else 0
        return own + self.dim * (1 + self.ratio * (2 if self.overlap else 1)) + index


class Compressed(Record, eq=False):
    """CompressedArch with its weights."""

    arch: CompressedArch
    norm: Norm
    down: Weight  # q_a, key, state and the weights of the indexer's heads, stacked
    query_norm: Norm
    queries: Weight
    index_queries: Weight | None
    attention: CompressedAttention
    output_groups: tuple[Weight, ...]
    output: Weight

    def run(self, ops: Ops, x: Array, cache: KVLayer, batch: Batch, group: int) -> Branch:
        stacked = ops.linear(x, self.down, before=self.norm)
        key, state = self.arch.query_rank, self.arch.query_rank + self.arch.dim
        weights = state + self.arch.state
        low = stacked[:, :key]
        rows = CompressedRows(
            q=ops.linear(low, self.queries, before=self.query_norm),
            key=stacked[:, key:state],
            state=stacked[:, state:weights] if self.arch.ratio else None,
            index_q=None if self.index_queries is None else ops.linear(low, self.index_queries, before=self.query_norm),
            index_weights=None if self.index_queries is None else stacked[:, weights:],
        )
        attended = ops.attend_compressed(rows, self.attention, cache, batch, group)  # (T, heads · dim)
        size = self.arch.width // self.arch.groups
        parts = [ops.linear(attended[:, i * size : (i + 1) * size], one) for i, one in enumerate(self.output_groups)]
        return Branch(side_by_side(parts), self.output, None, None)

    def products(self) -> tuple[PackedProduct, ...]:
        index = (
            ()
            if self.index_queries is None
            else (PackedProduct("index_queries", self.index_queries, self.query_norm, False),)
        )
        return (
            PackedProduct("down", self.down, self.norm, False),
            PackedProduct("queries", self.queries, self.query_norm, False),
            *index,
            *(PackedProduct("output_groups", weight, None, False) for weight in self.output_groups),
            PackedProduct("output", self.output, None, True),
        )
