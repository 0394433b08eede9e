"""The forward pass of every family: embedding, layers, final norm, head. What differs between families is in `Arch`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from weakref import WeakKeyDictionary

import numpy as np

from twostroke.kv.storage import KVStorage
from twostroke.model.arch import Arch
from twostroke.model.layers import Branch, Experts, Layer, PackedProduct, value_of
from twostroke.model.streams import streams_run
from twostroke.ops.interface import Array, Batch, Decode, FusedLayer, Norm, Ops, Weight
from twostroke.ops.streams import StreamMix, collapse_last, spread

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
        return deque(self.layer_by_layer(batch, kv), maxlen=1)[0]

    def layer_by_layer(self, batch: Batch, kv: KVStorage) -> Iterator[Array]:
        """`forward`, with a pause after each of its calls: the rows so far, and last what `forward` returns."""
        x = self.ops.embed(self.embedding, batch.tokens, self.arch.embedding_scale)  # (T, hidden)
        if self.arch.streams > 1:
            x = spread(x, self.arch.streams)  # (T, streams · hidden)
        runs = self._runs.get(kv)
        if runs is None:
            runs = self._runs[kv] = self._make_runs(kv)
        for run in runs[:-1]:
            x = run(x, batch, None)
            yield x
        x = runs[-1](x, batch, batch.logit_rows)  # after the last mixer only the rows asked for
        yield x if self.head_streams is None else collapse_last(self.ops, x, self.head_streams)

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
        out = self.narrow_logits(hidden)
        return out if isinstance(out, np.ndarray) else out.float()

    def narrow_logits(self, hidden: Array) -> Array:
        """The same numbers, in the type in which the backend computes them."""
        out = self.ops.linear(hidden, self.head, before=self.final_norm)
        cap = self.arch.logit_softcap
        if not cap:
            return out
        in_numpy = isinstance(out, np.ndarray)
        if not in_numpy:
            out = out.float()
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
