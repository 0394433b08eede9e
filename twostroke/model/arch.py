"""What a checkpoint is, as data: layers, shapes, positions, windows. Torch-free, as planning and costing are.

A family (families.py) turns config.json or GGUF keys into an `Arch`; `Transformer` runs any `Arch`. Quirks of a
checkpoint end in families.py and names.py and never reach the forward pass.

A layer is a mixer (tokens read each other: `GroupedArch`, or latent.py's) and a feed (each token for itself:
`DenseArch`, or `ExpertsArch` of which a token uses a few). Each knows its products, its FLOPs and what it caches;
memory sizing, scheduling, metrics and the cost model read only that.
"""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from typing import Any, Protocol

from twostroke.model.entry import KVEntry, KVPart
from twostroke.ops.interface import KV_SCALE_BYTES, Activation, Routing
from twostroke.record import Record, replace


class Rope(Record):
    """Rotary positions with every kind of scaling already folded into the frequencies."""

    frequencies: tuple[float, ...]  # radians per position, one for each rotated pair
    factor: float = 1.0  # multiplies cos and sin (YaRN, longrope)

    @property
    def dim(self) -> int:
        return 2 * len(self.frequencies)


class Product(Record):
    """One matrix that a step multiplies its rows with, or several of one shape of which each row uses some."""

    name: str
    inputs: int
    outputs: int
    bias: bool = False
    matrices: int = 1
    used: int = 1  # by one row

    @property
    def weights(self) -> int:
        """Weights of all matrices."""
        return self.inputs * self.outputs * self.matrices

    @property
    def row_weights(self) -> int:
        """Weights that one row is multiplied with."""
        return self.inputs * self.outputs * self.used

    def read(self, rows: int) -> float:
        """Weights that a step of so many rows reads. With several matrices it is the expected number: each row chooses
        its own, all equally likely."""
        missed = (1 - self.used / self.matrices) ** rows  # probability that no row chose a given matrix
        return self.weights * (1 - missed) if rows else 0.0


class MixerArch(Protocol):
    """How tokens read each other."""

    @property
    def kind(self) -> str: ...

    def products(self, hidden: int) -> tuple[Product, ...]: ...

    def attention_flops(self, start: int, count: int) -> int:
        """FLOPs beside the products: `count` tokens after `start` cached ones."""
        ...

    def entries(self, kv_dtype: str) -> tuple[KVEntry, ...]:
        """What each layer caches: one kind, or several."""
        ...

    def stores(self, kv_dtype: str) -> bool:
        """Whether its entries can be kept in this format."""
        ...

    def small_weights(self) -> int:
        """Weights of norms and sinks inside the mixer."""
        ...


class FeedArch(Protocol):
    """What each token does by itself."""

    @property
    def kind(self) -> str: ...

    def products(self, hidden: int) -> tuple[Product, ...]: ...


