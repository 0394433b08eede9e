"""Matrices of experts in four bits, laid out so that the tensor cores take the codes where they were loaded.

A row is made of slices of 128 inputs (zeros fill the last one), 16 words of 32 bits each. Four neighbouring lanes load
a slice, four words each; word j of a lane has eight codes of the slice's group j, those of the inputs that an operand
of the tensor cores keeps in that lane. So codes become floats in registers and stay there, and x keeps its order.

    lane q, word j       inputs 32 j + 16 t + 8 h + 2 q + i      t, h, i: 0 or 1
    pair 2 t + h         inputs i = 0 and i = 1 of the word, in the lower and the upper half of its bits

MXFP4   codes of four bits (a sign, two bits of exponent, one of mantissa) times 2^(s - 127), s a byte for each group.
        The bits of a code lie in a word so that a shift and a mask put them where bfloat16 has them: that is the code's
        value times 2^-126. The product with 2^(s - 1) is exact.
INT4    bfloat16(code · scale + least), both bfloat16, for each group.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from twostroke.ops.cuda.kernels.narrow_tiles import INT4, MXFP4
from twostroke.ops.cuda.kernels.quantized import GROUP, SLICE, Int4
from twostroke.ops.formats import FOUR_BIT_FLOATS

WORDS = 16  # of a slice
LARGEST = 128  # exponent of a group whose products with 2^(s - 1) are finite in bfloat16
SIGNS, BODIES = (15, 12, 9, 14), (6, 3, 0, None)  # places of a pair's sign and of its other bits in half a word
LAST_BODY = (11, 10, 13)  # those of the last pair: what the others leave


@dataclass(frozen=True, slots=True, eq=False)
class FourBits:
    """The 4-bit weights of one expert."""

    codes: Tensor  # (out, slices · 16) int32
    scales: Tensor  # (out, slices) int32: four bytes for MXFP4; (out, slices · 4): scale, and least value above it
    bias: Tensor | None
    inputs: int
    format: int  # MXFP4 or INT4


def from_int4(weight: Int4) -> FourBits:
    """A matrix of quantized.py with its codes in this order."""
    rows, slices = weight.codes.shape[0], weight.codes.shape[1] * 2 // SLICE
    pairs = weight.codes.view(rows, -1, GROUP // 2)
    codes = torch.cat([pairs & 15, pairs >> 4], dim=2).view(rows, -1)
    scales = weight.scales.transpose(0, 1).reshape(rows, slices * 4).contiguous()
    return FourBits(pack_words(codes, INT4), scales, weight.bias, weight.inputs, INT4)


def from_mxfp4(blocks: Tensor, bias: Tensor | None) -> FourBits:
    """blocks (out, groups, 17) uint8: an exponent, and codes of inputs j and j + 16 in a byte."""
    rows, groups, _ = blocks.shape
    pairs, slices = blocks[:, :, 1:], -(-groups * GROUP // SLICE)
    codes = torch.cat([pairs & 15, pairs >> 4], dim=2).view(rows, -1)
    exponents = torch.nn.functional.pad(blocks[:, :, 0], (0, slices * 4 - groups)).contiguous()
    return FourBits(pack_words(codes, MXFP4), exponents.view(torch.int32), bias, groups * GROUP, MXFP4)


def decoded(weight: FourBits, dtype: torch.dtype) -> Tensor:
    """(out, in) floats."""
    codes, rows = unpack_words(weight.codes, weight.format, weight.inputs).float(), weight.codes.shape[0]
    if weight.format == INT4:
        words = weight.scales.repeat_interleave(GROUP, dim=1)[:, : weight.inputs]
        scale, least = (words << 16).view(torch.float32), (words & -65536).view(torch.float32)
        return (codes * scale + least).bfloat16().to(dtype)
    values = torch.tensor(FOUR_BIT_FLOATS, device=codes.device)[codes.long()]
    exponents = weight.scales.view(torch.uint8).view(rows, -1).int()
    powers = torch.where(exponents > 0, exponents << 23, 1 << 22).view(torch.float32)  # the bits of 2^(s - 127)
    return (values * powers.repeat_interleave(GROUP, dim=1)[:, : weight.inputs]).to(dtype)


def random_mxfp4(rows: int, columns: int, bias: Tensor | None, generator: torch.Generator) -> FourBits:
    """Any codes, under scales that make their deviation about 1 / √columns."""
    slices, limit = -(-columns // SLICE), 1 << 31
    sizes = {"device": generator.device, "generator": generator, "dtype": torch.int32}
    codes = torch.randint(-limit, limit, (rows, slices * WORDS), **sizes)  # type: ignore[call-overload]
    exponent = 127 + round(math.log2(columns**-0.5 / float(np.std(FOUR_BIT_FLOATS))))
    scales = torch.full((rows, slices), exponent * 0x01010101, dtype=torch.int32, device=generator.device)
    return FourBits(codes, scales, bias, columns, MXFP4)


def pack_words(codes: Tensor, fmt: int) -> Tensor:
    """(out, in) codes of 0 to 15, uint8 -> (out, slices · 16) int32."""
    rows, width = codes.shape
    slices = -(-width // SLICE)
    codes = torch.nn.functional.pad(codes, (0, slices * SLICE - width))
    # (out, slice, j, t, h, q, i) -> (out, slice, q, j, pair, i)
    parts = codes.view(rows, slices, 4, 2, 2, 4, 2).permute(0, 1, 5, 2, 3, 4, 6).reshape(rows, -1, 4, 2).int()
    words = torch.zeros(rows, slices * WORDS, dtype=torch.int32, device=codes.device)
    for pair in range(4):
        for half in range(2):
            words |= placed(parts[:, :, pair, half], pair, fmt) << 16 * half
    return words


def placed(codes: Tensor, pair: int, fmt: int) -> Tensor:
    """The bits of a code at their places in half a word."""
    if fmt == INT4:
        return codes << 4 * pair
    body, sign = BODIES[pair], codes >> 3 << SIGNS[pair]
    if body is not None:
        return sign | (codes & 7) << body
    for bit, place in enumerate(LAST_BODY):
        sign |= (codes >> bit & 1) << place
    return sign


def unpack_words(words: Tensor, fmt: int, width: int) -> Tensor:
    """The codes, (out, in) uint8."""
    rows = words.shape[0]
    parts = torch.empty(rows, words.shape[1], 4, 2, dtype=torch.uint8, device=words.device)
    for pair in range(4):
        for half in range(2):
            parts[:, :, pair, half] = taken(words >> 16 * half & 0xFFFF, pair, fmt).to(torch.uint8)
    natural = parts.view(rows, -1, 4, 4, 2, 2, 2).permute(0, 1, 3, 4, 5, 2, 6)
    return natural.reshape(rows, -1)[:, :width]


def taken(half: Tensor, pair: int, fmt: int) -> Tensor:
    if fmt == INT4:
        return half >> 4 * pair & 15
    body, sign = BODIES[pair], (half >> SIGNS[pair] & 1) << 3
    if body is not None:
        return sign | (half >> body & 7)
    for bit, place in enumerate(LAST_BODY):
        sign |= (half >> place & 1) << bit
    return sign


@triton.jit
def pair_bits(words, PAIR: tl.constexpr, FORMAT: tl.constexpr):
    """The bits of two numbers in bfloat16: MXFP4 times 2^-126, or 128 + code."""
    if FORMAT == 2:
        return ((words >> (4 * PAIR)) & 0x000F000F) | 0x43004300
    elif PAIR < 3:
        return (words << (3 * PAIR)) & -0x7E3F7E40  # 0x81C081C0: a sign and three bits of each half
    else:
        low = ((words >> 5) & 0x01400140) | ((words >> 3) & 0x00800080)
        return low | ((words << 1) & -0x7FFF8000)  # 0x80008000


@triton.jit
def pair_values(bits, scale, FORMAT: tl.constexpr, FAST: tl.constexpr):
    """Two weights each. scale: MXFP4 twice 2^(s - 1) in bfloat16; INT4 scale and, above it, least value. The
    interpreter gets float32."""
    if FAST and FORMAT == 2:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 s, m, k, p;
            prmt.b32 s, $3, $3, 0x1010;
            prmt.b32 m, $3, $3, 0x3232;
            mov.b32 k, 0x43004300;
            sub.bf16x2 p, $2, k;
            fma.rn.bf16x2 p, p, s, m;
            mov.b32 {$0, $1}, p;
            }""",
            "=h,=h,r,r", [bits, scale], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=1,
        )  # fmt: skip
    elif FAST:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 p; mul.rn.bf16x2 p, $2, $3; mov.b32 {$0, $1}, p; }",
            "=h,=h,r,r", [bits, scale], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        low, high = (bits << 16).to(tl.float32, bitcast=True), (bits & -65536).to(tl.float32, bitcast=True)
        factor = (scale << 16).to(tl.float32, bitcast=True)
        if FORMAT == 2:
            least = (scale & -65536).to(tl.float32, bitcast=True)
            low = ((low - 128.0) * factor + least).to(tl.bfloat16).to(tl.float32)
            high = ((high - 128.0) * factor + least).to(tl.bfloat16).to(tl.float32)
            return low, high
        else:
            return low * factor, high * factor


