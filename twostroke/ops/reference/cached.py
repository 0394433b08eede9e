"""What every kind of attention shares: the rotation, the positions that a query sees, the keys stored there."""

from __future__ import annotations

import torch
from torch import Tensor

from twostroke.ops.interface import BLOCK, KVLayer, RopeTable
from twostroke.ops.reference.kv_codec import decode_kv


def rotated(x: Tensor, rope: RopeTable, positions: Tensor) -> Tensor:
    """x (T, heads, head_dim): rotate the first rotary_dim dimensions of a head, element i with i + rotary_dim / 2."""
    half = rope.cos.shape[1]
    cos, sin = rope.cos[positions].unsqueeze(1), rope.sin[positions].unsqueeze(1)  # (T, 1, half)
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def seen(position: int, window: int) -> Tensor:
    """The positions that a query at `position` sees."""
    return torch.arange(max(0, position - window + 1) if window else 0, position + 1)


def stored_keys(kv: KVLayer, table: Tensor, places: Tensor) -> Tensor:
    """Keys at these positions, as stored: (n, kv_heads, head_dim)."""
    block, offset = table[places // BLOCK].long(), places % BLOCK
    key_scales = None if kv.key_scales is None else kv.key_scales[block, :, offset]
    return decode_kv(kv.keys[block, :, offset], key_scales, kv.format)
