"""A layer over several residual streams, op by op: each part reads a mixture of them and adds to all."""

from __future__ import annotations

from collections.abc import Callable

from twostroke.model.layers import Layer, value_of
from twostroke.ops.interface import Array, Batch, KVLayer, Ops
from twostroke.ops.streams import collapse, expand


def streams_run(ops: Ops, layer: Layer, cache: KVLayer, group: int) -> Callable[[Array, Batch, Array | None], Array]:
    """The layer as a call: rows (T, streams · hidden), the batch, the rows that go on after the mixer (None: all)."""
    assert layer.streams is not None
    mixer_mix, feed_mix = layer.streams
    streams = mixer_mix.streams

    def run(x: Array, batch: Batch, rows: Array | None) -> Array:
        read, weights = collapse(ops, x, mixer_mix)
        branch = layer.mixer.run(ops, read, cache, batch, group)
        tokens = batch.tokens
        if rows is not None:
            x, weights, tokens = x[rows], weights[rows], tokens[rows]
            branch = branch._replace(inner=branch.inner[rows])
        x = expand(ops, x, value_of(ops, branch), weights, streams)
        read, weights = collapse(ops, x, feed_mix)
        return expand(ops, x, value_of(ops, layer.feed.run(ops, read, tokens)), weights, streams)

    return run
