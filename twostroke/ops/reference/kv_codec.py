"""How K and V become what the cache stores, and back. Every torch backend shares these few lines.

A scale belongs to one token and head, so what a token stores depends on nothing but the token itself. All operations
are exactly rounded elementwise ones (and a maximum), so the bits do not depend on the shape of the call either.
"""

from __future__ import annotations

import torch
from torch import Tensor

from twostroke.ops.interface import BLOCK, KVFormat, KVLayer

_FLOATS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_LARGEST_CODE = {"int8": 127, "int4": 7, "fp8": 448}


def encode_kv(x: Tensor, kv_format: KVFormat) -> tuple[Tensor, Tensor | None]:
    """(..., head_dim) float32 -> codes (..., width) and, for the formats that have them, scales (...)."""
    if kv_format in _FLOATS:
        return x.to(_FLOATS[kv_format]), None
    largest = _LARGEST_CODE[kv_format]
    scales = x.abs().amax(dim=-1) / largest  # (...)
    safe = torch.where(scales > 0, scales, torch.ones_like(scales))  # a row of zeros has scale 0 and codes 0
    codes = x / safe.unsqueeze(-1)
    if kv_format == "fp8":
        return codes.clamp(-largest, largest).to(torch.float8_e4m3fn), scales
    codes = torch.round(codes).clamp(-largest, largest)  # half to even
    if kv_format == "int8":
        return codes.to(torch.int8), scales
    nibbles = (codes + 8).to(torch.uint8)
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << 4), scales


def decode_kv(codes: Tensor, scales: Tensor | None, kv_format: KVFormat) -> Tensor:
    """The float32 values that attention sees: (..., width) and scales (...) -> (..., head_dim)."""
    if scales is None:
        return codes.to(torch.float32)
    if kv_format in ("int8", "fp8"):
        return codes.to(torch.float32) * scales.unsqueeze(-1)
    pairs = torch.stack((codes & 15, codes >> 4), dim=-1)  # (..., width, 2): even element, odd element
    return (pairs.flatten(-2).to(torch.float32) - 8) * scales.unsqueeze(-1)


def write_kv(kv: KVLayer, slots: Tensor, k: Tensor, v: Tensor | None = None) -> None:
    """Store k and v, (T, kv_heads, head_dim) float32, at `slots` (T,). v None: a cache of keys alone."""
    block, offset = slots // BLOCK, slots % BLOCK
    for x, codes, scales in ((k, kv.keys, kv.key_scales), (v, kv.values, kv.value_scales)):
        if x is None or codes is None:
            continue
        new_codes, new_scales = encode_kv(x, kv.format)
        codes[block, :, offset] = new_codes  # (T, kv_heads, width)
        if scales is not None and new_scales is not None:
            scales[block, :, offset] = new_scales
