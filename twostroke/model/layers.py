"""A loaded layer: a mixer and a feed, each with its weights packed for the backend.

Both describe a `Branch`, what is to be added to the residual stream; the addition itself is a step of its own in
transformer.py. `products` lists the same weights in the order in which a step reads them, for warm-up and read-ahead.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from twostroke.ops.interface import Array, Attention, Batch, ExpertSet, FusedLayer, Gate, KVLayer, Norm, Ops, Weight
from twostroke.ops.streams import StreamMix
from twostroke.record import Record


class Branch(NamedTuple):
    """What a part of a layer adds to the residual stream: norm(weight · before(inner)), or norm(inner) where that is
    the sum of several products."""

    inner: Array  # (T, …)
    weight: Weight | None
    before: Gate | None
    norm: Norm | None


def value_of(ops: Ops, branch: Branch) -> Array:
    """What a branch adds."""
    value = branch.inner
    if branch.weight is not None:
        value = ops.linear(value, branch.weight, before=branch.before)
    return value if branch.norm is None else ops.norm(value, branch.norm)


class PackedProduct(NamedTuple):
    """One product as a step runs it."""

    name: str
    weight: Weight
    before: Norm | Gate | None
    adds: bool  # its result is added to the residual stream in place


class Mixer(Protocol):
    def run(self, ops: Ops, x: Array, cache: KVLayer, batch: Batch, group: int) -> Branch: ...

    def products(self) -> tuple[PackedProduct, ...]: ...


class Feed(Protocol):
    def run(self, ops: Ops, x: Array, tokens: Array) -> Branch: ...

    def products(self) -> tuple[PackedProduct, ...]: ...


class Grouped(Record, eq=False):
    """GroupedArch with its weights."""

    norm: Norm
    qkv: Weight  # q, k and v stacked
    attention: Attention
    output: Weight
    out_norm: Norm | None = None  # before the residual add, where the family has one
    wide_norms: tuple[Norm, Norm] | None = None  # of all query heads together, of all key heads together

    def run(self, ops: Ops, x: Array, cache: KVLayer, batch: Batch, group: int) -> Branch:
        qkv = ops.linear(x, self.qkv, before=self.norm)
        start = 0
        for norm in self.wide_norms or ():
            part = slice(start, start + len(norm.weight))
            qkv[:, part] = ops.norm(qkv[:, part], norm)
            start = part.stop
        attended = ops.attend(qkv, self.attention, cache, batch, group)  # (T, heads · head_dim)
        return Branch(attended, self.output, None, self.out_norm)

    def products(self) -> tuple[PackedProduct, ...]:
        adds = self.out_norm is None
        return PackedProduct("qkv", self.qkv, self.norm, False), PackedProduct("output", self.output, None, adds)


class Dense(Record, eq=False):
    """DenseArch with its weights."""

    norm: Norm
    gate_up: Weight  # gate and up stacked
    gate: Gate
    down: Weight
    out_norm: Norm | None = None

    def run(self, ops: Ops, x: Array, tokens: Array) -> Branch:
        gated = ops.gated(x, self.gate_up, self.norm, self.gate)  # (T, ffn)
        if gated is not None:
            return Branch(gated, self.down, None, self.out_norm)
        inner = ops.linear(x, self.gate_up, before=self.norm)  # (T, 2 · ffn)
        return Branch(inner, self.down, self.gate, self.out_norm)

    def products(self) -> tuple[PackedProduct, ...]:
        adds = self.out_norm is None
        return PackedProduct("gate_up", self.gate_up, self.norm, False), PackedProduct(
            "down", self.down, self.gate, adds
        )


class SharedExpert(NamedTuple):
    """The expert that every token uses."""

    gate_up: Weight
    down: Weight


class Experts(Record, eq=False):
    """ExpertsArch with its weights."""

    norm: Norm
    experts: ExpertSet
    shared: SharedExpert | None = None
    out_norm: Norm | None = None

    def run(self, ops: Ops, x: Array, tokens: Array) -> Branch:
        total = ops.experts(x, self.norm, self.experts, tokens)
        if self.shared is not None:
            inner = ops.linear(x, self.shared.gate_up, before=self.norm)
            total = ops.linear(inner, self.shared.down, before=self.experts.gate, add_to=total)
        return Branch(total, None, None, self.out_norm)

    def added(self, ops: Ops, x: Array) -> Array | None:
        """x with all of it added, where the backend does that at once."""
        return None if self.out_norm is not None else ops.add_experts(x, self.norm, self.experts, self.shared)

    def chosen_bytes(self, ops: Ops) -> int:
        """Bytes of the experts that one row chooses."""
        one = ops.weight_bytes(self.experts.gate_up[0]) + ops.weight_bytes(self.experts.down[0])
        return self.experts.routing.chosen * one

    def products(self) -> tuple[PackedProduct, ...]:
        """What every step reads: an expert's weights are read only where a row chooses it."""
        found = [PackedProduct("router", self.experts.router, self.norm, False)]
        if self.shared is not None:
            found.append(PackedProduct("shared_gate_up", self.shared.gate_up, self.norm, False))
            found.append(PackedProduct("shared_down", self.shared.down, self.experts.gate, True))
        return tuple(found)


class Layer(Record, eq=False):
    mixer: Mixer
    feed: Feed
    streams: tuple[StreamMix, StreamMix] | None = None  # of mixer and feed, where there are several residual streams

    def products(self) -> tuple[PackedProduct, ...]:
        return (*self.mixer.products(), *self.feed.products())

    def fused(self) -> FusedLayer | None:
        """The layer for a backend that runs whole layers in one call; None for other kinds of mixers and feeds."""
        mixer, feed = self.mixer, self.feed
        if self.streams is not None or not (isinstance(mixer, Grouped) and isinstance(feed, Dense | Experts)):
            return None
        experts = feed.experts if isinstance(feed, Experts) else None
        if experts is not None and experts.table is not None:
            return None
        always = feed.shared if isinstance(feed, Experts) else feed
        queries, keys = mixer.wide_norms or (None, None)
        return FusedLayer(
            mixer.norm, mixer.qkv, mixer.attention, mixer.output, mixer.out_norm,
            feed.norm,
            None if always is None else always.gate_up,
            feed.experts.gate if isinstance(feed, Experts) else feed.gate,
            None if always is None else always.down,
            feed.out_norm, experts, queries, keys,
        )  # fmt: skip
