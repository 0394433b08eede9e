"""Weights of 8-bit floats with a scale for each square of 128 by 128, as DeepSeek V3 and Qwen3's FP8 models have them.

A value is code · scale. On load it becomes bfloat16, as DeepSeek's own conversion makes it: no kernel here multiplies
these codes, and a row-wise format could not hold squares of scales.
"""

from __future__ import annotations

import numpy as np

from twostroke.errors import ModelError
from twostroke.ops.formats import FP8, Stored, dequantize

SCALES = "_scale_inv"  # end of the name of the tensor with the scales of another one
SQUARE = 128


def scale_name(tensor: str) -> str:
    return tensor + SCALES


def is_fp8(stored: Stored) -> bool:
    return stored.format == FP8.name


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(-(-size // SQUARE) for size in shape)


def decoded_fp8(codes: Stored, scales: Stored, name: str) -> Stored:
    """The matrix in bfloat16."""
    if len(codes.shape) != 2 or scales.shape != scale_shape(codes.shape):
        raise ModelError(
            f"{name}: 8-bit floats of shape {codes.shape} with scales of shape {scales.shape}; a matrix with one scale "
            f"for each {SQUARE} by {SQUARE} is needed. Use the model's bfloat16 version."
        )
    rows, cols = codes.shape
    factors, table = dequantize(scales), code_values()
    out = np.empty((rows, cols), np.uint16)
    for first in range(0, rows, SQUARE):
        values = table[codes.data.reshape(rows, cols)[first : first + SQUARE]]
        values = values * np.repeat(factors[first // SQUARE], SQUARE)[:cols]
        bits = values.view(np.uint32)
        out[first : first + SQUARE] = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return Stored("BF16", codes.shape, out.reshape(-1).view(np.uint8))


def code_values() -> np.ndarray:
    """What each of the 256 codes means: a sign, four bits of exponent, three of mantissa, no infinities."""
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, (codes & 7).astype(np.float32)
    values = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent.astype(float) - 7))
    values[(codes & 127) == 127] = np.nan
    return np.where(codes & 128, -values, values).astype(np.float32)
