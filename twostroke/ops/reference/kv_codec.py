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
        factor = _best_factor(codes)
        codes = (codes / factor.unsqueeze(-1)).clamp(-largest, largest)
        return codes.to(torch.float8_e4m3fn), scales * factor
    codes = torch.round(codes).clamp(-largest, largest)  # half to even
    if kv_format == "int8":
        return codes.to(torch.int8), scales
    nibbles = (codes + 8).to(torch.uint8)
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << 4), scales


def _best_factor(x: Tensor) -> Tensor:
    """The best of eight factors from 1 to 2 by which a scale of fp8 should be larger than the largest element asks for.
    Steps of fp8 grow with the value, so it matters where the values fall between them. Factors are
    eighths: their products with codes are exact. Errors are squared and added as whole numbers of 1/64: the order of
    the sum does not matter."""
    best = torch.ones_like(x[..., 0])
    error = torch.full_like(best, torch.iinfo(torch.int32).max, dtype=torch.int64)
    factor = 1.0
    for _ in range(8):
        off = (x / factor).clamp(-448, 448).to(torch.float8_e4m3fn).to(torch.float32) * factor - x
        found = (off * off * 64).to(torch.int32).sum(dim=-1)
        best, error = torch.where(found < error, factor, best), torch.minimum(found, error)
        factor += 0.125
    return best


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
