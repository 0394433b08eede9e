"""Latent attention of single tokens of few heads, the tall way: cached entries are the rows of every product.

A tensor-core instruction of a whole warp group has 64 rows. Up to 16 heads of one token would leave most of them empty,
so entries are the tall side: scores are entries · queries, and the sum is entriesᵀ · weights. Both read the entries
where they lie in shared memory, once each. Entries are cut into slices of CUT numbers, so that a thread copies a few
rows, whose addresses it finds once, and not a little of many.

A context is cut into as many equal parts as fill the device. Their results are merged by the kernel that follows.
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
    """Of the entries from n0 on. Looked up a tile ahead: the compiler would wait for what a tile looks up for itself
    before it asks for the tile after it."""
    places = n0 + tl.arange(0, TILE_N)
    return tl.load(table + places // BLOCK, mask=places < end, other=0)


@triton.jit
def ask_for(table, n0, end, keys, block_stride, token_stride, first, BLOCK: tl.constexpr, TILE_N: tl.constexpr):
    """Prefetch the memory of the entries from n0 on, a line at their number `first`, into the L2 cache."""
    places = n0 + tl.arange(0, TILE_N)
    blocks = tl.load(table + places // BLOCK, mask=places < end, other=0).to(tl.int64)
    tl.inline_asm_elementwise(
        "{ prefetch.global.L2 [$1]; mov.u32 $0, 0; }", "=r,l",
        [keys + blocks * block_stride + places % BLOCK * token_stride + first], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def slice_of(rows, valid, first, CUT: tl.constexpr, NUMBERS: tl.constexpr, DTYPE: tl.constexpr):
    """(TILE_N, CUT) numbers from `first` on, of entries of NUMBERS."""
    dims = first + tl.arange(0, CUT)
    mask = valid[:, None] if NUMBERS % CUT == 0 else valid[:, None] & (dims < NUMBERS)[None, :]
    return tl.load(rows + dims[None, :], mask=mask, other=0.0).to(DTYPE)


@triton.jit(do_not_specialize=["splits", "table_stride"])
def tall_latent_kernel(
    q_ptr, part_ptr, part_max_ptr, part_sum_ptr, listed_ptr, starts_ptr, contexts_ptr, tables_ptr, keys, factor,
    table_stride, block_stride, token_stride, splits,
    HEADS: tl.constexpr, HEADS_2: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr,
    ROPE_2: tl.constexpr, CUT: tl.constexpr, BLOCK: tl.constexpr, TILE_N: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, LISTED: tl.constexpr,
    FAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One part of one token's context, for all heads. part (tokens, HEADS, splits, LATENT)."""
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
    there = (head < HEADS)[None, :]
    q_rows = q_ptr + (row * HEADS + head)[None, :] * (LATENT + ROPE)
    turned = tl.load(q_rows + LATENT + pairs[:, None], mask=there & (pairs < ROPE)[:, None], other=0.0)
    q = ()
    acc = ()
    for cut in tl.static_range(CUTS):
        at = cut * CUT + dims[:, None]
        q = q + (tl.load(q_rows + at, mask=there & (at < LATENT), other=0.0),)
        acc = acc + (tl.zeros((CUT, HEADS_2), tl.float32),)
    best = tl.full((HEADS_2,), float("-inf"), tl.float32)
    total = tl.zeros((HEADS_2,), tl.float32)
    for n0 in tl.range(begin, end, TILE_N, num_stages=STAGES):
        places = n0 + tl.arange(0, TILE_N)
        valid = places < end
        following = blocks_of(table, n0 + TILE_N, end, BLOCK, TILE_N)
        rows = (keys + blocks.to(tl.int64) * block_stride + places % BLOCK * token_stride)[:, None]
        shared = tl.zeros((TILE_N, ROPE_2), DTYPE)
        if n0 < end:  # always; the compiler would keep several of what it loads in plain sight, and they do not fit
            shared = slice_of(rows + LATENT, valid, 0, ROPE_2, ROPE, DTYPE)
        if FAST:
            ask_for(table, n0 + 2 * TILE_N, end, keys, block_stride, token_stride, LATENT, BLOCK, TILE_N)
        entry, s = (), tl.zeros((TILE_N, HEADS_2), tl.float32)
        for cut in tl.static_range(CUTS):
            entry = entry + (slice_of(rows, valid, cut * CUT, CUT, LATENT, DTYPE),)
            s = tl.dot(entry[cut], q[cut], s, input_precision=PRECISION)
        s = tl.dot(shared, turned, s, input_precision=PRECISION)
        s = tl.where(valid[:, None], s * factor, float("-inf"))
        new = tl.maximum(best, tl.max(s, axis=0))
        p = tl.exp2(s - new[None, :])
        shrink = tl.exp2(best - new)
        best, total = new, total * shrink + tl.sum(p, axis=0)
        weights, sums = p.to(DTYPE), ()
        for cut in tl.static_range(CUTS):
            found = tl.dot(tl.trans(entry[cut]), weights, acc[cut] * shrink[None, :], input_precision=PRECISION)
            sums = sums + (found,)
        acc, blocks = sums, following
    part = (token * HEADS + head) * splits + split
    for cut in tl.static_range(CUTS):
        at = cut * CUT + dims[:, None]
        tl.store(part_ptr + part.to(tl.int64)[None, :] * LATENT + at, acc[cut], mask=there & (at < LATENT))
    tl.store(part_max_ptr + part, best, mask=head < HEADS)
    tl.store(part_sum_ptr + part, total, mask=head < HEADS)
