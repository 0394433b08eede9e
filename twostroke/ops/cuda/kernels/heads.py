"""What kernels do with one head of a token: norm and rotate it, write it to the cache, read tiles back.

Formats of the cache, a compile-time number: 0 floats as they are, 1 int8, 3 fp8 (both with a float32 scale for each
token and head; the numbers are those of narrow_tiles.py). K lies token by token. V of eight bits lies transposed within
its block, element by element with the block's tokens side by side: that is how the tensor cores take it
(tall_decode.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

FLOATS, INT8, FP8 = 0, 1, 3
FORMATS = {"float32": FLOATS, "float16": FLOATS, "bfloat16": FLOATS, "int8": INT8, "fp8": FP8}


@triton.jit
def head_scale(heads, eps, HEAD: tl.constexpr, WIDE: tl.constexpr, NORM: tl.constexpr):
    """1 / rms of each head; `heads` are pointers (M,) to their first elements. Ones where there is no norm."""
    if NORM:
        dims = tl.arange(0, WIDE)
        x = tl.load(heads[:, None] + dims[None, :], mask=(dims < HEAD)[None, :], other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, axis=1) / HEAD + eps)
    else:
        scale = tl.full(heads.shape, 1.0, tl.float32)
    return scale


@triton.jit
def turned(
    heads, mask, dims, scale, norm_ptr, cos_ptr, sin_ptr, position,
    HEAD: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, EACH: tl.constexpr = False,
):  # fmt: skip
    """Elements `dims` of the heads, normed and rotated: (M, len(dims)) float32. HALF: rotated pairs, 0 for none. EACH:
    `position` (M, 1) is that of each head, else of all of them."""
    inside = mask[:, None] & (dims < HEAD)[None, :]
    x = tl.load(heads[:, None] + dims[None, :], mask=inside, other=0.0).to(tl.float32)
    if NORM:
        x = x * scale[:, None] * tl.load(norm_ptr + dims, mask=dims < HEAD, other=0.0)[None, :]
    if HALF > 0:
        other = tl.where(dims < HALF, dims + HALF, tl.where(dims < 2 * HALF, dims - HALF, dims))
        y = tl.load(heads[:, None] + other[None, :], mask=inside, other=0.0).to(tl.float32)
        if NORM:
            y = y * scale[:, None] * tl.load(norm_ptr + other, mask=dims < HEAD, other=0.0)[None, :]
        pair = tl.where(dims < HALF, dims, dims - HALF)
        moves = dims < 2 * HALF
        if EACH:
            cos = tl.load(cos_ptr + position * HALF + pair[None, :], mask=moves[None, :], other=1.0)
            sin = tl.load(sin_ptr + position * HALF + pair[None, :], mask=moves[None, :], other=0.0)
            x = x * cos + y * tl.where((dims < HALF)[None, :], -sin, sin)
        else:
            cos = tl.load(cos_ptr + position * HALF + pair, mask=moves, other=1.0)
            sin = tl.load(sin_ptr + position * HALF + pair, mask=moves, other=0.0)
            sin = tl.where(dims < HALF, -sin, sin)
            x = x * cos[None, :] + y * sin[None, :]
    return x


@triton.jit
def rounded(x):
    """To the nearest whole number, half to even: a float32 near 1.5 · 2^23 has no bits for a fraction."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def best_factor(x, DTYPE: tl.constexpr):
    """(M,): of eight factors from 1 to 2, the one by which fp8's scale should be larger than the largest element asks
    for. Factors are eighths, so that their products with codes are exact. Errors are squared and added as whole numbers
    of 1/64, so that the order of the sum does not matter."""
    best, error = tl.full((x.shape[0],), 1.0, tl.float32), tl.full((x.shape[0],), 0x7FFFFFFF, tl.int32)
    factor = 1.0
    for _ in tl.static_range(8):
        off = tl.clamp(tl.div_rn(x, factor), -448.0, 448.0).to(DTYPE).to(tl.float32) * factor - x
        found = tl.sum((off * off * 64.0).to(tl.int32), axis=1)
        best, error = tl.where(found < error, factor, best), tl.minimum(found, error)
        factor = factor + 0.125
    return best


@triton.jit
def store_head(
    codes, scales, heads, mask, norm_ptr, eps, cos_ptr, sin_ptr, position,
    HEAD: tl.constexpr, WIDE: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, FORMAT: tl.constexpr,
    STEP: tl.constexpr, EACH: tl.constexpr = False,
):  # fmt: skip
    """Norm, rotate and write one token's heads. `codes` and `scales` (M,) point to the places of each head, whose
    elements are STEP apart. Returns what was stored as attention will read it, (M, WIDE) float32.

    Divisions are rounded as IEEE 754 requires. The compiler's `/` may be wrong in the last bit; a value halfway between
    two codes would then get another code than in the specification."""
    inverse_rms = head_scale(heads, eps, HEAD, WIDE, NORM)
    dims = tl.arange(0, WIDE)
    x = turned(heads, mask, dims, inverse_rms, norm_ptr, cos_ptr, sin_ptr, position, HEAD, HALF, NORM, EACH)
    inside = mask[:, None] & (dims < HEAD)[None, :]
    if FORMAT == 0:
        code = x.to(codes.dtype.element_ty)
        stored = code.to(tl.float32)
    else:
        largest: tl.constexpr = 127.0 if FORMAT == 1 else 448.0
        scale = tl.div_rn(tl.max(tl.abs(x), axis=1), largest)
        x = tl.div_rn(x, tl.where(scale > 0, scale, 1.0)[:, None])
        if FORMAT == 3:
            factor = best_factor(x, codes.dtype.element_ty)
            scale *= factor
            x = tl.div_rn(x, factor[:, None])
        code = tl.clamp(rounded(x) if FORMAT == 1 else x, -largest, largest).to(codes.dtype.element_ty)
        tl.store(scales, scale, mask=mask)
        stored = code.to(tl.float32) * scale[:, None]
    tl.store(codes[:, None] + dims[None, :] * STEP, code, mask=inside)
    return stored


@triton.jit
def in_order(tile):
    """The (M, N) tile as it is, for products that must add in one order. Where mma.sync multiplies numbers that were
    loaded as bytes, the compiler permutes the inputs, so that each instruction adds another sixteen of them than wgmma
    does. It looks for the load through casts and products, but not through a sum, here of one number."""
    return tl.sum(tile.to(tl.float32)[:, :, None], axis=2).to(tile.dtype)


@triton.jit
def load_tile(
    base, blocks, offsets, valid, block_stride, token_stride, STEP: tl.constexpr,
    HEAD: tl.constexpr, WIDE: tl.constexpr, MASKED: tl.constexpr, DTYPE: tl.constexpr, ORDERED: tl.constexpr = False,
):  # fmt: skip
    """Codes of N tokens of one head, its elements STEP apart, as DTYPE, (N, WIDE); their scales are not applied. Zero
    where not `valid`. ORDERED: products with them add in one order."""
    rows = base + blocks.to(tl.int64) * block_stride + offsets * token_stride
    dims = tl.arange(0, WIDE)
    if MASKED or HEAD != WIDE:
        inside = valid[:, None] & (dims < HEAD)[None, :]
        tile = tl.load(rows[:, None] + dims[None, :] * STEP, mask=inside, other=0.0).to(DTYPE)
    else:
        tile = tl.load(rows[:, None] + dims[None, :] * STEP).to(DTYPE)
    if ORDERED:
        tile = in_order(tile)
    return tile
