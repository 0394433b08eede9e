"""A model in equal parts for several ranks (tensor parallelism): what one rank has of it. Torch-free.

    q, k, v, gate, up    some of the rows: each rank has heads, and numbers of the feed, of its own
    output, down         the columns that belong to these: each rank's product is a part of the sum
    everything else      whole on every rank

The sum is made at the residual add (parallel.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from twostroke.errors import ConfigError
from twostroke.model.arch import Arch, DenseArch, GroupedArch, LayerArch
from twostroke.record import replace

BY_ROWS = frozenset(("q", "k", "v", "gate", "up", "q_bias", "k_bias", "v_bias", "gate_bias", "up_bias", "sinks"))
BY_COLUMNS = frozenset(("output", "down"))


@dataclass(frozen=True, slots=True)
class Share:
    rank: int
    parts: int

    def span(self, size: int) -> tuple[int, int]:
        """First and last + 1 of its part of so many."""
        part = size // self.parts
        return self.rank * part, (self.rank + 1) * part


def divided(arch: Arch, parts: int) -> Arch:
    """The model that each rank runs. ConfigError: it cannot be divided like this."""
    if arch.streams > 1:
        raise ConfigError(f"parallel={parts} is not served for several residual streams ({arch.family}): leave it out.")
    return replace(arch, layers=tuple(_layer(arch.family, layer, parts) for layer in arch.layers))


def _layer(family: str, layer: LayerArch, parts: int) -> LayerArch:
    mixer, feed = layer.mixer, layer.feed
    if not isinstance(mixer, GroupedArch) or mixer.wide_qk_norm or not isinstance(feed, DenseArch):
        what = "experts" if not isinstance(feed, DenseArch) else "norms over all heads"
        what = what if isinstance(mixer, GroupedArch) else f"{mixer.kind} attention"
        raise ConfigError(f"parallel={parts} is not served for {what}, which {family} has: leave it out.")
    most = gcd(mixer.heads, mixer.kv_heads, feed.width)
    if most % parts:
        fits = [str(number) for number in range(2, most + 1) if most % number == 0]
        raise ConfigError(
            f"parallel={parts} does not divide {mixer.heads} heads, {mixer.kv_heads} KV heads and a feed of "
            f"{feed.width}: {'use ' + ' or '.join(fits[:4]) if fits else 'leave it out'}."
        )
    mixer = replace(mixer, heads=mixer.heads // parts, kv_heads=mixer.kv_heads // parts, scale=mixer.factor)
    return replace(layer, mixer=mixer, feed=replace(feed, width=feed.width // parts))
