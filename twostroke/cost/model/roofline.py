"""How long a step takes: each term is bytes over bandwidth or FLOPs over compute, whichever is longer.

    step = overhead + requests·(each) + linear(rows) + head(logit rows) + Σ chunks attention + Σ streams attention

    linear    max(weight bytes / bandwidth, 2·weights·rows / compute) · slowdown(rows)
              few rows (decode): the weights are read once for all rows, so the bytes set the time
              many rows (prefill): the FLOPs set the time
              experts: the bytes are those of the experts that the rows are expected to choose, which grow with the
              rows; the FLOPs count the experts of each row alone
    chunk     attention FLOPs / attention rate, quadratic in the prompt, plus K and V before it / bandwidth. On a GPU
              short chunks have their own rate, and a least time that grows with the keys before them (tiles.py)
    stream    K and V of its context / bandwidth: every token reads all before it. Latent attention reads few bytes and
              computes with all heads on each, so its FLOPs / attention rate may be longer

This gives the two strokes: in 16 bits one stream does about 1 FLOP for each byte it reads, a prompt of n tokens n times
that. The ridge, compute / bandwidth, separates memory-bound from compute-bound steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import log2

import numpy as np

from twostroke.cost.model.rates import HOST_LINK, LINK_LATENCY, Rates
from twostroke.cost.model.tiles import attend, rows_run
from twostroke.cost.model.weight_formats import weight_format
from twostroke.kv.layout import KVLayout, make_layout
from twostroke.model.arch import Arch
from twostroke.model.latent import LatentArch


@dataclass(frozen=True, slots=True)
class ModelCost:
    """Bytes of a model's weights, by when a step reads them."""

    arch: Arch
    layer_bytes: float  # of the matrices of all layers: read in every step, of experts those that are chosen
    expert_bytes: float  # of these, the experts'
    head_bytes: float  # of the output matrix: read in every step that samples
    other_bytes: float  # in memory but hardly read: input embeddings, norms
    precision: str  # of the weights; it selects the peak rate of the products

    @property
    def bytes(self) -> int:
        return round(self.layer_bytes + self.head_bytes + self.other_bytes)

    @property
    def head_weights(self) -> int:
        return self.arch.head_weights

    @property
    def row_weights(self) -> int:
        """Weights of the layers that one row is multiplied with."""
        return self.arch.row_weights

    def read_bytes(self, rows: int) -> float:
        """Bytes of the layers' matrices that a step of so many rows reads."""
        if not rows:
            return 0.0
        return self.layer_bytes - self.expert_bytes * (1 - self.arch.expert_share(rows))


def model_cost(
    arch: Arch, precision: str = "bfloat16", stored_bytes: int | None = None, kind: str = "cpu"
) -> ModelCost:
    """The cost from the precision of the weights as this kind of device stores them. A checkpoint's bytes are shared
    out among the parts as that precision does it."""
    form = weight_format(precision, kind)
    rows = sum(product.outputs * product.matrices for product in arch.products)
    expert_rows = sum(product.outputs * product.matrices for product in arch.expert_products)
    experts = arch.expert_weights * form.experts + expert_rows * form.row_scale
    layers = (arch.layer_weights - arch.expert_weights) * form.layers + (rows - expert_rows) * form.row_scale + experts
    head = arch.head_weights * form.outer + arch.vocab * form.outer_row_scale
    other = (arch.parameters - arch.weights) * form.small + (0.0 if arch.tied_head else head)
    fill = 1.0 if stored_bytes is None else stored_bytes / (layers + head + other)
    return ModelCost(arch, layers * fill, experts * fill, head * fill, other * fill, precision)


