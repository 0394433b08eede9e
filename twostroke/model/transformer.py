"""The forward pass of every family: embedding, layers, final norm, head. What differs between families is in `Arch`."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from twostroke.kv.storage import KVStorage
from twostroke.model.arch import Arch, Rope
from twostroke.ops.arrays import placed
from twostroke.ops.interface import (
    Array,
    Batch,
    ChainsKernels,
    Gate,
    KVLayer,
    Layer,
    Norm,
    Ops,
    RopeTable,
    RunsLayers,
    Weight,
)

if TYPE_CHECKING:
    import torch

ANGLES = 1 << 20  # computed at a time


class Transformer:
    """A model on a device. Holds parameters and nothing else: what changes from step to step is an argument."""

    def __init__(
        self,
        arch: Arch,
        ops: Ops,
        *,
        embedding: Weight,
        layers: Sequence[Layer],
        final_norm: Norm,
        head: Weight,
        max_positions: int,
    ):
        self.arch, self.ops = arch, ops
        self.embedding, self.layers, self.final_norm, self.head = embedding, tuple(layers), final_norm, head
        self.max_positions = max_positions  # length of the rotary tables
        self.gate = Gate(arch.activation)
        self._whole = ops if isinstance(ops, RunsLayers) else None  # a backend that runs all layers at once
        self._chain = ops if isinstance(ops, ChainsKernels) else None
        if self._chain is not None:
            self._chain.read_in_order(self.read_in_order())
        self._plans: WeakKeyDictionary[KVStorage, Any] = WeakKeyDictionary()  # of such a backend

    def forward(self, batch: Batch, kv: KVStorage) -> Array:
        """Compute the batch's rows, leaving K and V in `kv`; the hidden rows batch.logit_rows (S, hidden) come back."""
        x = self.ops.embed(self.embedding, batch.tokens, self.arch.embedding_scale)  # (T, hidden)
        if self._whole is not None:
            return self._whole.run_layers(self._plan(self._whole, kv), x, batch)
        return self._run_layers(x, batch, kv)

    def _plan(self, ops: RunsLayers, kv: KVStorage) -> Any:
        plan = self._plans.get(kv)
        if plan is None:
            caches = [kv.layer(index) for index in range(len(self.layers))]
            plan = self._plans[kv] = ops.plan_layers(self.layers, caches, self.gate)
        return plan

    def _run_layers(self, x: Array, batch: Batch, kv: KVStorage) -> Array:
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            cache, group = kv.layer(index)
            attended = self._attend(x, layer, cache, batch, group)
            if index == last:  # from here on rows do not meet again: only those somebody asked for go on
                x, attended = x[batch.logit_rows], attended[batch.logit_rows]
            x = self._residual(x, attended, layer.output, None, layer.attention_out_norm)
            x = self._feed(x, layer)
        return x

    def _feed(self, x: Array, layer: Layer) -> Array:
        gated = self._chain.gated(x, layer.gate_up, layer.feed_norm, self.gate) if self._chain is not None else None
        if gated is not None:  # (T, ffn)
            return self._residual(x, gated, layer.down, None, layer.feed_out_norm)
        inner = self.ops.linear(x, layer.gate_up, before=layer.feed_norm)  # (T, 2 · ffn)
        return self._residual(x, inner, layer.down, self.gate, layer.feed_out_norm)

    def logits(self, hidden: Array) -> Array:
        """(S, hidden) -> (S, vocab) float32."""
        out = self.ops.linear(hidden, self.head, before=self.final_norm)
        in_numpy = isinstance(out, np.ndarray)
        if not in_numpy:
            out = out.float()
        if cap := self.arch.logit_softcap:
            out /= cap
            np.tanh(out, out=out) if in_numpy else out.tanh_()
            out *= cap
        return out

    def weight_bytes(self) -> int:
        """Bytes of weights that a decode step reads: every layer and the head."""
        return sum(self.ops.weight_bytes(weight) for weight in self.read_in_order())

    def read_in_order(self) -> list[Weight]:
        """What every step reads."""
        mine = [w for layer in self.layers for w in (layer.qkv, layer.output, layer.gate_up, layer.down)]
        return [*mine, self.head]

    def _attend(self, x: Array, layer: Layer, cache: KVLayer, batch: Batch, group: int) -> Array:
        qkv = self.ops.linear(x, layer.qkv, before=layer.attention_norm)
        return self.ops.attend(qkv, layer.attention, cache, batch, group)

    def _residual(self, x: Array, inner: Array, weight: Weight, before: Gate | None, after: Norm | None) -> Array:
        """x + weight · before(inner), with a norm before the addition where the family has one."""
        if after is None:
            return self.ops.linear(inner, weight, before=before, add_to=x)
        return x + self.ops.norm(self.ops.linear(inner, weight, before=before), after)


def rope_table(rope: Rope, positions: int, device: torch.device | None) -> RopeTable:
    """cos and sin of every position below `positions`.

    Angles are rounded to float32 as transformers does, in training too: at position 10,000 that is an error of about
    0.001 radians, and a model must be run with the angles it learnt.
    """
    frequencies = np.asarray(rope.frequencies, np.float32)
    cos, sin = (np.empty((positions, len(frequencies)), np.float32) for _ in "cs")
    step = max(1, ANGLES // len(frequencies))

    def fill(first: int) -> None:
        places = np.arange(first, min(first + step, positions), dtype=np.float32)
        angles = np.outer(places, frequencies).astype(np.float64)
        for table, function in ((cos, np.cos), (sin, np.sin)):
            np.multiply(function(angles), rope.factor, out=table[first : first + step], casting="same_kind")

    with ThreadPoolExecutor() as pool:
        list(pool.map(fill, range(0, positions, step)))
    return RopeTable(placed(cos, device), placed(sin, device))
