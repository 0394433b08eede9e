"""K and V of few bits as the tall side of products: each lane loads the elements that it must hold as an operand.

A tensor-core instruction multiplies 16 rows by 8 columns. Tokens of K, and elements of V, are its rows; its columns are
the heads that share them, in two parts each (narrow_tiles.py says why), so that four heads fill them. The order of
tokens and of elements is free as long as both sides of a product agree, so it is the order in which lanes load them:

- lane 4 g + c of a warp holds row g of a product's left side (and g + 8, ...) and every fourth run of its inner side;
- a tile of tokens is cut into quarters c of places 8 w + 4 x + l. K's rows are in the order (w, l, c, x), so a lane
  finds four neighbouring tokens' scores of one head in its own registers: it loads their scales with one instruction,
  and weights go to the lanes that multiply V as words of four;
- V lies transposed in its blocks (heads.py), and a lane reads a quarter's tokens of an element.
"""

from __future__ import annotations

import triton
import triton.language as tl

from twostroke.ops.cuda.kernels.narrow_tiles import FINE, WHOLE, WHOLE_BITS, codes_of


@triton.jit
def lanes():
    """(1, 8) and (4, 1): row and quarter of a warp's lanes. The first axis is spread over neighbouring lanes."""
    return tl.arange(0, 8)[None, :], tl.arange(0, 4)[:, None]


