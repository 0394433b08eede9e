"""What a checkpoint is, as data: shapes, positions, windows. Torch-free, so that planning and costing need no torch.

A family (families.py) turns config.json or GGUF keys into an `Arch`; `Transformer` runs any `Arch`. Quirks of a
checkpoint end in families.py and names.py and never reach the forward pass.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions with every kind of scaling already folded into the frequencies."""

    frequencies: tuple[float, ...]  # radians per position, one for each rotated pair
    factor: float = 1.0  # multiplies cos and sin (YaRN, longrope)

    @property
    def dim(self) -> int:
        return 2 * len(self.frequencies)


@dataclass(frozen=True, slots=True)
class LayerArch:
    """One transformer layer. Layers differ only in what is listed here."""

    window: int | None = None  # tokens a token sees, itself included; None: all before it
    rope: Rope | None = None  # None: no positions (NoPE)


@dataclass(frozen=True, slots=True)
class Arch:
    family: str
    vocab: int  # rows of the embedding, the width of the logits
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: tuple[LayerArch, ...]
    max_positions: int  # context the checkpoint was made for
    norm_eps: float
    activation: Literal["silu", "gelu_tanh"] = "silu"
    attention_scale: float | None = None  # None: head_dim ** -0.5
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    embedding_scale: float = 1.0
    qk_norm: bool = False  # RMS norm of each query and key head
    sandwich_norms: bool = False  # norms after attention and feed-forward too, before the residual add
    qkv_bias: bool = False
    output_bias: bool = False
    tied_head: bool = False
    windows: tuple[tuple[int | None, int], ...] = field(init=False, repr=False, compare=False)  # (window, layers)

    def __post_init__(self) -> None:
        counted = Counter(layer.window for layer in self.layers)  # once: every plan asks what attention costs
        object.__setattr__(self, "windows", tuple(counted.items()))

    @property
    def scale(self) -> float:
        return self.attention_scale if self.attention_scale is not None else float(self.head_dim) ** -0.5

    # ---- what it costs -------------------------------------------------------------------------------------------

    @property
    def layer_weights(self) -> int:
        """Matrix weights of one layer."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.hidden * self.ffn

    @property
    def weights(self) -> int:
        """Matrix weights of the model; a tied head counts once."""
        return len(self.layers) * self.layer_weights + self.hidden * self.vocab * (1 if self.tied_head else 2)

    def linear_flops(self, tokens: int, logit_rows: int) -> int:
        return 2 * (tokens * len(self.layers) * self.layer_weights + logit_rows * self.hidden * self.vocab)

    def attention_flops(self, start: int, count: int) -> int:
        """q·k and p·v of `count` tokens after `start` cached ones, over all layers, windows respected."""
        pairs = sum(layers * seen_pairs(start, count, window) for window, layers in self.windows)
        return 4 * pairs * self.heads * self.head_dim

    def kv_entry_bytes(self, element_bytes: float, scale_bytes: int = 0) -> int:
        """K and V of one token in one layer."""
        return int(2 * self.kv_heads * (self.head_dim * element_bytes + scale_bytes))


def seen_pairs(start: int, count: int, window: int | None) -> int:
    """How many (query, key) pairs `count` causal queries starting at position `start` make."""
    full = count * start + count * (count + 1) // 2
    if window is None or start + count <= window:
        return full
    short = max(0, min(count, window - start))  # queries that do not yet fill the window
    return short * start + short * (short + 1) // 2 + (count - short) * window