@triton.jit
def weights_of(words, scale, FORMAT: tl.constexpr, FAST: tl.constexpr):
    """(rows, 16) words of a slice and the scale of each -> (rows, 16, t, h, i) weights, bfloat16; the interpreter gets
    float32."""
    a, b = pair_values(pair_bits(words, 0, FORMAT), scale, FORMAT, FAST)
    c, d = pair_values(pair_bits(words, 1, FORMAT), scale, FORMAT, FAST)
    e, f = pair_values(pair_bits(words, 2, FORMAT), scale, FORMAT, FAST)
    g, h = pair_values(pair_bits(words, 3, FORMAT), scale, FORMAT, FAST)
    return tl.join(tl.join(tl.join(a, e), tl.join(c, g)), tl.join(tl.join(b, f), tl.join(d, h)))


@triton.jit
def row_words(at, FAST: tl.constexpr):
    """The words at these addresses, equal along a row. In assembly, so that they are loaded in the layout of the codes
    that they belong to: the compiler would choose another one, and move them. It loads equal ones of a lane once."""
    if FAST:
        return tl.inline_asm_elementwise(
            "ld.global.nc.b32 $0, [$1];", "=r,l", [at], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return tl.load(at)


@triton.jit
def slice_words(codes_ptr, start, row, there, part, SLICES: tl.constexpr):
    """(rows, 16): the words of slice `part` of a row; zeros past the end. start: the matrix's place."""
    at = tl.multiple_of(start + (row.to(tl.int64) * SLICES + part) * 16, 16)
    inside = there & (part < SLICES)
    return tl.load(codes_ptr + at[:, None] + tl.arange(0, 16)[None, :], mask=inside[:, None], other=0)


@triton.jit
def slice_scales(scales_ptr, start, row, part, SLICES: tl.constexpr, FORMAT: tl.constexpr, FAST: tl.constexpr):
    """(rows, 16): what each word of slice `part` of a row is scaled with, as the file has it."""
    column = tl.arange(0, 16)[None, :]
    at = row.to(tl.int64) * SLICES + tl.minimum(part, SLICES - 1)  # past the end codes and x are zero
    if FORMAT == 2:
        return tl.load(scales_ptr + tl.multiple_of(start + at * 4, 4)[:, None] + column % 4)
    else:
        return row_words(scales_ptr + ((start + at)[:, None] + column * 0), FAST)


@triton.jit
def word_scales(found, FORMAT: tl.constexpr):
    """slice_scales as pair_values takes them."""
    if FORMAT == 2:
        return found
    else:
        return ((found >> (tl.arange(0, 16) % 4 * 8)[None, :]) & 255) * 0x00800080 + 0x3F003F00
