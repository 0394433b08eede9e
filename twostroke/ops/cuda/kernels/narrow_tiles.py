"""Codes of few bits as operands of a product, loaded so that each lane loads the elements that it must hold.

A tensor-core operand has RUN neighbours along the product's inner side in one lane, but the order of the elements along
that side is free as long as both operands agree. So a lane loads 16 bytes with one instruction, and nothing moves
through shared memory. Codes are kept as words of four. The other operand (x, q or p) is split into two parts of eight
bits or more, which keeps sixteen bits of it: int8 and int4 are multiplied as integers, fp8 as float16.
"""

from __future__ import annotations

import triton
import triton.language as tl

# The bits of 1.5 · 2^23 as float32: an integer added to them gives the float of that integer plus 1.5 · 2^23.
WHOLE, WHOLE_BITS = tl.constexpr(12582912.0), tl.constexpr(0x4B400000)
FINE = tl.constexpr(254.0)  # steps of the second part in one of the first

# A lane holds four neighbouring bytes of a product's operand, or two floats; where the operand was joined from parts,
# Triton up to 3.7 makes it twice as many. Operands are given in that order: otherwise lanes would exchange all weights.
JOINED = tl.constexpr(2 if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 8) else 1)

INT8, INT4, FP8, MXFP4 = 1, 2, 3, 4
BYTES = 64  # of a row of the matrix in a slice


@triton.jit
def bytes_of(words):
    """The four bytes of each word side by side, (..., 2, 2) int8: a reinterpretation, no data moves."""
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
def inner_order(C: tl.constexpr, RUN: tl.constexpr):
    """The element of a token, of C loaded by four lanes, at each place of a product's inner side."""
    k = tl.arange(0, C)
    return k // RUN % 4 * (C // 4) + k // (4 * RUN) * RUN + k % RUN


@triton.jit
def whole_parts(x):
    """x, over its unit, as two parts: about first + second / FINE."""
    coarse = x + WHOLE
    first = coarse.to(tl.int32, bitcast=True).to(tl.int8)
    second = ((x - (coarse - WHOLE)) * FINE + WHOLE).to(tl.int32, bitcast=True).to(tl.int8)
    return first, second


@triton.jit
def as_tall(codes, W: tl.constexpr, G: tl.constexpr, EIGHTS: tl.constexpr, RUN: tl.constexpr):
    """(G · W, 8 EIGHTS, 64) operands of a product, inputs in the lanes' order."""
    codes = tl.reshape(codes, (G, EIGHTS, W, 8, 4, 16 // RUN, RUN))
    return tl.reshape(tl.permute(codes, (0, 2, 1, 3, 5, 4, 6)), (G * W, EIGHTS * 8, 64))
