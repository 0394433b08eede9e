"""Latent attention of single tokens that have few heads: the cache is read at the memory's pace.

A context is cut into as many equal parts as fill the device; the kernel that follows merges their results. A program
takes a part in tiles of entries, and the tile after the one it computes with is always under way. For that the numbers
of blocks are looked up a tile ahead. Entries are cut into slices of CUT numbers: a thread copies from few rows, whose
addresses it finds once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from twostroke.ops.cuda.kernels.launch import gdc_launch_dependents, gdc_wait


@triton.jit
def part_length(context, splits, TILE_N: tl.constexpr):
    """Tokens of an equal part."""
    return tl.maximum(tl.cdiv(tl.cdiv(context, splits), TILE_N), 1) * TILE_N


@triton.jit
def blocks_of(table, n0, end, BLOCK: tl.constexpr, TILE_N: tl.constexpr):
    """The blocks of the entries from n0 on. They are looked up a tile ahead: the compiler would wait for what a tile
    looks up for itself before it asks for the tile after it."""
    places = n0 + tl.arange(0, TILE_N)
    return tl.load(table + places // BLOCK, mask=places < end, other=0)


@triton.jit
def slice_of(rows, factors, valid, first, CUT: tl.constexpr, NUMBERS: tl.constexpr, DTYPE: tl.constexpr):
    """(TILE_N, CUT) numbers from `first` on, of entries of NUMBERS. factors: where the scales of their codes are; None:
    they are floats."""
    dims = first + tl.arange(0, CUT)
    mask = valid[:, None] if NUMBERS % CUT == 0 else valid[:, None] & (dims < NUMBERS)[None, :]
    found = tl.load(rows + dims[None, :], mask=mask, other=0.0)
    if factors is not None:
        found = found.to(tl.float32) * tl.load(factors, mask=valid, other=0.0)[:, None]
    return found.to(DTYPE)


@triton.jit(do_not_specialize=["splits", "table_stride"])
def few_heads_kernel(
    q_ptr, part_ptr, part_max_ptr, part_sum_ptr, listed_ptr, starts_ptr, contexts_ptr, tables_ptr, keys, scales,
    factor, table_stride, block_stride, token_stride, scale_block_stride, scale_group_stride, splits,
    HEADS: tl.constexpr, HEADS_2: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, ROPE_2: tl.constexpr,
    CUT: tl.constexpr, BLOCK: tl.constexpr, TILE_N: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    LISTED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One part of one token's context, for all heads. part (tokens, HEADS, splits, LATENT). scales: of each CUT numbers
    of an entry; None: the cache holds floats."""
    DTYPE: tl.constexpr = q_ptr.dtype.element_ty
    CUTS: tl.constexpr = (LATENT + CUT - 1) // CUT
    token, split = tl.program_id(0), tl.program_id(1)
    request = token
    if LISTED:
        request = tl.load(listed_ptr + token)
    row, context = tl.load(starts_ptr + request).to(tl.int64), tl.load(contexts_ptr + request)
    length = part_length(context, splits, TILE_N)
    begin, end = split * length, tl.minimum(context, (split + 1) * length)
    table = tables_ptr + request * table_stride
    blocks = blocks_of(table, begin, end, BLOCK, TILE_N)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if begin >= end:
        return
    head, dims, pairs = tl.arange(0, HEADS_2), tl.arange(0, CUT), tl.arange(0, ROPE_2)
    there = (head < HEADS)[:, None]
    q_rows = q_ptr + (row * HEADS + head)[:, None] * (LATENT + ROPE)
    turned = tl.load(q_rows + LATENT + pairs[None, :], mask=there & (pairs < ROPE)[None, :], other=0.0)
    q, acc = (), ()
    for cut in tl.static_range(CUTS):
        at = cut * CUT + dims[None, :]
        q = q + (tl.load(q_rows + at, mask=there & (at < LATENT), other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
        acc = acc + (tl.zeros((HEADS_2, CUT), tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
    best = tl.full((HEADS_2,), float("-inf"), tl.float32)
    total = tl.zeros((HEADS_2,), tl.float32)
    for n0 in tl.range(begin, end, TILE_N, num_stages=STAGES):
        places = n0 + tl.arange(0, TILE_N)
        valid = places < end
        following = blocks_of(table, n0 + TILE_N, end, BLOCK, TILE_N)
        rows = (keys + blocks.to(tl.int64) * block_stride + places % BLOCK * token_stride)[:, None]
        factors = scales
        if scales is not None:
            factors = scales + blocks.to(tl.int64) * scale_block_stride + places % BLOCK + CUTS * scale_group_stride
        shared = slice_of(rows + LATENT, factors, valid, 0, ROPE_2, ROPE, DTYPE)
        s = tl.dot(turned, tl.trans(shared), input_precision=PRECISION)
        other = tl.zeros((HEADS_2, TILE_N), tl.float32)  # two sums: an instruction need not wait for the one before
        entry = ()
        for cut in tl.static_range(CUTS):
            if scales is not None:
                factors = scales + blocks.to(tl.int64) * scale_block_stride + places % BLOCK + cut * scale_group_stride
            entry = entry + (slice_of(rows, factors, valid, cut * CUT, CUT, LATENT, DTYPE),)  # type: ignore[assignment]  # noqa: RUF005
            if cut % 2 == 0:
                other = tl.dot(q[cut], tl.trans(entry[cut]), other, input_precision=PRECISION)
            else:
                s = tl.dot(q[cut], tl.trans(entry[cut]), s, input_precision=PRECISION)
        s = tl.where(valid[None, :], (s + other) * factor, float("-inf"))
        new = tl.maximum(best, tl.max(s, axis=1))
        p = tl.exp2(s - new[:, None])
        shrink = tl.exp2(best - new)
        best, total = new, total * shrink + tl.sum(p, axis=1)
        weights, sums = p.to(DTYPE), ()
        for cut in tl.static_range(CUTS):
            found = tl.dot(weights, entry[cut], acc[cut] * shrink[:, None], input_precision=PRECISION)
            sums = sums + (found,)  # type: ignore[assignment]  # noqa: RUF005
        acc, blocks = sums, following
    part = (token * HEADS + head) * splits + split
    for cut in tl.static_range(CUTS):
        at = cut * CUT + dims[None, :]
        tl.store(part_ptr + part.to(tl.int64)[:, None] * LATENT + at, acc[cut], mask=there & (at < LATENT))
    tl.store(part_max_ptr + part, best, mask=head < HEADS)
    tl.store(part_sum_ptr + part, total, mask=head < HEADS)