class GroupedArch(Record):
    """Attention in which neighbouring query heads share a K/V head: MHA, GQA and MQA."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None  # tokens a token sees, itself included; None: all before it
    rope: Rope | None = None  # None: no positions (NoPE)
    scale: float | None = None  # multiplies q · k; None: head_dim ** -0.5
    softcap: float = 0.0
    qk_norm: bool = False  # RMS norm of each query and key head
    wide_qk_norm: bool = False  # RMS norm of all query heads together, and of all key heads
    qkv_bias: bool = False
    output_bias: bool = False
    sinks: bool = False  # each query head has a logit of its own in the softmax, without a value

    @property
    def kind(self) -> str:
        return "grouped"

    @property
    def factor(self) -> float:
        """What q · k is multiplied with."""
        return self.scale if self.scale is not None else float(self.head_dim) ** -0.5

    @property
    def width(self) -> int:
        """Numbers of all query heads together."""
        return self.heads * self.head_dim

    def products(self, hidden: int) -> tuple[Product, ...]:
        stacked = self.width + 2 * self.kv_heads * self.head_dim
        return (
            Product("qkv", hidden, stacked, self.qkv_bias),
            Product("output", self.width, hidden, self.output_bias),
        )

    def attention_flops(self, start: int, count: int) -> int:
        """q·k and p·v."""
        return 4 * seen_pairs(start, count, self.window) * self.width

    def entries(self, kv_dtype: str) -> tuple[KVEntry, ...]:
        """K and V of one token, with a scale for each head in formats that have scales."""
        parts = [KVPart(name, self.kv_heads, self.head_dim, kv_dtype) for name in ("keys", "values")]
        if kv_dtype in KV_SCALE_BYTES:
            parts += [KVPart(name, self.kv_heads, 1, "float32") for name in ("key_scales", "value_scales")]
        return (KVEntry(tuple(parts), self.window),)

    def stores(self, kv_dtype: str) -> bool:
        return True

    def small_weights(self) -> int:
        sinks = self.heads if self.sinks else 0
        if self.wide_qk_norm:
            return sinks + self.width + self.kv_heads * self.head_dim
        return sinks + (2 * self.head_dim if self.qk_norm else 0)


class DenseArch(Record):
    """A gated feed-forward network: down · (activation(gate · x) · (up · x))."""

    width: int
    activation: Activation = "silu"

    @property
    def kind(self) -> str:
        return "dense"

    def products(self, hidden: int) -> tuple[Product, ...]:
        return Product("gate_up", hidden, 2 * self.width), Product("down", self.width, hidden)


class ExpertsArch(Record):
    """Many gated networks of which each token uses a few, chosen by a router, and perhaps one that every token uses."""

    routing: Routing
    width: int  # of one expert
    activation: Activation = "silu"
    shared: int = 0  # width of the expert that every token uses; 0: there is none
    corrected: bool = False  # the choice adds a learnt number to each expert's score
    router_bias: bool = False
    expert_bias: bool = False
    by_token: bool = False  # a table names the experts of each token; the scores only weigh them

    @property
    def kind(self) -> str:
        return "experts"

    def products(self, hidden: int) -> tuple[Product, ...]:
        count, used, bias = self.routing.experts, self.routing.chosen, self.expert_bias
        found = [
            Product("router", hidden, count, self.router_bias),
            Product("gate_up", hidden, 2 * self.width, bias, count, used),
            Product("down", self.width, hidden, bias, count, used),
        ]
        if self.shared:
            found += [Product("shared_gate_up", hidden, 2 * self.shared), Product("shared_down", self.shared, hidden)]
        return tuple(found)


class LayerArch(Record):
    mixer: MixerArch
    feed: FeedArch
    out_norms: bool = False  # norms after mixer and feed too, before each residual add

    def products(self, hidden: int) -> tuple[Product, ...]:
        """The products of the layer in the order in which a step runs them."""
        return (*self.mixer.products(hidden), *self.feed.products(hidden))


class Arch(Record, dict=True):
    family: str
    vocab: int  # rows of the embedding, the width of the logits
    hidden: int
    layers: tuple[LayerArch, ...]
    max_positions: int  # context the checkpoint was made for
    norm_eps: float
    logit_softcap: float = 0.0
    embedding_scale: float = 1.0
    tied_head: bool = False
    streams: int = 1  # residual streams; several are mixed anew at each part of a layer
    stream_rounds: int = 0  # of making the matrix that mixes them doubly stochastic
    stream_eps: float = 1e-6

    # ---- what it costs: computed once, because every plan asks ---------------------------------------------------

    @cached_property
    def mixers(self) -> tuple[tuple[MixerArch, int], ...]:
        """Each mixer, and how many layers have it."""
        return tuple(Counter(layer.mixer for layer in self.layers).items())

    @cached_property
    def products(self) -> tuple[Product, ...]:
        """The products of all layers in the order in which a step runs them."""
        found = {layer: layer.products(self.hidden) for layer in set(self.layers)}
        return tuple(product for layer in self.layers for product in found[layer])

    @cached_property
    def layer_weights(self) -> int:
        """Matrix weights of all layers."""
        return sum(product.weights for product in self.products)

    @cached_property
    def expert_products(self) -> tuple[Product, ...]:
        """The products of which each row uses some matrices."""
        return tuple(product for product in self.products if product.matrices > 1)

    @cached_property
    def expert_weights(self) -> int:
        return sum(product.weights for product in self.expert_products)

    @cached_property
    def row_weights(self) -> int:
        """The weights of the layers' products that one row is multiplied with."""
        return sum(product.row_weights for product in self.products)

    @property
    def head_weights(self) -> int:
        return self.hidden * self.vocab

    @property
    def weights(self) -> int:
        """Matrix weights of the model; a tied head counts once."""
        return self.layer_weights + self.head_weights * (1 if self.tied_head else 2)

    @property
    def used_weights(self) -> int:
        """The weights that one token uses."""
        return self.weights - self.layer_weights + self.row_weights

    @property
    def parameters(self) -> int:
        """Every weight of the checkpoint, norms and biases included."""
        norms = sum((4 if layer.out_norms else 2) * self.hidden + layer.mixer.small_weights() for layer in self.layers)
        biases = sum(product.outputs * product.matrices for product in self.products if product.bias)
        biases += sum(
            layer.feed.routing.experts
            for layer in self.layers
            if isinstance(layer.feed, ExpertsArch) and layer.feed.corrected
        )
        return self.weights + norms + biases + self.hidden + self.stream_weights

    @property
    def stream_weights(self) -> int:
        """The weights that read and mix several residual streams."""
        if self.streams == 1:
            return 0
        parts = 2 * len(self.layers) * self.streams * (2 + self.streams)
        return (parts + self.streams) * (self.streams * self.hidden + 1) + 6 * len(self.layers) + 1

    def linear_flops(self, tokens: int, logit_rows: int) -> int:
        return 2 * (tokens * (self.row_weights + self.stream_weights) + logit_rows * self.head_weights)

    def read_share(self, rows: int) -> float:
        """The part of the layers' weights that a step of so many rows is expected to read; 1 without experts."""
        if not rows:
            return 0.0
        return 1.0 - self.expert_weights / self.layer_weights * (1 - self.expert_share(rows))

    def expert_share(self, rows: int) -> float:
        """The part of the experts' weights that a step of so many rows is expected to read; 1 without experts."""
        if not self.expert_weights:
            return 1.0
        return sum(product.read(rows) for product in self.expert_products) / self.expert_weights

    def attention_flops(self, start: int, count: int) -> int:
        """q·k and p·v of `count` tokens after `start` cached ones, over all layers, windows respected."""
        return sum(layers * mixer.attention_flops(start, count) for mixer, layers in self.mixers)

    def with_mixers(self, **changes: Any) -> Arch:
        """The same with other values in every mixer."""
        return replace(self, layers=tuple(replace(one, mixer=replace(one.mixer, **changes)) for one in self.layers))


def seen_pairs(start: int, count: int, window: int | None) -> int:
    """How many (query, key) pairs `count` causal queries starting at position `start` make."""
    full = count * start + count * (count + 1) // 2
    if window is None or start + count <= window:
        return full
    short = max(0, min(count, window - start))  # queries that do not yet fill the window
    return short * start + short * (short + 1) // 2 + (count - short) * window
