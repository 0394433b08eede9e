"""Weights of 8-bit floats with four bits of exponent, as DeepSeek V3, Qwen3's FP8 models and compressed-tensors have.

A value is code · scale. The codes are kept, in blocks of 32 with their scale (F8_32), and a backend packs them as it
can: a CPU makes them bfloat16, as DeepSeek's own conversion does. Rows that are no whole blocks become float32.
"""

from __future__ import annotations

import numpy as np

from twostroke.ops.formats import EIGHT_BIT_FLOATS, Stored, from_float
from twostroke.weights.scales import Scales

BLOCK = 32


def fp8_format(codes: Stored, scales: Scales) -> str:
    return "F32" if codes.shape[1] % BLOCK or scales.each[1] % BLOCK else "F8_32"


def stored_fp8(codes: Stored, scales: Scales) -> Stored:
    outputs, inputs = codes.shape
    factors, data = scales.read(), codes.data.reshape(outputs, inputs)
    if fp8_format(codes, scales) == "F32":
        return from_float(EIGHT_BIT_FLOATS[data] * factors[:, np.arange(inputs) // scales.each[1]])
    blocks = np.empty((outputs, inputs // BLOCK, 4 + BLOCK), np.uint8)
    places = np.arange(0, inputs, BLOCK) // scales.each[1]
    blocks[..., :4] = factors[:, places].astype("<f4")[..., None].view(np.uint8)
    blocks[..., 4:] = data.reshape(outputs, -1, BLOCK)
    return Stored("F8_32", codes.shape, blocks.reshape(-1))
