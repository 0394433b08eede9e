"""How a weight lies in memory: plain floats, or ggml's blocks of a few bits with a scale.

A quantized row is a run of blocks; a block holds `block` neighbouring elements of the last axis in `bytes` bytes.
So whole rows can be moved as raw bytes (fusing, splitting, re-ordering heads), and nothing else can. Everything here
is numpy over bytes: a `Stored` may be a view of a mapped file, and costs nothing until it is decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np


@dataclass(frozen=True, slots=True)
class Format:
    """One storage format: `block` elements take `bytes` bytes."""

    name: str
    block: int
    bytes: int

    @property
    def bits(self) -> float:
        """Bits per weight, scales included: what a decode step must read from memory."""
        return 8 * self.bytes / self.block


# One block, little endian, in file order: `d` scales, `m` is the minimum, `qs` the low bits, `qh` the high ones.
_LAYOUTS: dict[str, tuple[int, np.dtype]] = {
    "F32": (1, np.dtype([("x", "<f4")])),
    "F16": (1, np.dtype([("x", "<f2")])),
    "BF16": (1, np.dtype([("x", "<u2")])),
    "Q8_0": (32, np.dtype([("d", "<f2"), ("qs", "i1", 32)])),
    "Q4_0": (32, np.dtype([("d", "<f2"), ("qs", "u1", 16)])),
    "Q4_1": (32, np.dtype([("d", "<f2"), ("m", "<f2"), ("qs", "u1", 16)])),
    "Q5_0": (32, np.dtype([("d", "<f2"), ("qh", "u1", 4), ("qs", "u1", 16)])),
    "Q5_1": (32, np.dtype([("d", "<f2"), ("m", "<f2"), ("qh", "u1", 4), ("qs", "u1", 16)])),
    "Q4_K": (256, np.dtype([("d", "<f2"), ("m", "<f2"), ("scales", "u1", (3, 4)), ("qs", "u1", (4, 32))])),
    "Q5_K": (
        256,
        np.dtype([("d", "<f2"), ("m", "<f2"), ("scales", "u1", (3, 4)), ("qh", "u1", 32), ("qs", "u1", (4, 32))]),
    ),
    "MXFP4": (32, np.dtype([("e", "u1"), ("qs", "u1", 16)])),
    "Q6_K": (256, np.dtype([("ql", "u1", (2, 2, 32)), ("qh", "u1", (2, 32)), ("scales", "i1", 16), ("d", "<f2")])),
}

FOUR_BIT_FLOATS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)  # MXFP4's codes

FORMATS: dict[str, Format] = {name: Format(name, block, layout.itemsize) for name, (block, layout) in _LAYOUTS.items()}
BYTES = Format("U8", 1, 1)  # a part of another format, which a file holds by itself: codes or scales
FP8 = Format("F8_E4M3", 1, 1)  # codes whose scales lie in another tensor
INTEGERS = {"I32": Format("I32", 1, 4), "I64": Format("I64", 1, 8)}  # of tables; no weights

# Elements decoded at a time: the temporaries of one chunk stay in a core's cache.
_CHUNK = 1 << 16


def stored_bytes(format_name: str, shape: Sequence[int]) -> int:
    """Bytes that a tensor of this shape (torch order) takes; ValueError when its last axis is not whole blocks."""
    fmt = FORMATS.get(format_name) or INTEGERS.get(format_name) or {BYTES.name: BYTES, FP8.name: FP8}.get(format_name)
    if fmt is None:
        raise ValueError(f"unknown storage format {format_name!r}; known: {', '.join(FORMATS)}")
    if any(d < 0 for d in shape):
        raise ValueError(f"negative dimension in shape {tuple(shape)}")
    if (shape[-1] if len(shape) else 1) % fmt.block:
        raise ValueError(f"the last axis of {tuple(shape)} is not a multiple of {format_name}'s block of {fmt.block}")
    return prod(shape) // fmt.block * fmt.bytes


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """A tensor as raw bytes. `shape` is row-major, torch order, [out, in]; `data` is uint8, 1-D, maybe read-only."""

    format: str
    shape: tuple[int, ...]
    data: np.ndarray

    def __post_init__(self) -> None:
        need = stored_bytes(self.format, self.shape)
        if self.data.dtype != np.uint8 or self.data.ndim != 1:
            raise ValueError(f"data must be 1-D uint8, not {self.data.ndim}-D {self.data.dtype}")
        if self.data.size != need:
            raise ValueError(f"{self.format} of shape {self.shape} takes {need} bytes, got {self.data.size}")

    @property
    def nbytes(self) -> int:
        return int(self.data.size)

    def by_row(self) -> np.ndarray:
        """The bytes as (shape[0], bytes of one row), no copy: rows are whole runs of blocks."""
        if not self.shape or (len(self.shape) == 1 and self.format != BYTES.name and FORMATS[self.format].block > 1):
            raise ValueError(f"{self.format} of shape {self.shape} has no rows to move")
        return self.data.reshape(self.shape[0], stored_bytes(self.format, self.shape[1:]) if self.nbytes else 0)

    def rows(self, start: int, stop: int) -> Stored:
        """Rows start..stop-1 of the first axis, as a view."""
        if not 0 <= start <= stop <= self.shape[0]:
            raise ValueError(f"rows {start}:{stop} lie outside shape {self.shape}")
        return Stored(self.format, (stop - start, *self.shape[1:]), self.by_row()[start:stop].reshape(-1))

    def columns(self, start: int, stop: int) -> Stored:
        """Elements start..stop-1 of each row of a matrix, as a copy; ValueError unless they are whole blocks."""
        block, size = FORMATS[self.format].block, FORMATS[self.format].bytes
        if start % block or stop % block:
            raise ValueError(f"columns {start}:{stop} are not whole blocks of {self.format}, which have {block}")
        rows = self.by_row()[:, start // block * size : stop // block * size]
        return Stored(self.format, (self.shape[0], stop - start), np.ascontiguousarray(rows).reshape(-1))

    def entry(self, index: int) -> Stored:
        """Entry `index` of the first axis, as a view without that axis."""
        one = self.rows(index, index + 1)
        return Stored(one.format, one.shape[1:], one.data)

    def take_rows(self, index: np.ndarray) -> Stored:
        """The rows named by `index`, in that order, as a copy of their bytes."""
        return Stored(self.format, (len(index), *self.shape[1:]), self.by_row()[index].reshape(-1))


def from_float(array: np.ndarray) -> Stored:
    """A float32 or float16 array as a `Stored` in its own precision."""
    names = {"float32": "F32", "float16": "F16"}
    if array.dtype.name not in names:
        raise ValueError(f"cannot store {array.dtype}; give float32 or float16")
    return Stored(names[array.dtype.name], array.shape, np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def integers(stored: Stored) -> np.ndarray:
    """A table of whole numbers."""
    return stored.data.view("<i4" if stored.format == "I32" else "<i8").reshape(stored.shape)


def dequantize(stored: Stored) -> np.ndarray:
    """Decode to float32, bit for bit as ggml defines each format. Result has `stored.shape` and owns its memory."""
    block, layout = _LAYOUTS[stored.format]
    decode = _DECODERS[stored.format]
    blocks = stored.data.view(layout)
    out = np.empty((len(blocks), block), dtype=np.float32)
    step = _CHUNK // block
    with np.errstate(invalid="ignore", over="ignore"):  # a scale may be inf or nan: the caller judges the values
        for start in range(0, len(blocks), step):
            decode(blocks[start : start + step], out[start : start + step])
    return out.reshape(stored.shape)


def _plain(b: np.ndarray, out: np.ndarray) -> None:
    out[:, 0] = b["x"]


def _bf16(b: np.ndarray, out: np.ndarray) -> None:
    bits = out.view(np.uint32)
    bits[:, 0] = b["x"]
    bits <<= np.uint32(16)


def _q8_0(b: np.ndarray, out: np.ndarray) -> None:
    np.multiply(b["qs"], _column(b["d"]), out=out)


def _q4_0(b: np.ndarray, out: np.ndarray) -> None:
    _nibbles(b["qs"], out)
    out -= np.float32(8)
    out *= _column(b["d"])


def _q4_1(b: np.ndarray, out: np.ndarray) -> None:
    _nibbles(b["qs"], out)
    out *= _column(b["d"])
    out += _column(b["m"])


def _q5_0(b: np.ndarray, out: np.ndarray) -> None:
    np.subtract(_five_bits(b), np.float32(16), out=out)
    out *= _column(b["d"])


def _q5_1(b: np.ndarray, out: np.ndarray) -> None:
    np.multiply(_five_bits(b), _column(b["d"]), out=out)
    out += _column(b["m"])


def _q4_k(b: np.ndarray, out: np.ndarray) -> None:
    q = out.reshape(-1, 4, 2, 32)  # a byte's nibbles belong to two neighbouring groups of 32
    q[:, :, 0] = b["qs"] & np.uint8(15)
    q[:, :, 1] = b["qs"] >> np.uint8(4)
    _scale_groups(b, out)


def _q5_k(b: np.ndarray, out: np.ndarray) -> None:
    q = out.reshape(-1, 8, 32)
    for group in range(8):
        low = (b["qs"][:, group // 2] >> np.uint8(4 * (group % 2))) & np.uint8(15)
        high = (b["qh"] >> np.uint8(group)) & np.uint8(1)
        q[:, group] = low | (high << np.uint8(4))
    _scale_groups(b, out)


def _q6_k(b: np.ndarray, out: np.ndarray) -> None:
    q = out.reshape(-1, 2, 4, 32)  # (block, half, group, element)
    for group in range(4):
        low = (b["ql"][:, :, group % 2] >> np.uint8(4 * (group // 2))) & np.uint8(15)
        high = (b["qh"] >> np.uint8(2 * group)) & np.uint8(3)
        q[:, :, group] = low | (high << np.uint8(4))
    out -= np.float32(32)
    scales = _column(b["d"]) * b["scales"]  # (block, 16): one for every 16 elements
    q16 = out.reshape(-1, 16, 16)
    q16 *= scales[:, :, None]


def _mxfp4(b: np.ndarray, out: np.ndarray) -> None:
    out[:, :16] = FOUR_BIT_FLOATS[b["qs"] & np.uint8(15)]
    out[:, 16:] = FOUR_BIT_FLOATS[b["qs"] >> np.uint8(4)]
    np.ldexp(out, b["e"].astype(np.int32)[:, None] - 127, out=out)


def _column(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float32)[:, None]


def _nibbles(qs: np.ndarray, out: np.ndarray) -> None:
    """16 bytes -> 32 values: the low nibbles are elements 0-15, the high ones 16-31."""
    out[:, :16] = qs & np.uint8(15)
    out[:, 16:] = qs >> np.uint8(4)


def _five_bits(b: np.ndarray) -> np.ndarray:
    q = np.unpackbits(b["qh"], axis=1, bitorder="little")  # bit i is the fifth bit of element i
    q <<= np.uint8(4)
    q[:, :16] |= b["qs"] & np.uint8(15)
    q[:, 16:] |= b["qs"] >> np.uint8(4)
    return q


def _scale_groups(b: np.ndarray, out: np.ndarray) -> None:
    """Q4_K and Q5_K: eight groups of 32, each with a 6-bit scale and a 6-bit minimum packed into 12 bytes.

    Bytes 0-3 and 4-7 hold the six bits of groups 0-3 (scales, minimums); their top two bits and the nibbles of
    bytes 8-11 make up groups 4-7.
    """
    first, second, third = b["scales"][:, 0], b["scales"][:, 1], b["scales"][:, 2]
    low6, top2 = np.uint8(0x3F), np.uint8(0x30)
    scale = np.concatenate([first & low6, (third & np.uint8(15)) | ((first >> np.uint8(2)) & top2)], axis=1)
    minimum = np.concatenate([second & low6, (third >> np.uint8(4)) | ((second >> np.uint8(2)) & top2)], axis=1)
    groups = out.reshape(-1, 8, 32)
    groups *= (_column(b["d"]) * scale)[:, :, None]
    groups -= (_column(b["m"]) * minimum)[:, :, None]


_DECODERS: dict[str, Callable[[np.ndarray, np.ndarray], None]] = {
    "F32": _plain,
    "F16": _plain,
    "BF16": _bf16,
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "MXFP4": _mxfp4,
}
