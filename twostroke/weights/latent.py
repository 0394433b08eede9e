"""The up-projections of latent attention, one matrix for each head, as the products of the absorbed form need them.

    key_up     (latent, plain_dim)   a query head's plain part -> what it asks of a latent
    value_up   (value_dim, latent)   a weighted sum of latents -> a value head

A checkpoint holds kv_b: for each head the rows of its key, then those of its value, each over the latent. So values are
rows as they are, and keys are transposed. Newer GGUF files hold both as they are needed, as (heads, rows, columns).
"""

from __future__ import annotations

import numpy as np

from twostroke.model.latent import LatentArch
from twostroke.ops.formats import Stored, dequantize, from_float

_BITS = {"F32": np.uint32, "F16": np.uint16, "BF16": np.uint16}  # formats with a whole number of bytes per element


def key_parts(stored: Stored, mixer: LatentArch) -> list[Stored]:
    if len(stored.shape) == 3:
        return split_heads(stored)
    size = mixer.plain_dim + mixer.value_dim
    return [transposed(stored.rows(first, first + mixer.plain_dim)) for first in range(0, stored.shape[0], size)]


def value_parts(stored: Stored, mixer: LatentArch) -> list[Stored]:
    if len(stored.shape) == 3:
        return split_heads(stored)
    size = mixer.plain_dim + mixer.value_dim
    return [stored.rows(first + mixer.plain_dim, first + size) for first in range(0, stored.shape[0], size)]


def split_heads(stored: Stored) -> list[Stored]:
    """The matrices of a tensor of three dimensions."""
    return [Stored(stored.format, stored.shape[1:], head) for head in stored.by_row()]


def transposed(stored: Stored) -> Stored:
    """Float formats keep their bits. A block of a quantized format lies along a row, so those become float16."""
    bits = _BITS.get(stored.format)
    if bits is None:
        return from_float(dequantize(stored).astype(np.float16).T)
    turned = np.ascontiguousarray(stored.data.view(bits).reshape(stored.shape).T)
    return Stored(stored.format, turned.shape, turned.reshape(-1).view(np.uint8))
