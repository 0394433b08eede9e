"""The forward pass of every family: embedding, layers, final norm, head. What differs between families is in `Arch`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np

from twostroke.kv.storage import KVStorage
from twostroke.model.arch import Arch, Rope
from twostroke.model.layers import Branch, Experts, Layer, PackedProduct, value_of
from twostroke.model.streams import streams_run
from twostroke.ops.arrays import placed
from twostroke.ops.interface import Array, Batch, Decode, FusedLayer, Norm, Ops, RopeTable, Weight
from twostroke.ops.streams import StreamMix, collapse_last, spread

if TYPE_CHECKING:
    import torch

ANGLES = 1 << 20  # computed at a time

LayerRun = Callable[[Array, Batch, Array | None], Array]  # rows through some layers; the last argument: rows that go on


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
        head_streams: StreamMix | None = None,
    ):
        """head_streams: how the head reads several residual streams."""
        self.arch, self.ops = arch, ops
        self.embedding, self.layers, self.final_norm, self.head = embedding, tuple(layers), final_norm, head
        self.max_positions = max_positions  # length of the rotary tables
        self.head_streams = head_streams
        ops.read_in_order([product.weight for product in self.products()])
        self._runs: WeakKeyDictionary[KVStorage, list[LayerRun]] = WeakKeyDictionary()

    def products(self) -> list[PackedProduct]:
        """What every step multiplies with, in order."""
        return [*(product for layer in self.layers for product in layer.products()), self.head_product]

    @property
    def head_product(self) -> PackedProduct:
        return PackedProduct("head", self.head, self.final_norm, False)

    def weight_bytes(self) -> int:
        """Bytes of weights that a step of one row reads: every layer, of experts the chosen ones, and the head."""
        always = sum(self.ops.weight_bytes(product.weight) for product in self.products())
        return always + sum(
            layer.feed.chosen_bytes(self.ops) for layer in self.layers if isinstance(layer.feed, Experts)
        )

    # ---- a step ----------------------------------------------------------------------------------------------------

    def forward(self, batch: Batch, kv: KVStorage) -> Array:
        """Compute the batch's rows and write their K and V to `kv`. Returns the rows batch.logit_rows, (S, hidden)."""
        x = self.ops.embed(self.embedding, batch.tokens, self.arch.embedding_scale)  # (T, hidden)
        if self.arch.streams > 1:
            x = spread(x, self.arch.streams)  # (T, streams · hidden)
        runs = self._runs.get(kv)
        if runs is None:
            runs = self._runs[kv] = self._make_runs(kv)
        for run in runs[:-1]:
            x = run(x, batch, None)
        x = runs[-1](x, batch, batch.logit_rows)  # after the last mixer only the rows asked for
        return x if self.head_streams is None else collapse_last(self.ops, x, self.head_streams)

    def decoder(self, kv: KVStorage, tables: np.ndarray) -> Decode | None:
        """A whole step of newest tokens as one call; None where the backend or the architecture has no such call.

        tables: (groups, rows, columns), the block tables of all running requests.
        """
        layers = [fused for layer in self.layers if (fused := layer.fused()) is not None]
        groups = kv.layout.groups
        whole = len(layers) == len(self.layers) and all(group.entry.tokens == 1 for group in groups)
        if not whole or self.arch.streams > 1 or self.arch.logit_softcap:
            return None
        return self.ops.fuse_decode(
            layers, [kv.layer(index) for index in range(len(layers))], self.embedding, self.arch.embedding_scale,
            self.final_norm, self.head, tables, [group.span for group in groups],
        )  # fmt: skip

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

    def _make_runs(self, kv: KVStorage) -> list[LayerRun]:
        """The layers as calls: one for each run of layers that the backend fuses, one for each other layer."""
        runs: list[LayerRun] = []
        forms = [(index, layer.fused()) for index, layer in enumerate(self.layers)]
        for plain, stretch in groupby(forms, key=lambda form: form[1] is not None):
            found = list(stretch)
            whole = self._fuse(found, kv) if plain else None
            runs += [whole] if whole is not None else [self._layer_run(index, kv) for index, _ in found]
        return runs

    def _fuse(self, stretch: list[tuple[int, FusedLayer | None]], kv: KVStorage) -> LayerRun | None:
        layers = [layer for _, layer in stretch if layer is not None]
        return self.ops.fuse(layers, [kv.layer(index) for index, _ in stretch])

    def _layer_run(self, index: int, kv: KVStorage) -> LayerRun:
        """One layer, op by op."""
        layer, (cache, group) = self.layers[index], kv.layer(index)
        if layer.streams is not None:
            return streams_run(self.ops, layer, cache, group)

        def run(x: Array, batch: Batch, rows: Array | None) -> Array:
            branch = layer.mixer.run(self.ops, x, cache, batch, group)
            if rows is not None:
                x, branch = x[rows], branch._replace(inner=branch.inner[rows])
            x = self._add(x, branch)
            done = layer.feed.added(self.ops, x) if isinstance(layer.feed, Experts) else None
            if done is not None:
                return done
            tokens = batch.tokens if rows is None else batch.tokens[rows]
            return self._add(x, layer.feed.run(self.ops, x, tokens))

        return run

    def _add(self, x: Array, branch: Branch) -> Array:
        """The residual add."""
        if branch.norm is None and branch.weight is not None:
            return self.ops.linear(branch.inner, branch.weight, before=branch.before, add_to=x)
        return x + value_of(self.ops, branch)


def rope_table(rope: Rope, positions: int, device: torch.device | None) -> RopeTable:
    """cos and sin of every position below `positions`.

    Angles are rounded to float32 as transformers does, in training too: at position 10,000 that is an error of about
    0.001 radians, and a model must be run with the angles it learnt. The factor is rounded to float32 too: a GGUF file
    stores it so, and both files of a model must give the same table.
    """
    frequencies, factor = np.asarray(rope.frequencies, np.float32), float(np.float32(rope.factor))
    cos, sin = (np.empty((positions, len(frequencies)), np.float32) for _ in "cs")
    step = max(1, ANGLES // len(frequencies))

    def fill(first: int) -> None:
        places = np.arange(first, min(first + step, positions), dtype=np.float32)
        angles = np.outer(places, frequencies).astype(np.float64)
        for table, function in ((cos, np.cos), (sin, np.sin)):
            np.multiply(function(angles), factor, out=table[first : first + step], casting="same_kind")

    with ThreadPoolExecutor() as pool:
        list(pool.map(fill, range(0, positions, step)))
    return RopeTable(placed(cos, device), placed(sin, device))
