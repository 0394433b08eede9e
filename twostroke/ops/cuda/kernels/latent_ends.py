"""What stands around latent attention: each head's own product before it and after it, the rotation, the entries of
the cache, and the parts of a context that become one.

Steps of a few streams take two kernels, one on each side (`enter`, `leave`): they load their weights before the kernel
in front of them has ended.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from twostroke.ops.cuda.kernels.heads import rounded
from twostroke.ops.cuda.kernels.latent_decode import part_length
from twostroke.ops.cuda.kernels.launch import EARLY, INTERPRETED, PDL, gdc_launch_dependents, gdc_wait
from twostroke.ops.interface import BLOCK, LATENT_GROUP, Batch, KVLayer, LatentAttention

MOST_EVEN = 128  # equal parts of a context
SLICE = 64  # numbers of a latent that a program of `leave` merges
GROUP = tl.constexpr(LATENT_GROUP)  # numbers that share a scale


@triton.jit(do_not_specialize=["rows"])
def head_product_kernel(
    x_ptr, w_ptr, out_ptr, rows, x_stride, x_head_stride, out_stride, out_head_stride,
    N: tl.constexpr, K: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Each head of each row times the head's own matrix (N, K), along K from the first column to the last."""
    head = tl.program_id(2).to(tl.int64)
    r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    w_rows = w_ptr + (head * N + tl.where(n < N, n, 0)) * K
    x_rows = x_ptr + tl.where(r < rows, r, 0).to(tl.int64) * x_stride + head * x_head_stride
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    acc = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
    for k0 in range(0, K, BLOCK_K):
        inside = (k0 + k < K)[None, :]
        w = tl.load(w_rows[:, None] + (k0 + k)[None, :], mask=inside, other=0.0)
        x = tl.load(x_rows[:, None] + (k0 + k)[None, :], mask=inside & (r < rows)[:, None], other=0.0)
        acc = tl.dot(x, tl.trans(w), acc, input_precision=PRECISION)
    place = out_ptr + r.to(tl.int64)[:, None] * out_stride + head * out_head_stride + n[None, :]
    tl.store(place, acc.to(out_ptr.dtype.element_ty), mask=(r < rows)[:, None] & (n < N)[None, :])


def head_product(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """out (T, heads, N) = x (T, heads, K) times weight (heads · N, K), head by head. A head's elements lie together."""
    rows, heads, k = x.shape
    n = out.shape[2]
    wide = x.dtype == torch.float32
    block_r = 16 if rows <= 16 or wide or INTERPRETED else 64
    head_product_kernel[(triton.cdiv(n, 64), triton.cdiv(rows, block_r), heads)](
        x, weight, out, rows, *x.stride()[:2], *out.stride()[:2], N=n, K=k, BLOCK_R=block_r, BLOCK_N=64,
        BLOCK_K=32 if wide else 64, PRECISION="ieee" if wide else "tf32", PDL=PDL, num_warps=4, **EARLY,
    )  # fmt: skip


@triton.jit
def rotated(x_ptr, x_stride, heads, cos_ptr, sin_ptr, position, HALF: tl.constexpr, HALF_2: tl.constexpr):
    """Both halves of 2 HALF numbers of each of `heads`, rotated: two of (heads, HALF_2)."""
    pair = tl.arange(0, HALF_2)
    inside = (pair < HALF)[None, :]
    at = x_ptr + heads[:, None] * x_stride + pair[None, :]
    first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + position * HALF + pair, mask=pair < HALF, other=0.0)[None, :]
    sin = tl.load(sin_ptr + position * HALF + pair, mask=pair < HALF, other=0.0)[None, :]
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def turn_queries(
    q_ptr, query_ptr, cos_ptr, sin_ptr, position, row, q_stride, HEADS: tl.constexpr, HEADS_2: tl.constexpr,
    PLAIN: tl.constexpr, LATENT: tl.constexpr, HALF: tl.constexpr, HALF_2: tl.constexpr,
):  # fmt: skip
    """The rotated part of every query head goes behind its absorbed part."""
    pair = tl.arange(0, HALF_2)
    head = tl.arange(0, HEADS_2)
    mine = head < HEADS
    first, second = rotated(
        q_ptr + row * q_stride + PLAIN, PLAIN + 2 * HALF, tl.where(mine, head, 0), cos_ptr, sin_ptr, position,
        HALF, HALF_2,
    )  # fmt: skip
    behind = query_ptr + (row * HEADS + head)[:, None] * (LATENT + 2 * HALF) + LATENT + pair[None, :]
    inside = mine[:, None] & (pair < HALF)[None, :]
    tl.store(behind, first.to(query_ptr.dtype.element_ty), mask=inside)
    tl.store(behind + HALF, second.to(query_ptr.dtype.element_ty), mask=inside)


