"""Matrices of whole-number codes with a scale and a zero point for each group of inputs: value = (code - zero) · scale.

That is what AWQ, GPTQ and compressed-tensors publish. The codes stay as they are: four bits become Q4_0 where every
zero point is 8, else Q4_Z; eight bits become Q8_0. Their scales are float16, so a scale in another float type is
rounded: rounding each weight to float16 would be off as much. What those formats cannot hold becomes float16.
"""

from __future__ import annotations

import numpy as np

from twostroke.ops.formats import Stored, to_nibbles
from twostroke.record import Record

BLOCK = 32  # inputs that share a scale in the formats that are kept
# Of scales, which a backend may multiply with a zero point, in float16
_LEAST, _MOST = float(np.finfo(np.float16).smallest_normal), float(np.finfo(np.float16).max) / 16


class Grid(Record, eq=False):
    codes: np.ndarray  # (outputs, inputs) uint8
    zeros: np.ndarray  # (outputs, groups) whole numbers
    scales: np.ndarray  # (outputs, groups) float32
    group_of: np.ndarray  # (inputs,) the group of each input
    bits: int


def stored_grid(grid: Grid) -> Stored:
    """The grid's values in the narrowest format that holds them."""
    order = block_order(grid.group_of)
    signed = grid.bits == 4 or bool((grid.zeros == 128).all())
    if order is None or not signed or not half_holds(grid.scales):
        return as_floats(grid)
    moved = not np.array_equal(order, np.arange(len(order)))
    groups = grid.group_of[order][::BLOCK]  # of each block
    codes = (grid.codes[:, order] if moved else grid.codes).reshape(len(grid.codes), -1, BLOCK)
    scales = grid.scales[:, groups].astype("<f2")[..., None].view(np.uint8)
    if grid.bits == 8:
        name, parts = "Q8_0", [scales, codes ^ np.uint8(128)]  # code - 128, in two's complement
    elif (grid.zeros == 8).all():
        name, parts = "Q4_0", [scales, to_nibbles(codes)]
    else:
        zeros = grid.zeros[:, groups].astype(np.uint8)[..., None]
        name, parts = "Q4_Z", [scales, zeros, to_nibbles(codes)]
    data = np.concatenate(parts, axis=-1).reshape(-1)
    return Stored(name, grid.codes.shape, data, order if moved else None)


def block_order(group_of: np.ndarray) -> np.ndarray | None:
    """The inputs sorted by group, each group's in their own order; None where its blocks would hold inputs of two."""
    if len(group_of) % BLOCK:
        return None
    order = np.argsort(group_of, kind="stable")
    blocks = group_of[order].reshape(-1, BLOCK)
    return order if (blocks == blocks[:, :1]).all() else None


def half_holds(scales: np.ndarray) -> bool:
    """Whether every scale is zero or among float16's normal numbers, which a NaN is not."""
    size = np.abs(scales)
    return bool(((size == 0) | ((size >= _LEAST) & (size <= _MOST))).all())


def as_floats(grid: Grid) -> Stored:
    values = np.empty(grid.codes.shape, np.float16)
    step = max(1, (1 << 22) // len(grid.group_of))
    with np.errstate(over="ignore", invalid="ignore"):  # a scale may be inf or nan: the caller judges the values
        for first in range(0, len(values), step):
            rows = slice(first, first + step)
            zeros, scales = (part[rows][:, grid.group_of].astype(np.float32) for part in (grid.zeros, grid.scales))
            values[rows] = (grid.codes[rows].astype(np.float32) - zeros) * scales
    return Stored("F16", values.shape, values.reshape(-1).view(np.uint8))


def unpacked(words: np.ndarray, bits: int) -> np.ndarray:
    """(rows, words) of 32 bits -> (rows, codes), the lowest bits first."""
    data = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return data
    codes = np.empty((*data.shape, 2), np.uint8)
    codes[..., 0] = data & np.uint8(15)
    codes[..., 1] = data >> np.uint8(4)
    return codes.reshape(len(data), -1)
