"""Multi-head latent attention (MLA): its description, and the layer that runs it.

    hidden ─┬─ q_a, norm, q_b ──▶ q of each head: plain part │ rotated part
            └─ kv_a ──▶ latent (normed) │ rotated key part          one entry, cached; all heads share it

K of a head is (k_b · latent, rotated part), V is v_b · latent. Instead of making K and V of every cached token, k_b is
applied to the query and v_b to the weighted sum of latents (docs/families.md says why). Torch-free.
"""

from __future__ import annotations

from twostroke.model.arch import Product, Rope, seen_pairs
from twostroke.model.entry import KVEntry, KVPart
from twostroke.model.layers import Branch, PackedProduct
from twostroke.ops.interface import (
    KV_SCALE_BYTES,
    LATENT_GROUP,
    Array,
    Batch,
    KVLayer,
    LatentAttention,
    Norm,
    Ops,
    Weight,
    latent_scales,
)
from twostroke.record import Record


class LatentArch(Record):
    """What latent attention is, as data."""

    heads: int
    latent: int  # numbers of the latent vector (kv_lora_rank)
    plain_dim: int  # of a query and key head, not rotated (qk_nope_head_dim)
    rope_dim: int  # of a query head and of the shared key part, rotated
    value_dim: int  # of a value head
    query_rank: int | None = None  # q is a product of this rank with a norm inside; None: one product
    scale: float | None = None  # multiplies q · k; None: (plain_dim + rope_dim) ** -0.5
    rope: Rope | None = None
    interleaved: bool = True  # the checkpoint rotates neighbouring dimensions
    bias: bool = False  # on the products from the hidden state, and on the output

    @property
    def kind(self) -> str:
        return "latent"

    @property
    def factor(self) -> float:
        """What q · k is multiplied with."""
        return self.scale if self.scale is not None else float(self.plain_dim + self.rope_dim) ** -0.5

    @property
    def query_width(self) -> int:
        """Numbers of all query heads together."""
        return self.heads * (self.plain_dim + self.rope_dim)

    @property
    def cached(self) -> int:
        """Numbers that a token keeps in the cache."""
        return self.latent + self.rope_dim

    def products(self, hidden: int) -> tuple[Product, ...]:
        """key_up and value_up multiply each head with a matrix of its own: as many weights as one matrix has whose
        inputs are those of one head."""
        return (
            Product("latents", hidden, (self.query_rank or self.query_width) + self.cached, self.bias),
            *((Product("queries", self.query_rank, self.query_width),) if self.query_rank else ()),
            Product("key_up", self.plain_dim, self.heads * self.latent),
            Product("value_up", self.latent, self.heads * self.value_dim),
            Product("output", self.heads * self.value_dim, hidden, self.bias),
        )

    def attention_flops(self, start: int, count: int) -> int:
        """q·k over latent and rotated part, p·v over the latent."""
        return 2 * seen_pairs(start, count, None) * self.heads * (self.cached + self.latent)

    def entries(self, kv_dtype: str) -> tuple[KVEntry, ...]:
        """Latent and rotated key part, once for all heads; values are read from the same numbers."""
        keys = KVPart("keys", 1, self.cached, kv_dtype)
        if kv_dtype not in KV_SCALE_BYTES:
            return (KVEntry((keys,)),)
        return (KVEntry((keys, KVPart("key_scales", latent_scales(self.cached), 1, "float32"))),)

    def stores(self, kv_dtype: str) -> bool:
        return kv_dtype == "int8" or kv_dtype not in KV_SCALE_BYTES

    @property
    def whole_groups(self) -> bool:
        """Whether the rotated numbers have one scale, of their own, in a format with scales."""
        return self.latent % LATENT_GROUP == 0 and self.rope_dim <= LATENT_GROUP

    def small_weights(self) -> int:
        return self.latent + (self.query_rank or 0)


class Latent(Record, eq=False):
    """LatentArch with its weights."""

    norm: Norm
    latents: Weight  # q (or what q is made of), latent and shared key part stacked
    query_width: int  # columns of `latents` that are q's
    query_norm: Norm | None
    queries: Weight | None  # None: q is made in one product
    attention: LatentAttention
    output: Weight

    def run(self, ops: Ops, x: Array, cache: KVLayer, batch: Batch, group: int) -> Branch:
        stacked = ops.linear(x, self.latents, before=self.norm)
        q, kv = stacked[:, : self.query_width], stacked[:, self.query_width :]
        if self.queries is not None:
            q = ops.linear(q, self.queries, before=self.query_norm)
        attended = ops.attend_latent(q, kv, self.attention, cache, batch, group)  # (T, heads · value_dim)
        return Branch(attended, self.output, None, None)

    def products(self) -> tuple[PackedProduct, ...]:
        second = () if self.queries is None else (PackedProduct("queries", self.queries, self.query_norm, False),)
        return (
            PackedProduct("latents", self.latents, self.norm, False),
            *second,
            PackedProduct("key_up", self.attention.key_up, None, False),
            PackedProduct("value_up", self.attention.value_up, None, False),
            PackedProduct("output", self.output, None, True),
        )