class Roofline:
    """Predicts the steps of one worker. Its `count` devices share every product and all-reduce twice a layer."""

    def __init__(self, model: ModelCost, layout: KVLayout, rates: Rates, count: int = 1, link: float = 25e9):
        self.model = model
        self.layout = layout
        self.rates = rates
        self.count = count
        self.link = link
        self.stored = cached_bytes(layout)
        # Bytes of entries for attention times: their own, or those they would have in 16 bits.
        self.charged = self.stored if rates.kv_by_bytes else cached_bytes(make_layout(model.arch, "bfloat16"))
        self.charged = with_latent_flops(self.charged, model.arch, rates)
        self._rows = [log2(rows) for rows, _ in rates.slowdown]
        self._factors = [factor for _, factor in rates.slowdown]
        self._linear_cache: dict[tuple[int, int, bool], float] = {}

    # ---- terms -----------------------------------------------------------------------------------------------------

    def product(self, rows: int, size: float, weights: int) -> float:
        """Seconds to multiply `rows` rows with `weights` weights stored in `size` bytes."""
        return roof(self.rates, rows, size, weights) * self.slowdown(rows)

    def slowdown(self, rows: int) -> float:
        """Time of products of so many rows over the roofline's: interpolated over log2(rows)."""
        if not self._rows:
            return 1.0
        return float(np.interp(log2(max(1, rows)), self._rows, self._factors))

    def rows_run(self, rows: int, logit_rows: int, prompts: bool) -> tuple[int, int]:
        """Rows that a step multiplies, and rows of logits that it makes; on a GPU padding included."""
        if self.rates.tiles is None or not rows:
            return rows, logit_rows
        run = rows_run(rows, prompts)
        return run, logit_rows if prompts else run

    def linear(self, rows: int, logit_rows: int, prompts: bool = False) -> float:
        key = (rows, logit_rows, prompts)
        found = self._linear_cache.get(key)
        if found is None:
            model = self.model
            run, sampled = self.rows_run(rows, logit_rows, prompts)
            found = self.product(run, model.read_bytes(run), model.row_weights) if run else 0.0
            if logit_rows:
                found += self.product(sampled, model.head_bytes, model.head_weights)
            found += self._exchange(run)
            self._linear_cache[key] = found
        return found

    def _exchange(self, rows: int) -> float:
        """All-reduces of a worker with several devices: two in each layer, 16-bit activations."""
        if self.count < 2 or not rows:
            return 0.0
        size = 2 * rows * self.model.arch.hidden * 2 * (self.count - 1) / self.count
        return 2 * len(self.model.arch.layers) * (LINK_LATENCY + size / self.link)

    def stream_bytes(self, contexts: Iterable[int]) -> float:
        """Bytes of K and V that streams with these contexts read; a context includes the newest token."""
        return read_bytes(self.stored, contexts)

    def attended(self, contexts: Iterable[int]) -> float:
        """The same bytes as attention times count them."""
        return read_bytes(self.charged, contexts)

    def prompts(self, chunks: Sequence[tuple[int, int]], rows: int) -> float:
        """Seconds of attention for the prompt chunks in a step of so many rows: products, K and V read once."""
        rates, arch = self.rates, self.model.arch
        read = self.attended(start + count for start, count in chunks) / rates.kv_bandwidth
        if rates.tiles is None:
            return sum(arch.attention_flops(*chunk) for chunk in chunks) / rates.attention_compute + read
        dense, tiled, walk, merged = attend(arch, chunks, rows, self.count)
        in_tiles = max(tiled / rates.tiles.compute, walk * rates.tiles.key_seconds)
        return dense / rates.attention_compute + in_tiles + merged / rates.kv_bandwidth + read

    # ---- whole steps -----------------------------------------------------------------------------------------------

    def step(
        self,
        chunks: Sequence[tuple[int, int]],
        contexts: Sequence[int],
        logit_rows: int,
        more_streams: int = 0,
        more_context: int = 0,
    ) -> float:
        """Seconds of a step: prompt chunks as (start, count), streams by the context each attends to. `more_streams`
        counts further streams, of which only the sum of contexts is given; models with windows need each context."""
        rates = self.rates
        streams = len(contexts) + more_streams
        rows = streams + sum(count for _, count in chunks)
        seconds = rates.step_seconds + (len(chunks) + streams) * rates.request_seconds
        attended = self.attended(contexts) + self.attended((more_context,))
        seconds += self.linear(rows, logit_rows + more_streams, bool(chunks)) + attended / rates.kv_bandwidth
        return max(seconds + self.prompts(chunks, rows), rates.chunk_seconds) if chunks else seconds

    def decode_run(self, contexts: Sequence[int], steps: int) -> np.ndarray:
        """Seconds of each of `steps` consecutive steps in which the same streams write one token each."""
        streams = len(contexts)
        base = self.rates.step_seconds + streams * self.rates.request_seconds + self.linear(streams, streams)
        ahead = np.arange(steps, dtype=np.float64)
        seen = np.zeros(steps)
        for window, size in self.charged:
            if window is None:
                seen += size * (sum(contexts) + streams * ahead)
            else:
                deep = np.asarray(contexts, dtype=np.float64)[:, None] + ahead
                seen += size * np.minimum(deep, window).sum(axis=0)
        return base + seen / self.rates.kv_bandwidth

    def prefill_seconds(self, prompt: int, cached: int = 0, step_tokens: int | None = None) -> float:
        """One prompt without other requests, in steps of at most `step_tokens`."""
        seconds, start = 0.0, cached
        while start < prompt:
            count = min(prompt - start, step_tokens or prompt)
            seconds += self.step([(start, count)], [], int(start + count == prompt))
            start += count
        return seconds

    def decode_seconds(self, batch: int, context: int) -> float:
        """One step of `batch` streams with `context` tokens each: the TPOT of a batch without prompts."""
        return self.step([], [context] * batch, batch)

    def copies(self, blocks: int) -> float:
        """Seconds to copy so many KV blocks to the host's memory or back: over a card's link, or within the memory of
        a CPU, which reads and writes every byte."""
        link = self.rates.host_link or (self.rates.bandwidth / 2 if self.rates.tiles is None else HOST_LINK)
        return blocks * self.layout.block_bytes / link

    # ---- memory-bound or compute-bound -----------------------------------------------------------------------------

    def flops(self, chunks: Sequence[tuple[int, int]], contexts: Sequence[int], logit_rows: int) -> float:
        arch = self.model.arch
        rows = len(contexts) + sum(count for _, count in chunks)
        attention = sum(arch.attention_flops(start, count) for start, count in chunks)
        attention += sum(arch.attention_flops(context - 1, 1) for context in contexts)
        return float(arch.linear_flops(rows, logit_rows) + attention)

    def bytes(self, chunks: Sequence[tuple[int, int]], contexts: Sequence[int], logit_rows: int) -> float:
        """Weights once, K and V of every context once."""
        rows = len(contexts) + sum(count for _, count in chunks)
        weights = self.model.read_bytes(rows) + (self.model.head_bytes if logit_rows else 0.0)
        return weights + self.stream_bytes(contexts) + self.stream_bytes(start + count for start, count in chunks)

    def intensity(self, chunks: Sequence[tuple[int, int]], contexts: Sequence[int], logit_rows: int) -> float:
        """FLOPs per byte."""
        return self.flops(chunks, contexts, logit_rows) / self.bytes(chunks, contexts, logit_rows)

    @property
    def ridge(self) -> float:
        """Intensity above which a step is compute-bound, below which it is memory-bound."""
        return self.rates.compute / self.rates.bandwidth


