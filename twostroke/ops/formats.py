"""How a weight lies in memory: plain floats, or blocks of a few bits with a scale. The blocks are ggml's, but for two
that hold what published safetensors files have: Q4_Z (a zero point for each group) and F8_32 (8-bit floats). F8_E8M0 is
for scales: powers of two.

A quantized row is a run of blocks; a block holds `block` neighbouring elements of the last axis in `bytes` bytes.
So whole rows can be moved as raw bytes (fusing, splitting, re-ordering heads), and nothing else can. Everything here
is numpy over bytes: a `Stored` may be a view of a mapped file, and costs nothing until it is decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import numpy as np

from twostroke.record import Record


class Format(Record):
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
    "Q4_Z": (32, np.dtype([("d", "<f2"), ("z", "u1"), ("qs", "u1", 16)])),
    "F8_32": (32, np.dtype([("d", "<f4"), ("qs", "u1", 32)])),
    "F8_E8M0": (1, np.dtype([("e", "u1")])),
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

FLOATS = ("F32", "F16", "BF16")
_WEIGHTS = {name: Format(name, block, layout.itemsize) for name, (block, layout) in _LAYOUTS.items()}
OURS = ("Q4_Z", "F8_32", "F8_E8M0")
FORMATS: dict[str, Format] = {name: fmt for name, fmt in _WEIGHTS.items() if name not in OURS}  # ggml's
BYTES = Format("U8", 1, 1)  # a part of another format, which a file holds by itself: codes or scales
FP8 = Format("F8_E4M3", 1, 1)  # codes whose scales lie in another tensor
INTEGERS = {"I32": Format("I32", 1, 4), "I64": Format("I64", 1, 8)}  # of tables and of packed codes
SMALL_INTEGERS = Format("I8", 1, 1)  # codes whose scales lie in another tensor
_KNOWN = _WEIGHTS | {fmt.name: fmt for fmt in (BYTES, FP8, SMALL_INTEGERS, *INTEGERS.values())}

# Elements decoded at a time: the temporaries of one chunk stay in a core's cache.
_CHUNK = 1 << 16


FOUR_BITS = ("Q4_0", "Q4_1", "Q4_Z", "Q4_K")  # with a scale and a least value for 32 neighbours


def kept_format(format_name: str, device: str, by_output: bool = False, expert: bool = False) -> str:
    """What a matrix takes the memory of, on a "cpu" or on "cuda". by_output: all inputs of an output share a scale."""
    if format_name not in _WEIGHTS or device == "cpu":
        return {"F8_32": "BF16", "Q4_Z": "Q4_1"}.get(format_name, format_name)
    if format_name == "MXFP4" and expert:
        return format_name
    if format_name in FOUR_BITS:
        return "Q4_1"
    eight_bits = {"F8_32": FP8.name, "Q8_0": SMALL_INTEGERS.name} if by_output else {}
    return eight_bits.get(format_name, "BF16")


def layout_of(format_name: str) -> np.dtype:
    """The fields of one block."""
    return _LAYOUTS[format_name][1]


def stored_bytes(format_name: str, shape: Sequence[int]) -> int:
    """Bytes that a tensor of this shape (torch order) takes; ValueError when its last axis is not whole blocks."""
    fmt = _KNOWN.get(format_name)
    if fmt is None:
        raise ValueError(f"unknown storage format {format_name!r}; known: {', '.join(FORMATS)}")
    if any(d < 0 for d in shape):
        raise ValueError(f"negative dimension in shape {tuple(shape)}")
    if (shape[-1] if len(shape) else 1) % fmt.block:
        raise ValueError(f"the last axis of {tuple(shape)} is not a multiple of {format_name}'s block of {fmt.block}")
    return prod(shape) // fmt.block * fmt.bytes


class Stored(Record, eq=False):
    """A tensor as raw bytes. `shape` is row-major, torch order, [out, in]; `data` is uint8, 1-D, maybe read-only.

    order: of a matrix whose inputs do not lie in their own order. Column j of the data is input order[j].
    """

    format: str
    shape: tuple[int, ...]
    data: np.ndarray
    order: np.ndarray | None = None

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
        if not self.shape or (len(self.shape) == 1 and _KNOWN[self.format].block > 1):
            raise ValueError(f"{self.format} of shape {self.shape} has no rows to move")
        return self.data.reshape(self.shape[0], stored_bytes(self.format, self.shape[1:]) if self.nbytes else 0)

    def blocks(self) -> np.ndarray:
        """The bytes as an array of blocks with named fields, no copy."""
        return self.data.view(layout_of(self.format))

    def rows(self, start: int, stop: int) -> Stored:
        """Rows start..stop-1 of the first axis, as a view."""
        if not 0 <= start <= stop <= self.shape[0]:
            raise ValueError(f"rows {start}:{stop} lie outside shape {self.shape}")
        return Stored(self.format, (stop - start, *self.shape[1:]), self.by_row()[start:stop].reshape(-1), self.order)

    def columns(self, start: int, stop: int) -> Stored:
        """Elements start..stop-1 of each row of a matrix, as a copy; ValueError unless they are whole blocks."""
        own = in_own_order(self)
        block, size = _KNOWN[own.format].block, _KNOWN[own.format].bytes
        if start % block or stop % block:
            raise ValueError(f"columns {start}:{stop} are not whole blocks of {own.format}, which have {block}")
        rows = own.by_row()[:, start // block * size : stop // block * size]
        return Stored(own.format, (own.shape[0], stop - start), np.ascontiguousarray(rows).reshape(-1))

    def entry(self, index: int) -> Stored:
        """Entry `index` of the first axis, as a view without that axis."""
        one = self.rows(index, index + 1)
        return Stored(one.format, one.shape[1:], one.data)

    def take_rows(self, index: np.ndarray) -> Stored:
        """The rows named by `index`, in that order, as a copy of their bytes."""
        return Stored(self.format, (len(index), *self.shape[1:]), self.by_row()[index].reshape(-1), self.order)


def from_float(array: np.ndarray) -> Stored:
    """A float32 or float16 array as a `Stored` in its own precision."""
    names = {"float32": "F32", "float16": "F16"}
    if array.dtype.name not in names:
        raise ValueError(f"cannot store {array.dtype}; give float32 or float16")
    return Stored(names[array.dtype.name], array.shape, np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def in_own_order(stored: Stored) -> Stored:
    """The same matrix without an order of inputs, in float16 where it had one."""
    return stored if stored.order is None else from_float(dequantize(stored).astype(np.float16))


def integers(stored: Stored) -> np.ndarray:
    """A table of whole numbers."""
    return stored.data.view("<i4" if stored.format == "I32" else "<i8").reshape(stored.shape)


def dequantize(stored: Stored) -> np.ndarray:
    """Decode to float32, bit for bit as ggml defines each format. Result has `stored.shape` and owns its memory; its
    inputs are in their own order."""
    block = _WEIGHTS[stored.format].block
    decode = _DECODERS[stored.format]
    blocks = stored.blocks()
    out = np.empty((len(blocks), block), dtype=np.float32)
    step = _CHUNK // block
    with np.errstate(invalid="ignore", over="ignore"):  # a scale may be inf or nan: the caller judges the values
        for start in range(0, len(blocks), step):
            decode(blocks[start : start + step], out[start : start + step])
    values = out.reshape(stored.shape)
    return values if stored.order is None else np.take(values, np.argsort(stored.order), axis=1)


def eight_bit_floats() -> np.ndarray:
    """What each of the 256 codes of F8_E4M3 means: a sign, four bits of exponent, three of mantissa, no infinities."""
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, (codes & 7).astype(np.float32)
    values = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent.astype(float) - 7))
    values[(codes & 127) == 127] = np.nan
    return np.where(codes & 128, -values, values).astype(np.float32)


EIGHT_BIT_FLOATS = eight_bit_floats()


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


def _q4_z(b: np.ndarray, out: np.ndarray) -> None:
    _nibbles(b["qs"], out)
    out -= _column(b["z"])
    out *= _column(b["d"])


def _f8_32(b: np.ndarray, out: np.ndarray) -> None:
    np.multiply(EIGHT_BIT_FLOATS[b["qs"]], _column(b["d"]), out=out)


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


def _f8_e8m0(b: np.ndarray, out: np.ndarray) -> None:
    out[:, 0] = np.where(b["e"] == 255, np.nan, np.ldexp(np.float32(1), b["e"].astype(np.int32) - 127))


def _mxfp4(b: np.ndarray, out: np.ndarray) -> None:
    out[:, :16] = FOUR_BIT_FLOATS[b["qs"] & np.uint8(15)]
    out[:, 16:] = FOUR_BIT_FLOATS[b["qs"] >> np.uint8(4)]
    np.ldexp(out, b["e"].astype(np.int32)[:, None] - 127, out=out)


def _column(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float32)[:, None]


def to_nibbles(codes: np.ndarray) -> np.ndarray:
    """The opposite of _nibbles: (…, 32) codes -> (…, 16) bytes."""
    return codes[..., :16] | (codes[..., 16:] << np.uint8(4))


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


def group_scales(b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales and minimums of blocks of Q4_K or Q5_K, (blocks, 8) each: eight groups of 32, each with a 6-bit scale and
    a 6-bit minimum packed into 12 bytes.

    Bytes 0-3 and 4-7 hold the six bits of groups 0-3 (scales, minimums); their top two bits and the nibbles of
    bytes 8-11 make up groups 4-7.
    """
    first, second, third = b["scales"][:, 0], b["scales"][:, 1], b["scales"][:, 2]
    low6, top2 = np.uint8(0x3F), np.uint8(0x30)
    scale = np.concatenate([first & low6, (third & np.uint8(15)) | ((first >> np.uint8(2)) & top2)], axis=1)
    minimum = np.concatenate([second & low6, (third >> np.uint8(4)) | ((second >> np.uint8(2)) & top2)], axis=1)
    return _column(b["d"]) * scale, _column(b["m"]) * minimum


def _scale_groups(b: np.ndarray, out: np.ndarray) -> None:
    scales, minimums = group_scales(b)
    groups = out.reshape(-1, 8, 32)
    groups *= scales[:, :, None]
    groups -= minimums[:, :, None]


_DECODERS: dict[str, Callable[[np.ndarray, np.ndarray], None]] = {
    "F32": _plain,
    "F16": _plain,
    "BF16": _bf16,
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q4_Z": _q4_z,
    "F8_32": _f8_32,
    "F8_E8M0": _f8_e8m0,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "MXFP4": _mxfp4,
}
