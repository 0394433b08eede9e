"""Codes of few bits as operands of a product, straight from memory: what a lane loads is what it must hold.

The tensor cores take neighbours along a product's inner side in one lane (RUN of them), but the order of the elements
along that side is free as long as both operands agree. So 16 bytes go from memory into a lane with one load, and
nothing moves through shared memory. Codes travel as words of four; x, q or p are cut into two parts, so that eight bits
for each of them keep sixteen: int8 and int4 multiply as whole numbers, fp8 as float16.
"""

from __future__ import annotations

import triton
import triton.language as tl

# 1.5 · 2^23: a whole number added to these bits is its own float, plus this.
WHOLE, WHOLE_BITS = tl.constexpr(12582912.0), tl.constexpr(0x4B400000)
FINE = tl.constexpr(254.0)  # steps of the second part in one of the first


@triton.jit
def bytes_of(words):
    """The four bytes of each word side by side, (..., 2, 2) int8: nothing moves, the words are read in another way."""
    even = tl.join(words.to(tl.int8), (words >> 16).to(tl.int8))
    odd = tl.join((words >> 8).to(tl.int8), (words >> 24).to(tl.int8))
    return tl.join(even, odd)


@triton.jit
def halves_of(words, FAST: tl.constexpr):
    """The same for fp8 codes, as float16."""
    if FAST:
        a, b, c, d = tl.inline_asm_elementwise(
            """{
            .reg .b16 x, y;
            .reg .b32 u, v;
            mov.b32 {x, y}, $4;
            cvt.rn.f16x2.e4m3x2 u, x;
            cvt.rn.f16x2.e4m3x2 v, y;
            mov.b32 {$0, $1}, u;
            mov.b32 {$2, $3}, v;
            }""",
            "=h,=h,=h,=h,r", [words], dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=1,
        )  # fmt: skip
        return tl.join(tl.join(a, c), tl.join(b, d))
    else:
        return bytes_of(words).to(tl.float8e4nv, bitcast=True).to(tl.float16)


@triton.jit
def codes_of(words, FORMAT: tl.constexpr, FAST: tl.constexpr):
    """(..., 2, 2) operands of a product: int8, or float16 of fp8."""
    if FORMAT == 3:
        return halves_of(words, FAST)
    else:
        return bytes_of(words)


@triton.jit
def low_nibbles(words):
    """Sixteen times the low elements of a word of int4 codes, as a word of int8."""
    return ((words << 4) ^ -0x77777778) & -0x0F0F0F10


@triton.jit
def high_nibbles(words):
    return (words ^ -0x77777778) & -0x0F0F0F10


@triton.jit
def two_parts(x, FORMAT: tl.constexpr):
    """x (R, N), at most 127 (fp8: 32), as its two parts one above the other, (2 R, N): int8, or float16 for fp8."""
    if FORMAT == 3:
        first = x.to(tl.float16)
        both = tl.join(first, (x - first.to(tl.float32)).to(tl.float16))
    else:
        coarse = x + WHOLE
        fine = (x - (coarse - WHOLE)) * FINE + WHOLE
        both = tl.join(coarse, fine).to(tl.int32, bitcast=True).to(tl.int8)
    return tl.reshape(tl.permute(both, (2, 0, 1)), (2 * x.shape[0], x.shape[1]))


@triton.jit
def start_sum(rows: tl.constexpr, columns: tl.constexpr, FORMAT: tl.constexpr):
    if FORMAT == 3:
        return tl.zeros((rows, columns), tl.float32)
    else:
        return tl.full((rows, columns), WHOLE_BITS, tl.int32)


@triton.jit
def times(a, b, already, FORMAT: tl.constexpr):
    if FORMAT == 3:
        return tl.dot(a, b, already)
    else:
        return tl.dot(a, b, already, out_dtype=tl.int32)


