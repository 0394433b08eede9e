"""Weights put into formats that the native library has."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from twostroke.ops.formats import EIGHT_BIT_FLOATS, Stored, dequantize, layout_of

RUN = 128  # rows converted at a time


def packable(part: Stored, threads: int = 1) -> Stored:
    """The matrix in a format that the library has: the two others become the nearest of them. A zero point becomes a
    minimum in float16, which is off by 2^-11 of it at most."""
    if part.format == "F8_32":
        return brain_floats(part, threads)
    if part.format != "Q4_Z":
        return part
    found = part.blocks()
    made = np.empty(len(found), layout_of("Q4_1"))
    made["d"], made["qs"] = found["d"], found["qs"]
    made["m"] = -(found["d"].astype(np.float32) * found["z"])
    return Stored("Q4_1", part.shape, made.view(np.uint8), part.order)


def brain_floats(part: Stored, threads: int) -> Stored:
    """F8_32 in bfloat16. Few scales occur in a run of rows, so all values under one of them are made once."""
    rows, cols = part.shape
    blocks = part.blocks().reshape(rows, -1)
    out = np.empty((rows, cols), np.uint16)

    def one(start: int) -> None:
        some = blocks[start : start + RUN]
        scales, which = np.unique(some["d"], return_inverse=True)
        with np.errstate(invalid="ignore", over="ignore"):
            table = brain_bits(EIGHT_BIT_FLOATS * scales[:, None]).reshape(-1)
        codes = which.reshape(some.shape).astype(np.int32)[..., None] * 256 + some["qs"]
        out[start : start + RUN] = table[codes].reshape(len(some), cols)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(one, range(0, rows, RUN)))
    return Stored("BF16", part.shape, out.reshape(-1).view(np.uint8), part.order)


def in_one_order(parts: Sequence[Stored]) -> tuple[Sequence[Stored], np.ndarray | None]:
    """The parts, and the order of inputs of all of them. Where they have several, each is put into its own order, in
    float16."""
    order = parts[0].order
    if all(np.array_equal(part.order, order) for part in parts):  # type: ignore[arg-type]
        return parts, order
    return [part if part.order is None else narrowed(part, "F16") for part in parts], None


def narrowed(part: Stored, name: str) -> Stored:
    """The same matrix, rounded to a float format of 16 bits."""
    if part.format == name and part.order is None:
        return part
    rows, cols = part.shape
    out = np.empty((rows, cols), np.uint16)
    step = max(1, (1 << 24) // cols)  # decode a little at a time: no float32 copy of the whole matrix
    for start in range(0, rows, step):
        values = dequantize(part.rows(start, min(start + step, rows)))
        out[start : start + step] = half_bits(values) if name == "F16" else brain_bits(values)
    return Stored(name, part.shape, out.reshape(-1).view(np.uint8))


def half_bits(values: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):  # what is too large for the format is infinite
        return values.astype(np.float16).view(np.uint16)


def brain_bits(values: np.ndarray) -> np.ndarray:
    """float32 to the upper half of its bits, to the nearest, the even one of two as near."""
    bits = values.view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)