@triton.jit
def load_blocks(table, n0, end, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """(4, 8): the block that each lane reads of K, and of V. 0 past the end."""
    g, c = lanes()
    k_first = n0 + (g // 2 + c * 0) * (TILE // 4)
    v_first = n0 + (g * 0 + c) * (TILE // 4)
    k_ids = tl.load(table + k_first // BLOCK, mask=k_first < end, other=0)
    v_ids = tl.load(table + v_first // BLOCK, mask=v_first < end, other=0)
    return k_ids, v_ids


@triton.jit
def token_places(n0, TILE: tl.constexpr):
    """(TILE,): the places of K's rows."""
    row = tl.arange(0, TILE)
    return n0 + row % 8 // 2 * (TILE // 4) + row // 32 * 8 + row % 2 * 4 + row // 8 % 4


@triton.jit
def load_keys(
    keys, ids, n0, begin, end, block_stride, first: tl.constexpr,
    WIDTH: tl.constexpr, BYTES: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """(TILE, BYTES / 4) words of K, the bytes from `first` on. WIDTH: bytes of a token."""
    RUN: tl.constexpr = BYTES // 16  # words of a lane
    ALIGNED: tl.constexpr = 4 if WIDTH % 16 == 0 else 2 if WIDTH % 8 == 0 else 1
    g, c = lanes()
    token = (g // 2 * (TILE // 4)) % BLOCK + g % 2 * 4
    mine = ids.to(tl.int64) * (block_stride // 4) + (token * (WIDTH // 4) + c * RUN + first // 4)
    mine = tl.multiple_of(mine, (min(ALIGNED, RUN), min(ALIGNED, RUN)))
    row = tl.arange(0, TILE // 8)
    more = (row // 4 * 8 + row % 4)[None, None, :, None] * (WIDTH // 4) + tl.arange(0, RUN)[None, None, None, :]
    at = (keys + mine)[:, :, None, None] + more
    if MASKED or WIDTH % BYTES != 0:
        word = first // 4 + c * RUN
        inside = (g * 0 + word)[:, :, None, None] + tl.arange(0, RUN)[None, None, None, :] < WIDTH // 4
        place = tl.trans(tl.reshape(token_places(n0, TILE), (TILE // 8, 8)))[None, :, :, None]
        found = tl.load(at, mask=inside & (place >= begin) & (place < end), other=0)
    else:
        found = tl.load(at)
    return tl.reshape(tl.permute(found, (2, 1, 0, 3)), (TILE, BYTES // 4))


@triton.jit
def load_scales(
    scales, ids, n0, begin, end, scale_block_stride, BLOCK: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """(TILE, 4) scales of K's rows, the same for each of four heads."""
    g, c = lanes()
    token = (g // 2 * (TILE // 4)) % BLOCK + g % 2 * 4
    mine = tl.multiple_of(ids.to(tl.int64) * scale_block_stride + (token + c * 0), (4, 4))
    more = (tl.arange(0, TILE // 32) * 8)[None, None, :, None] + tl.arange(0, 4)[None, None, None, :]
    at = (scales + mine)[:, :, None, None] + more
    if MASKED:
        place = tl.reshape(token_places(n0, TILE), (TILE // 32, 4, 8))
        place = tl.permute(place, (2, 0, 1))[None, :, :, :]
        found = tl.load(at, mask=(place >= begin) & (place < end), other=0.0)
    else:
        found = tl.load(at)
    return tl.reshape(tl.permute(found, (2, 3, 1, 0)), (TILE, 4))


@triton.jit
def load_values(
    values, ids, n0, end, block_stride, WIDTH: tl.constexpr, PART: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """(PART, TILE / 4) words of V: row d holds byte d of the tile's tokens, quarter after quarter."""
    RUN: tl.constexpr = TILE // 16  # words of a lane
    g, c = lanes()
    mine = ids.to(tl.int64) * (block_stride // 4) + (g * (BLOCK // 4) + c * (TILE // 4) % BLOCK // 4)
    mine = tl.multiple_of(mine, (RUN, RUN))
    row = tl.arange(0, PART // 8)
    more = row[None, None, :, None] * (8 * BLOCK // 4) + tl.arange(0, RUN)[None, None, None, :]
    at = (values + mine)[:, :, None, None] + more
    if MASKED or WIDTH != PART:
        some = (row[None, None, :] * 8 + g[:, :, None] < WIDTH) & (n0 + c * (TILE // 4) < end)[:, :, None]
        found = tl.load(at, mask=some[:, :, :, None], other=0)
    else:
        found = tl.load(at)
    return tl.reshape(tl.permute(found, (2, 1, 0, 3)), (PART, TILE // 4))


@triton.jit
def as_left(
    words, ROWS: tl.constexpr, INNER: tl.constexpr, FORMAT: tl.constexpr, RUN: tl.constexpr, FAST: tl.constexpr
):
    """(ROWS, INNER) elements: runs of RUN from four lanes in turn."""
    codes = tl.reshape(codes_of(words, FORMAT, FAST), (ROWS, 4, INNER // 4 // RUN, RUN))
    return tl.reshape(tl.permute(codes, (0, 2, 1, 3)), (ROWS, INNER))


@triton.jit
def two_columns(x, FORMAT: tl.constexpr):
    """x (N, R), at most 127 (fp8: 32), as two parts in turn, (N, 2 R): int8, or float16 for fp8."""
    if FORMAT == 3:
        first = x.to(tl.float16)
        both = tl.join(first, (x - first.to(tl.float32)).to(tl.float16))
    else:
        coarse = x + WHOLE
        fine = (x - (coarse - WHOLE)) * FINE + WHOLE
        both = tl.join(coarse, fine).to(tl.int32, bitcast=True).to(tl.int8)
    return tl.reshape(both, (x.shape[0], 2 * x.shape[1]))


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
    """Sums (N, 2 R) of two parts' products as one, (N, R) float32."""
    if FORMAT != 3:
        parts = parts.to(tl.float32, bitcast=True) - WHOLE
    first, second = tl.split(tl.reshape(parts, (parts.shape[0], parts.shape[1] // 2, 2)))
    if FORMAT == 3:
        return first + second
    return first + second * (1.0 / FINE)


@triton.jit
def by_heads(x, scale):
    """x (N, R) times (N, 4) of four equal columns."""
    N: tl.constexpr = x.shape[0]
    R: tl.constexpr = x.shape[1]
    return tl.reshape(tl.reshape(x, (N, R // 4, 4)) * scale[:, None, :], (N, R))


@triton.jit
def as_right(parts, TILE: tl.constexpr, RUN: tl.constexpr):
    """Weights (TILE, 2 R) of tokens in the order of K's rows, in the order of V's inner side."""
    ordered = tl.reshape(parts, (TILE // 32, 4, 4, 2, parts.shape[1]))  # w, l, c, x
    if RUN == 8:
        ordered = tl.permute(ordered, (0, 2, 3, 1, 4))
    else:
        ordered = tl.permute(ordered, (0, 3, 2, 1, 4))
    return tl.reshape(ordered, (TILE, parts.shape[1]))