def roof(rates: Rates, rows: int, size: float, weights: int) -> float:
    """Seconds of a product that reaches the bandwidth or the compute rate."""
    return max(size / rates.bandwidth, 2.0 * weights * rows / rates.compute)


def kv_bytes_per_token(layout: KVLayout) -> int:
    """Bytes that one more token takes in all layers, without regard to windows."""
    return round(layout.token_bytes)


def lasting_bytes(layout: KVLayout) -> float:
    """Bytes of one more token that stay as long as its request runs: in layers without a window."""
    kept = (group for group in layout.groups if group.window is None)
    return sum(len(group.layers) * group.entry.bytes / group.entry.tokens for group in kept)


def window_bytes(layout: KVLayout) -> int:
    """Bytes of a long request in layers with a window."""
    return sum(len(group.layers) * group.entry.bytes * group.window for group in layout.groups if group.window)


def cached_bytes(layout: KVLayout) -> tuple[tuple[int | None, float], ...]:
    """Bytes that a token has in the cache, of all the target's layers with the same window: (window, bytes)."""
    sizes: dict[int | None, float] = {}
    for group in layout.groups:
        if group.draft:
            continue
        for window, size in group.entry.reach():
            sizes[window] = sizes.get(window, 0.0) + len(group.layers) * size
    return tuple(sizes.items())


def with_latent_flops(
    cached: tuple[tuple[int | None, float], ...], arch: Arch, rates: Rates
) -> tuple[tuple[int | None, float], ...]:
    """The bytes of each cached token, more where computing with it takes longer than reading it."""
    more = 0.0
    for mixer, layers in arch.mixers:
        if isinstance(mixer, LatentArch):
            flops = mixer.attention_flops(1, 1) - mixer.attention_flops(0, 1)  # of one more cached token
            as_bytes = flops / rates.attention_compute * rates.kv_bandwidth
            more += layers * max(0.0, as_bytes - mixer.entries("bfloat16")[0].bytes)
    return tuple((window, size + more if window is None else size) for window, size in cached) if more else cached


def read_bytes(cached: tuple[tuple[int | None, float], ...], contexts: Iterable[int]) -> float:
    """Bytes that tokens at the ends of these contexts read."""
    read = 0.0
    for context in contexts:
        for window, size in cached:
            read += size * (context if window is None else min(context, window))
    return read