@triton.jit
def store_entry(
    kv_ptr, keys, scales, norm_ptr, cos_ptr, sin_ptr, slots_ptr, contexts_ptr, position, row, eps, kv_stride,
    block_stride, token_stride, scale_block_stride, scale_group_stride, table_stride, LATENT: tl.constexpr,
    LATENT_2: tl.constexpr, HALF: tl.constexpr, HALF_2: tl.constexpr, BLOCK: tl.constexpr, STREAMS: tl.constexpr,
):  # fmt: skip
    """The latent and the shared key part go to the cache. STREAMS: a row is a request, and `slots_ptr` its table of
    blocks; rows without a context are padding. scales: of each GROUP numbers; None: the cache holds floats."""
    pair = tl.arange(0, HALF_2)
    if STREAMS:
        block = tl.load(slots_ptr + row * table_stride + position // BLOCK).to(tl.int64)
        offset = position % BLOCK
        stored = tl.load(contexts_ptr + row) > 0
    else:
        slot = tl.load(slots_ptr + row).to(tl.int64)
        block, offset = slot // BLOCK, slot % BLOCK
        stored = slot >= 0
    to = keys + block * block_stride + offset * token_stride
    dims = tl.arange(0, LATENT_2)
    x = tl.load(kv_ptr + row * kv_stride + dims, mask=dims < LATENT, other=0.0).to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x) / LATENT + eps) * tl.load(norm_ptr + dims, mask=dims < LATENT, other=0.0)
    if scales is not None:
        scales += block * scale_block_stride + offset
        GROUPS: tl.constexpr = LATENT_2 // GROUP
        group = tl.arange(0, GROUPS)
        parts = tl.reshape(x, (GROUPS, GROUP))
        scale = tl.div_rn(tl.max(tl.abs(parts), axis=1), 127.0)
        tl.store(scales + group * scale_group_stride, scale, mask=group < tl.where(stored, LATENT // GROUP, 0))
        x = tl.reshape(rounded(tl.div_rn(parts, tl.where(scale > 0, scale, 1.0)[:, None])), (LATENT_2,))
    tl.store(to + dims, x.to(keys.dtype.element_ty), mask=dims < tl.where(stored, LATENT, 0))
    left, right = rotated(
        kv_ptr + row * kv_stride + LATENT, 0, tl.arange(0, 1), cos_ptr, sin_ptr, position, HALF, HALF_2
    )  # fmt: skip
    known = (pair < tl.where(stored, HALF, 0))[None, :]
    if scales is not None:
        largest = tl.maximum(tl.max(tl.abs(left), axis=1), tl.max(tl.abs(right), axis=1))
        scale = tl.div_rn(largest, 127.0)
        one = tl.arange(0, 1)
        tl.store(scales + LATENT // GROUP * scale_group_stride + one, scale, mask=one < tl.where(stored, 1, 0))
        safe = tl.where(scale > 0, scale, 1.0)[:, None]
        left, right = rounded(tl.div_rn(left, safe)), rounded(tl.div_rn(right, safe))
    tl.store(to + LATENT + pair[None, :], left.to(keys.dtype.element_ty), mask=known)
    tl.store(to + LATENT + HALF + pair[None, :], right.to(keys.dtype.element_ty), mask=known)


def cache_strides(cache: KVLayer) -> tuple[int, ...]:
    """The strides of blocks and tokens; then those of the scales' blocks and groups, where there are scales."""
    scales = (0, 0) if cache.key_scales is None else cache.key_scales.stride()[:2]
    return cache.keys.stride(0), cache.keys.stride(2), *scales


@triton.jit(do_not_specialize=["table_stride"])
def latent_store_kernel(
    q_ptr, kv_ptr, query_ptr, keys, scales, norm_ptr, cos_ptr, sin_ptr, positions_ptr, slots_ptr, contexts_ptr, eps,
    q_stride, kv_stride, block_stride, token_stride, scale_block_stride, scale_group_stride, table_stride,
    HEADS: tl.constexpr, HEADS_2: tl.constexpr, PLAIN: tl.constexpr, LATENT: tl.constexpr, LATENT_2: tl.constexpr,
    HALF: tl.constexpr, HALF_2: tl.constexpr, BLOCK: tl.constexpr, STREAMS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + row)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if tl.program_id(1) == 0:
        turn_queries(
            q_ptr, query_ptr, cos_ptr, sin_ptr, position, row, q_stride, HEADS, HEADS_2, PLAIN, LATENT, HALF, HALF_2
        )  # fmt: skip
    else:
        store_entry(
            kv_ptr, keys, scales, norm_ptr, cos_ptr, sin_ptr, slots_ptr, contexts_ptr, position, row, eps, kv_stride,
            block_stride, token_stride, scale_block_stride, scale_group_stride, table_stride, LATENT, LATENT_2,
            HALF, HALF_2, BLOCK, STREAMS,
        )  # fmt: skip


def store_latents(
    q: Tensor, kv: Tensor, query: Tensor, attention: LatentAttention, cache: KVLayer, batch: Batch, group: int,
    streams: bool,
) -> None:  # fmt: skip
    """The rotated parts into query (T, heads, latent + rope_dim), the entries into the cache. Rows with a negative
    slot are padding."""
    blocks, half = batch.groups[group], attention.rope_dim // 2
    latent_store_kernel[(q.shape[0], 2)](
        q, kv, query, cache.keys, cache.key_scales, attention.norm.weight, attention.rope.cos, attention.rope.sin,
        batch.positions, blocks.tables if streams else blocks.slots, batch.contexts, attention.norm.eps, q.stride(0),
        kv.stride(0), *cache_strides(cache), blocks.tables.stride(0),
        HEADS=attention.heads, HEADS_2=triton.next_power_of_2(attention.heads), PLAIN=attention.plain_dim,
        LATENT=attention.latent, LATENT_2=triton.next_power_of_2(attention.latent), HALF=half,
        HALF_2=triton.next_power_of_2(half), BLOCK=BLOCK, STREAMS=streams, PDL=PDL, num_warps=4,
        enable_fp_fusion=False, **EARLY,
    )  # fmt: skip


@triton.jit(do_not_specialize=["table_stride"])
def enter_kernel(
    q_ptr, kv_ptr, query_ptr, w_ptr, keys, scales, norm_ptr, cos_ptr, sin_ptr, positions_ptr, slots_ptr, contexts_ptr,
    eps, q_stride, kv_stride, block_stride, token_stride, scale_block_stride, scale_group_stride, table_stride,
    HEADS: tl.constexpr, HEADS_2: tl.constexpr, PLAIN: tl.constexpr, PLAIN_2: tl.constexpr, LATENT: tl.constexpr,
    LATENT_2: tl.constexpr, HALF: tl.constexpr, HALF_2: tl.constexpr, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A program absorbs a part of one head's matrix into one row's query; the last two do what latent_store_kernel
    does."""
    TILES: tl.constexpr = (LATENT + BLOCK_N - 1) // BLOCK_N
    which, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    position = tl.load(positions_ptr + row)
    if which < HEADS * TILES:
        head = which // TILES
        n, k = which % TILES * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, PLAIN_2)
        inside = (n < LATENT)[:, None] & (k < PLAIN)[None, :]
        w = tl.load(w_ptr + (head * LATENT + n)[:, None] * PLAIN + k[None, :], mask=inside, other=0.0).to(tl.float32)
        if PDL:
            gdc_wait()
            gdc_launch_dependents()
        x = tl.load(q_ptr + row * q_stride + head * (PLAIN + 2 * HALF) + k, mask=k < PLAIN, other=0.0).to(tl.float32)
        out = tl.sum(w * x[None, :], axis=1).to(query_ptr.dtype.element_ty)
        tl.store(query_ptr + (row * HEADS + head) * (LATENT + 2 * HALF) + n, out, mask=n < LATENT)
    else:
        if PDL:
            gdc_wait()
            gdc_launch_dependents()
        if which == HEADS * TILES:
            turn_queries(
                q_ptr, query_ptr, cos_ptr, sin_ptr, position, row, q_stride, HEADS, HEADS_2, PLAIN, LATENT, HALF,
                HALF_2,
            )  # fmt: skip
        else:
            store_entry(
                kv_ptr, keys, scales, norm_ptr, cos_ptr, sin_ptr, slots_ptr, contexts_ptr, position, row, eps,
                kv_stride, block_stride, token_stride, scale_block_stride, scale_group_stride, table_stride, LATENT,
                LATENT_2, HALF, HALF_2, BLOCK, True,
            )  # fmt: skip


def enter(
    q: Tensor, kv: Tensor, query: Tensor, key_up: Tensor, attention: LatentAttention, cache: KVLayer, batch: Batch,
    group: int,
) -> None:  # fmt: skip
    """head_product with key_up and store_latents, for a step of few streams."""
    tables, half = batch.groups[group].tables, attention.rope_dim // 2
    enter_kernel[(attention.heads * triton.cdiv(attention.latent, 64) + 2, q.shape[0])](
        q, kv, query, key_up, cache.keys, cache.key_scales, attention.norm.weight, attention.rope.cos,
        attention.rope.sin, batch.positions, tables, batch.contexts, attention.norm.eps, q.stride(0), kv.stride(0),
        *cache_strides(cache), tables.stride(0),
        HEADS=attention.heads, HEADS_2=triton.next_power_of_2(attention.heads), PLAIN=attention.plain_dim,
        PLAIN_2=triton.next_power_of_2(attention.plain_dim), LATENT=attention.latent,
        LATENT_2=triton.next_power_of_2(attention.latent), HALF=half, HALF_2=triton.next_power_of_2(half), BLOCK=BLOCK,
        BLOCK_N=64, PDL=PDL, num_warps=4, enable_fp_fusion=False, **EARLY,
    )  # fmt: skip


@triton.jit
def merged(
    part_ptr, part_max_ptr, part_sum_ptr, first, count, dims, LATENT: tl.constexpr, MOST: tl.constexpr,
    CHUNK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """(WIDE,): the numbers `dims` of a weighted sum of latents, from `count` parts of a context."""
    split, chunk = tl.arange(0, MOST), tl.arange(0, CHUNK)
    most = tl.load(part_max_ptr + first + split, mask=split < count, other=float("-inf"))
    top = tl.max(most, axis=0)
    sums = tl.load(part_sum_ptr + first + split, mask=split < count, other=0.0)
    total = tl.sum(tl.exp2(most - top) * sums, axis=0)
    out = tl.zeros((WIDE,), tl.float32)
    for start in range(0, count, CHUNK):
        there = start + chunk < count
        part = first + start + chunk
        weight = tl.exp2(tl.load(part_max_ptr + part, mask=there, other=float("-inf")) - top)
        at = part_ptr + part.to(tl.int64)[:, None] * LATENT + dims[None, :]
        out += tl.sum(tl.load(at, mask=there[:, None] & (dims < LATENT)[None, :], other=0.0) * weight[:, None], axis=0)
    return out / total


@triton.jit(do_not_specialize=["splits"])
def latent_merge_kernel(
    part_ptr, part_max_ptr, part_sum_ptr, out_ptr, listed_ptr, starts_ptr, contexts_ptr, splits,
    HEADS: tl.constexpr, HEADS_T: tl.constexpr, LATENT: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    LISTED: tl.constexpr, MOST: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The equal parts of one query head's context, merged."""
    tile, head = tl.program_id(0), tl.program_id(1)
    dims = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    request = tile
    if LISTED:
        request = tl.load(listed_ptr + tile)
    context = tl.load(contexts_ptr + request)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if context <= 0:
        return
    count = (context - 1) // part_length(context, splits, TILE_N) + 1
    groups: tl.constexpr = (HEADS + HEADS_T - 1) // HEADS_T
    first = ((tile * groups + head // HEADS_T) * TILE_M + head % HEADS_T) * splits
    out = merged(part_ptr, part_max_ptr, part_sum_ptr, first, count, dims, LATENT, MOST, CHUNK, BLOCK)
    row = tl.load(starts_ptr + request).to(tl.int64)
    tl.store(out_ptr + (row * HEADS + head) * LATENT + dims, out.to(out_ptr.dtype.element_ty), mask=dims < LATENT)


@triton.jit(do_not_specialize=["splits"])
def leave_kernel(
    part_ptr, part_max_ptr, part_sum_ptr, w_ptr, sums_ptr, count_ptr, out_ptr, contexts_ptr, splits,
    HEADS: tl.constexpr, LATENT: tl.constexpr, VALUE: tl.constexpr, VALUE_2: tl.constexpr, TILE_N: tl.constexpr,
    MOST: tl.constexpr, SLICE: tl.constexpr, SLICES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out (T, HEADS, VALUE): the parts of a head's context, merged, times the head's matrix. A row is a request. A
    program merges a slice of the numbers, all parts at once; the last of a head's to finish adds their products in
    order."""
    head, slice_of_head, row = tl.program_id(0) // SLICES, tl.program_id(0) % SLICES, tl.program_id(1)
    n, dims = tl.arange(0, VALUE_2), slice_of_head * SLICE + tl.arange(0, SLICE)
    inside = (n < VALUE)[:, None] & (dims < LATENT)[None, :]
    w = tl.load(w_ptr + (head * VALUE + n)[:, None] * LATENT + dims[None, :], mask=inside, other=0.0)
    context = tl.load(contexts_ptr + row)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if context <= 0:
        return
    count = (context - 1) // part_length(context, splits, TILE_N) + 1
    which = row * HEADS + head
    x = merged(part_ptr, part_max_ptr, part_sum_ptr, which * splits, count, dims, LATENT, MOST, MOST, SLICE)
    mine = tl.sum(w.to(tl.float32) * x[None, :], axis=1)
    sums = sums_ptr + which.to(tl.int64) * SLICES * VALUE + n
    tl.store(sums + slice_of_head * VALUE, mine, mask=n < VALUE)
    tl.debug_barrier()
    if tl.atomic_add(count_ptr + which, 1, sem="acq_rel") != SLICES - 1:
        return
    tl.store(count_ptr + which, 0)
    total = tl.zeros((VALUE_2,), tl.float32)
    for other in tl.static_range(SLICES):
        total += tl.load(sums + other * VALUE, mask=n < VALUE, other=0.0)
    tl.store(out_ptr + which.to(tl.int64) * VALUE + n, total.to(out_ptr.dtype.element_ty), mask=n < VALUE)


class Parts(NamedTuple):
    """Results over equal parts of the contexts of some tokens, not yet divided by their sums."""

    values: Tensor  # of (tile · groups + group of heads) · tile_m + head of the group, then of the part
    most: Tensor
    sums: Tensor
    tokens: int
    splits: int
    tile_n: int  # parts are multiples of so many tokens
    heads_t: int  # heads of a group
    tile_m: int
    done: Tensor  # a counter for each head of each token, zero between kernels


def merge_parts(parts: Parts, attention: LatentAttention, batch: Batch, listed: Tensor | None, out: Tensor) -> None:
    """out (T, heads, latent)."""
    latent_merge_kernel[(parts.tokens, attention.heads, triton.cdiv(attention.latent, 128))](
        *parts[:3], out, out if listed is None else listed, batch.starts, batch.contexts, parts.splits,
        HEADS=attention.heads, HEADS_T=parts.heads_t, LATENT=attention.latent, TILE_M=parts.tile_m,
        TILE_N=parts.tile_n, LISTED=listed is not None, MOST=MOST_EVEN, CHUNK=16, BLOCK=128, PDL=PDL, num_warps=4,
        **EARLY,
    )  # fmt: skip


def leave(parts: Parts, attention: LatentAttention, value_up: Tensor, batch: Batch, out: Tensor) -> None:
    """merge_parts and head_product with value_up, for a step of few streams: out (T, heads, value_dim)."""
    assert parts.heads_t == parts.tile_m == attention.heads
    heads, value, slices = attention.heads, attention.value_dim, triton.cdiv(attention.latent, SLICE)
    sums = torch.empty(parts.tokens * heads, slices, value, device=out.device)
    leave_kernel[(heads * slices, parts.tokens)](
        *parts[:3], value_up, sums, parts.done, out, batch.contexts, parts.splits, HEADS=heads,
        LATENT=attention.latent, VALUE=value, VALUE_2=triton.next_power_of_2(value), TILE_N=parts.tile_n,
        MOST=MOST_EVEN, SLICE=SLICE, SLICES=slices, PDL=PDL, num_warps=8, **EARLY,
    )  # fmt: skip