@triton.jit
def one_sum(parts, FORMAT: tl.constexpr):
    """Sums (2 R, N) of two parts' products as one, (R, N) float32."""
    if FORMAT != 3:
        parts = parts.to(tl.float32, bitcast=True) - WHOLE
    halves = tl.reshape(parts, (2, parts.shape[0] // 2, parts.shape[1]))
    first, second = tl.split(tl.permute(halves, (1, 2, 0)))
    if FORMAT == 3:
        return first + second
    return first + second * (1.0 / FINE)


@triton.jit
def load_blocks(table, n0, end, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """The block of each quarter of the tile from n0 on, 0 past the end."""
    quarter = n0 + tl.arange(0, 4) * (TILE // 4)
    return tl.load(table + quarter // BLOCK, mask=quarter < end, other=0).to(tl.int64)


@triton.jit
def load_keys(
    keys, ids, n0, begin, end, block_stride, token_stride, first,
    WIDTH: tl.constexpr, BYTES: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """(TILE, BYTES / 4) words of K, bytes from `first` on. Row 8 i + 2 c + e is token 2 i + e of quarter c. Four lanes
    share a token, so each must load a quarter of the bytes at a time: what is said of alignment sees to that."""
    inner, place = column_places(n0, BLOCK, TILE)
    rows = tl.reshape((ids * (block_stride // 4))[None, :, None] + inner * (token_stride // 4), (TILE,))
    ALIGNED: tl.constexpr = 4 if WIDTH % 16 == 0 else 2 if WIDTH % 8 == 0 else 1
    rows = tl.multiple_of(rows, min(ALIGNED, BYTES // 16))
    word = first // 4 + tl.arange(0, BYTES // 4)
    at = keys + rows[:, None] + word[None, :]
    if MASKED or WIDTH % BYTES != 0:
        seen = tl.reshape((place >= begin) & (place < end), (TILE,))
        return tl.load(at, mask=seen[:, None] & (word < WIDTH // 4)[None, :], other=0)
    return tl.load(at)


@triton.jit
def as_columns(
    words, C: tl.constexpr, TILE: tl.constexpr, FORMAT: tl.constexpr, RUN: tl.constexpr, FAST: tl.constexpr
):  # fmt: skip
    """(C, TILE) elements of load_keys' words."""
    if FORMAT == 2:
        codes = tl.join(bytes_of(low_nibbles(words)), bytes_of(high_nibbles(words)))
    else:
        codes = codes_of(words, FORMAT, FAST)
    codes = tl.reshape(codes, (TILE, 4, C // 4 // RUN, RUN))
    return tl.reshape(tl.permute(codes, (2, 1, 3, 0)), (C, TILE))


@triton.jit
def inner_order(C: tl.constexpr, RUN: tl.constexpr):
    """The element of a token that as_columns brings to each place of a column."""
    k = tl.arange(0, C)
    return k // RUN % 4 * (C // 4) + k // (4 * RUN) * RUN + k % RUN


@triton.jit
def column_places(n0, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """The tokens of load_keys' columns, (TILE / 8, 4, 2): their places in their blocks, and in all."""
    quarter, pair, e = tl.arange(0, 4) * (TILE // 4), 2 * tl.arange(0, TILE // 8), tl.arange(0, 2)
    within = pair[:, None, None] + e[None, None, :]
    return (quarter % BLOCK)[None, :, None] + within, n0 + quarter[None, :, None] + within


@triton.jit
def load_scales(
    scales, ids, n0, begin, end, scale_block_stride, BLOCK: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """(TILE,) scales in the order of load_keys' columns."""
    inner, place = column_places(n0, BLOCK, TILE)
    at = (scales + ids * scale_block_stride)[None, :, None] + inner
    found = tl.load(at, mask=(place >= begin) & (place < end), other=0.0) if MASKED else tl.load(at)
    return tl.reshape(found, (TILE,))


@triton.jit
def load_values(
    values, ids, n0, end, block_stride, WIDTH: tl.constexpr, PART: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """(4 PART, TILE / 16) words of V: row 4 d + c holds quarter c of byte d."""
    quarter, dims = tl.arange(0, 4) * (TILE // 4), tl.arange(0, PART)
    rows = (ids * (block_stride // 4) + quarter % BLOCK // 4)[None, :] + (dims * (BLOCK // 4))[:, None]
    rows = tl.multiple_of(tl.reshape(rows, (4 * PART,)), TILE // 16)
    at = values + rows[:, None] + tl.arange(0, TILE // 16)[None, :]
    if MASKED or WIDTH != PART:
        some = tl.reshape((n0 + quarter < end)[None, :] & (dims < WIDTH)[:, None], (4 * PART,))
        return tl.load(at, mask=some[:, None], other=0)
    return tl.load(at)


@triton.jit
def as_rows(
    words, seen, PART: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr, FORMAT: tl.constexpr,
    RUN: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """(TILE, PART) elements of load_values' words: row 4 RUN w + RUN c + b is token RUN w + b of quarter c."""
    codes = tl.reshape(codes_of(words, FORMAT, FAST), (PART, 4, TILE // 4))
    if MASKED and FORMAT == 3:  # where not `seen` (4, TILE / 4) may lie what is no number
        codes = tl.where(seen[None, :, :], codes, 0.0)
    codes = tl.reshape(codes, (PART, 4, TILE // 4 // RUN, RUN))
    return tl.reshape(tl.permute(codes, (2, 1, 3, 0)), (TILE, PART))
