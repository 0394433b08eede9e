"""The mathematics a device must offer: about ten functions, arrays in and arrays out.

`reference/` is the specification in plain torch, obvious and slow. Every other backend is an optimisation of it and
is tested against it. This package imports nothing of ours, so it could be lifted into another project.

Two rules every backend keeps, because exactness rests on them:
- The bits of one row of a result do not depend on how many other rows there are, nor on the row's place among them.
- Attention reads what the cache stores: K and V are rounded (or quantized) when written and read back in that form,
  within the step that wrote them too. All writes of a step come before its reads, so requests of one step may share
  blocks that this very step fills.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

from twostroke.record import Record

if TYPE_CHECKING:  # neither the block bookkeeping nor the native CPU backend brings torch with it
    import numpy as np
    import torch

    from twostroke.ops.compressed_interface import CompressedAttention, CompressedRows
    from twostroke.ops.formats import Stored
    from twostroke.ops.streams import StreamKernels

BLOCK = 16  # tokens in one KV block

Activation = Literal["silu", "gelu_tanh", "swiglu_oai", "swiglu_10"]
KVFormat = Literal["float32", "float16", "bfloat16", "int8", "int4", "fp8"]
KV_BITS = {"float32": 32, "float16": 16, "bfloat16": 16, "int8": 8, "int4": 4, "fp8": 8}  # of one element
KV_SCALE_BYTES = {"int8": 4, "int4": 4, "fp8": 4}  # one float32 scale for each token and head
LATENT_GROUP = 64  # numbers of a cached latent that share a scale

Array = Any  # what a backend computes with: np.ndarray where its `device` is None (the native CPU), else torch.Tensor
Weight = Any  # a matrix as the backend packed it; only the backend that made it looks inside
DecodeRow = tuple[int, int, int]  # the newest token of a request, its position, the request's row of the block tables


class Norm(Record, eq=False):
    """RMS norm: x / sqrt(mean(x²) + eps) · weight. `weight` is float32 (an offset such as Gemma's +1 is in it)."""

    weight: Array
    eps: float


class Gate(Record):
    """Gated activation of a (T, 2F) array holding gate | up: activation(gate) · up, of shape (T, F).

    swiglu_oai (gpt-oss): gate is at most 7, up lies between -7 and 7; gate · σ(1.702 gate) · (up + 1).
    swiglu_10 (DeepSeek V4): gate is at most 10, up lies between -10 and 10; silu(gate) · up.
    """

    activation: Activation


class Routing(Record):
    """How a row chooses its experts, and what each of them counts.

    A score for each expert is made of the router's outputs. The `chosen` best are taken, the lowest index first among
    equals. Where experts are in groups, a group's score is the sum of its `group_best` best, and only experts of the
    `kept_groups` best groups may be chosen.
    """

    experts: int
    chosen: int
    scores: Literal["softmax", "sigmoid", "sqrt_softplus"] = "softmax"
    normalised: bool = False  # the weights of the chosen are divided by their sum
    factor: float = 1.0  # multiplies the weights
    groups: int = 1
    kept_groups: int = 1
    group_best: int = 1


class ExpertSet(Record, eq=False):
    """The experts of one layer: each is a gated feed-forward network of its own."""

    routing: Routing
    router: Weight  # (experts, hidden)
    correction: Array | None  # (experts,) float32: added to the scores for the choice, not to the weights
    gate_up: tuple[Weight, ...]  # of each expert gate and up stacked
    gate: Gate
    down: tuple[Weight, ...]
    table: Array | None = None  # (vocab, chosen) int32: the experts of each token; None: the best scores choose


class RopeTable(Record, eq=False):
    """Rotation of the first `2·cos.shape[1]` dimensions of each head, in rotate-half order (i pairs with i + dim/2)."""

    cos: Array  # (positions, rotary_dim / 2) float32, any attention factor multiplied in
    sin: Array


class Attention(Record, eq=False):
    """What one layer's attention does, apart from the data: the constants of `attend`."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float  # multiplies q·k
    window: int = 0  # a token sees itself and the window - 1 tokens before it; 0: everything before it
    softcap: float = 0.0  # scores become softcap · tanh(score / softcap); 0: off
    rope: RopeTable | None = None
    query_norm: Norm | None = None  # over each head's head_dim, before the rotation
    key_norm: Norm | None = None
    # (kv_heads, head_dim): subtracted from keys that become codes of 8 bits. The same constant for every key adds the
    # same amount to all scores of a query, which the softmax removes
    key_center: Array | None = None
    # (heads,) float32: one more logit of each query head, in the softmax's maximum and sum, without a value
    sinks: Array | None = None


class LatentAttention(Record, eq=False):
    """The constants of `attend_latent`."""

    heads: int
    latent: int  # numbers of a latent vector
    plain_dim: int  # of a query head, not rotated
    rope_dim: int  # of a query head and of the shared key part, rotated in rotate-half order
    value_dim: int  # of a value head
    scale: float  # multiplies q·k
    rope: RopeTable
    norm: Norm  # of the latent, before it is cached
    key_up: Weight  # one part for each head, (latent, plain_dim): a query head's plain part -> latent
    value_up: Weight  # one part for each head, (value_dim, latent): a weighted sum of latents -> value head


class FusedLayer(Record, eq=False):
    """Grouped attention and a gated feed, each added to the residual stream: what `Ops.fuse` may run in one call.

    With experts, gate_up and down are those of an expert that every row takes as well; None: there is no such one.
    """

    attention_norm: Norm
    qkv: Weight  # q, k and v stacked
    attention: Attention
    output: Weight
    attention_out_norm: Norm | None  # before the residual add
    feed_norm: Norm
    gate_up: Weight | None  # gate and up stacked
    gate: Gate
    down: Weight | None
    feed_out_norm: Norm | None
    experts: ExpertSet | None = None
    all_queries_norm: Norm | None = None  # over all query heads together, before `attention`
    all_keys_norm: Norm | None = None


class KVLayer(Record, eq=False):
    """One layer's share of the block pool. Strided views: the same block of all layers of a group lies together.

    int8: width = head_dim, value = code · scale. int4: width = head_dim / 2 (uint8; low nibble = even element),
    value = (code - 8) · scale. fp8: four bits of exponent, three of mantissa, value = code · scale. One scale for each
    token and head; in the other float formats there are none. The entries of latent attention have one head; in int8
    they have a scale for each LATENT_GROUP numbers.

    The native CPU backend orders the codes of an int8 block and head in its own way (cpu/native/kernels/kv.h), so only
    that backend reads its pool. Code that moves whole blocks does not depend on the order.
    """

    format: KVFormat
    keys: Array  # (blocks, kv_heads, BLOCK, width)
    values: Array | None = None  # None: a mixer that caches keys alone
    key_scales: Array | None = None  # (blocks, kv_heads, BLOCK) float32
    value_scales: Array | None = None
    further: tuple[tuple[KVLayer, int], ...] = ()  # what the layer caches beside, each with the group it follows


def latent_scales(numbers: int) -> int:
    """Scales of an entry of latent attention in a format that has them."""
    return -(-numbers // LATENT_GROUP)


class GroupBlocks(Record, eq=False):
    """Where a step's tokens live, for the layers of one KV group (they share a block table)."""

    slots: Array  # (T,) int64: block · BLOCK + offset where the row's K and V are written
    tables: Array  # (R, columns) int32: block of request r that holds positions [c·BLOCK, (c+1)·BLOCK); columns past
    # its context, and those a window has released, hold any valid block id and must not influence the result


class Batch(Record, eq=False):
    """The rows of one step: T new tokens of R requests, each request's rows contiguous and in order.

    Request r owns rows starts[r] : starts[r+1]; its last row is at position contexts[r] - 1.
    """

    tokens: Array  # (T,) int64
    positions: Array  # (T,) int64
    starts: Array  # (R + 1,) int32
    contexts: Array  # (R,) int32: tokens of the request in the cache once this step has written its own
    groups: tuple[GroupBlocks, ...]  # one for each KV group
    logit_rows: Array  # (S,) int64: the rows whose logits are wanted


class Decode(Protocol):
    """A step of newest tokens: logits (S, vocab), and, where wanted, the best token of each row (-1: not a number)."""

    def __call__(self, rows: Sequence[DecodeRow], best: bool) -> tuple[Array, list[int] | None]: ...


class Ops(Protocol):
    """One backend. Activations are float32 on a CPU, bfloat16 or float32 on a GPU: the backend decides in `embed`."""

    name: str

    device: torch.device | None  # where the tensors it is given must lie; None: it takes NumPy arrays
    streams: StreamKernels | None = None  # for several residual streams; None: streams.py computes them op by op

    def pack(self, parts: Sequence[Stored], bias: Array | None = None) -> Weight:
        """One (out, in) matrix made of `parts` stacked along the output, in the layout this backend multiplies best."""
        ...

    def pack_precisely(self, parts: Sequence[Stored], bias: Array | None = None) -> Weight:
        """The same, where the backend keeps other weights in fewer bits than it was given: this one is not rounded."""
        return self.pack(parts, bias)

    def pack_expert(self, parts: Sequence[Stored], bias: Array | None = None) -> Weight:
        """A matrix of an expert: a backend may have kernels for fewer formats of these."""
        return self.pack(parts, bias)

    def pack_outer(self, parts: Sequence[Stored], bias: Array | None = None) -> Weight:
        """The embedding or the head. A backend may keep these in more bits than other weights: every token depends on
        them."""
        return self.pack(parts, bias)

    def weight_bytes(self, weight: Weight) -> int:
        """Bytes that one product with `weight` reads."""
        ...

    def embed(self, table: Weight, tokens: Array, scale: float) -> Array:
        """Rows of the table, times scale: (T, hidden). The table may be the output head's matrix too."""
        ...

    def norm(self, x: Array, norm: Norm) -> Array: ...

    def linear(
        self, x: Array, weight: Weight, *, before: Norm | Gate | None = None, add_to: Array | None = None
    ) -> Array:
        """before(x) @ weight.T + bias. With `add_to` the result is added into it in place, and it is returned."""
        ...

    def experts(self, x: Array, norm: Norm, experts: ExpertSet, tokens: Array | None = None) -> Array:
        """The sum over a row's chosen experts of weight · down(gate(gate_up(norm(x)))), added in the order of choice:
        (T, hidden). An expert's weights are read once for all rows that chose it, and only if a row did.
        tokens: (T,), of the rows, for experts that a table chooses."""
        ...

    def attend(self, qkv: Array, attention: Attention, kv: KVLayer, batch: Batch, group: int) -> Array:
        """Norm and rotate q and k, write K and V to the cache, attend causally over the cached context.

        qkv: (T, (heads + 2·kv_heads) · head_dim), heads in the order q… k… v…; result: (T, heads · head_dim).
        """
        ...

    def attend_latent(
        self, q: Array, kv: Array, attention: LatentAttention, cache: KVLayer, batch: Batch, group: int
    ) -> Array:
        """Norm the latent, rotate, write both to the cache, attend causally over the cached latents.

        q: (T, heads · (plain_dim + rope_dim)); kv: (T, latent + rope_dim); result: (T, heads · value_dim).
        A head's key is (key_upᵀ · latent, rotated part), its value value_up · latent. Both are applied to the query and
        to the sum instead of to every cached token, in prefill and decode alike.
        """
        raise ValueError(f"the {self.name} backend has no latent attention")

    def attend_compressed(
        self, parts: CompressedRows, attention: CompressedAttention, cache: KVLayer, batch: Batch, group: int
    ) -> Array:
        """Norm, rotate and cache the keys, compress what the step completes, attend over the window, the entries and
        the sink in one softmax, rotate back: (T, heads · dim). See compressed.py."""
        raise ValueError(f"the {self.name} backend has no compressed attention")

    def argmax(self, logits: Array) -> Array:
        """(S, V) -> (S,) int64: the lowest index among equals, -1 for a row that holds a NaN."""
        ...

    # ---- what a backend may do better than op by op, with the same bits -------------------------------------------

    def read_in_order(self, weights: Sequence[Weight]) -> None:
        """Every step reads these, one after the other."""
        return

    def gated(self, x: Array, weight: Weight, norm: Norm, gate: Gate) -> Array | None:
        """gate(linear(x, weight, before=norm)); None where the gate is better left to the next product."""
        return None

    def add_experts(
        self, x: Array, norm: Norm, experts: ExpertSet, shared: tuple[Weight, Weight] | None
    ) -> Array | None:
        """`experts`, added to x in place; shared: gate_up and down of an expert that every row takes beside. None where
        that is better done op by op."""
        return None

    def fuse(
        self, layers: Sequence[FusedLayer], caches: Sequence[tuple[KVLayer, int]]
    ) -> Callable[[Array, Batch, Array | None], Array] | None:
        """One call for all these layers: x (T, hidden), the batch and the rows that go on after the last mixer (None:
        all). It may overwrite x. None: the backend runs them op by op.

        caches: for each layer its share of the pool and the group whose block table it follows.
        """
        return None

    def fuse_decode(
        self,
        layers: Sequence[FusedLayer],
        caches: Sequence[tuple[KVLayer, int]],
        table: Weight,
        scale: float,
        norm: Norm,
        head: Weight,
        tables: np.ndarray,
        spans: Sequence[int],
    ) -> Decode | None:
        """One call for a whole step of newest tokens, from the embedding to the head. None: the backend has none.

        tables: (groups, requests, columns), the engine's block tables, read anew in each step. spans: the tokens of a
        block, for each group.
        """
        return None
