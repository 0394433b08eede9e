"""Fewer bits for weights that came with more: int8 and int4 in groups of 32, each group with its own scale.

The results are ordinary Q8_0 and Q4_0 tensors, so every backend multiplies them as it multiplies a GGUF file's. For
int4 the scale is not simply the largest weight over 8: for each group the candidate with the least squared error is
kept, which is never worse than rounding to the nearest with the plain scale. The native library computes the same bits
much faster. The numpy code here is its specification, and is used where the library was not built.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from twostroke.hardware import usable_cores
from twostroke.ops.cpu.library import available, load_library
from twostroke.ops.formats import FORMATS, Stored, dequantize

GROUP = 32
CHUNK = 1 << 13  # groups quantized at a time: intermediate results stay in a core's cache
TRIALS = tuple(np.linspace(0.76, 1.04, 15).tolist())  # of the plain scale; 1.0 itself is tried first


def quantize(stored: Stored, kind: str) -> Stored:
    """The same matrix in 8 or 4 bits; rows that groups of 32 do not divide stay as they are. ValueError if a weight is
    not a finite number: no code stands for it, and rounding would hide it."""
    if len(stored.shape) != 2 or stored.shape[1] % GROUP:
        return stored
    name = {"int8": "Q8_0", "int4": "Q4_0"}[kind]
    values = dequantize(stored).reshape(-1, GROUP)
    encode = native_encoder(kind) if available() else {"int8": to_q8_0, "int4": to_q4_0}[kind]
    out = np.empty((len(values), FORMATS[name].bytes), np.uint8)

    def one(first: int) -> None:
        groups = values[first : first + CHUNK]
        if not np.isfinite(groups).all():
            raise ValueError("holds a weight that is not a finite number")
        out[first : first + CHUNK] = encode(groups)

    with ThreadPoolExecutor(usable_cores()) as pool:
        list(pool.map(one, range(0, len(values), CHUNK)))
    return Stored(name, stored.shape, out.reshape(-1))


def native_encoder(kind: str) -> Callable[[np.ndarray], np.ndarray]:
    library = load_library()
    factors = np.asarray(TRIALS, np.float32)
    width = FORMATS["Q4_0" if kind == "int4" else "Q8_0"].bytes

    def encode(groups: np.ndarray) -> np.ndarray:
        groups = np.ascontiguousarray(groups, np.float32)
        out = np.empty((len(groups), width), np.uint8)
        trials = factors.ctypes.data if kind == "int4" else None
        library.ts_quantize(groups.ctypes.data, len(groups), trials, len(factors), out.ctypes.data)
        return out

    return encode


def to_q8_0(groups: np.ndarray) -> np.ndarray:
    """(n, 32) float32 -> (n, 34) bytes: float16 scale, 32 signed codes; value = code · scale."""
    scale = as_half(np.abs(groups).max(axis=1) / 127)
    codes = np.clip(np.rint(divided(groups, scale)), -127, 127).astype(np.int8)
    return np.concatenate([scale_bytes(scale), codes.view(np.uint8)], axis=1)


def to_q4_0(groups: np.ndarray) -> np.ndarray:
    """(n, 32) float32 -> (n, 18) bytes: float16 scale, then code i beside code i + 16; value = (code - 8) · scale."""
    rows = np.arange(len(groups))
    plain = groups[rows, np.abs(groups).argmax(axis=1)] / -8  # the largest weight gets code 0, the widest side
    best, scale = error_of(groups, as_half(plain)), as_half(plain)
    for factor in TRIALS:
        trial = as_half(plain * np.float32(factor))
        error = error_of(groups, trial)
        better = error < best
        best, scale = np.where(better, error, best), np.where(better, trial, scale)
    codes = four_bits(groups, scale)
    packed = codes[:, : GROUP // 2] | (codes[:, GROUP // 2 :] << 4)
    return np.concatenate([scale_bytes(scale), packed], axis=1)


def four_bits(groups: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return (np.clip(np.rint(divided(groups, scale)), -8, 7) + 8).astype(np.uint8)


def error_of(groups: np.ndarray, scale: np.ndarray) -> np.ndarray:
    rounded = np.clip(np.rint(divided(groups, scale)), -8, 7) * scale[:, None]
    return np.square(groups - rounded).sum(axis=1)


def divided(groups: np.ndarray, scale: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        inverse = np.where(scale == 0, np.float32(0), np.float32(1) / scale)
    return groups * inverse[:, None]


def as_half(scale: np.ndarray) -> np.ndarray:
    """The scale as it will be stored: codes are chosen for what is read back."""
    return scale.astype(np.float16).astype(np.float32)


def scale_bytes(scale: np.ndarray) -> np.ndarray:
    return scale.astype(np.float16).view(np.uint8).reshape(-1, 2)
