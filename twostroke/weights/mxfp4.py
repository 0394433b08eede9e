"""MXFP4 as safetensors files hold it, put into ggml's blocks: the codes stay as they are, in four bits."""

from __future__ import annotations

import numpy as np

from twostroke.ops.formats import Stored, to_nibbles


def joined_mxfp4(codes: Stored, scales: Stored) -> Stored:
    """codes (rows, groups, 16): two to a byte, the first in the low nibble. scales (rows, groups): exponents. ggml's
    byte i holds codes i and i + 16 of its group, after the exponent."""
    rows, groups, half = codes.shape
    pairs = codes.data.reshape(rows, groups, half)
    elements = np.stack([pairs & np.uint8(15), pairs >> np.uint8(4)], axis=-1).reshape(rows, groups, 2 * half)
    blocks = np.empty((rows, groups, half + 1), np.uint8)
    blocks[..., 0] = scales.data.reshape(rows, groups)
    blocks[..., 1:] = to_nibbles(elements)
    return Stored("MXFP4", (rows, groups * 2 * half), blocks.reshape(-1))
