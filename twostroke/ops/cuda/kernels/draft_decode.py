"""Attention of a step in which few requests with short contexts verify short drafts, in one kernel.

The context is divided into splits as in decode.py, and the program that ends last merges the splits of a head in their
order. All new rows of a request and all query heads that share a K/V head are one tile. A program loads its first tile
of K and V before the projection ends; then it norms and rotates the q that it needs. The program of the last split does
the same with the new K and V, writes them to the cache, and attends to them. It reads caches of floats, without a
window. Other drafts go through rope.py and prefill.py, which are faster where there is much to read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from twostroke.ops.cuda.kernels.decode import (
    LOG2E,
    DecodeScratch,
    attend_tile,
    blocks_of,
    combine,
    load_kv,
    split_count,
    split_of,
    split_start,
)
from twostroke.ops.cuda.kernels.heads import head_scale, store_head, turned
from twostroke.ops.cuda.kernels.launch import EARLY, PDL, gdc_launch_dependents, gdc_wait
from twostroke.ops.cuda.kernels.rows import tanh
from twostroke.ops.cuda.kernels.sinks import add_sinks, load_sinks
from twostroke.ops.interface import BLOCK, Attention, Batch, KVLayer

FEW_HEADS = 64  # K/V heads of all requests, the most that it serves
SHORT = 1024  # tokens of context, the most that it serves


@triton.jit
def attend_new(q, total, acc, k, v, query, count, scale, softcap, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr):
    """Start from the new tokens: each query sees those up to itself."""
    other = tl.arange(0, k.shape[0])
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    if SOFTCAP:
        s = softcap * tanh(s / softcap)
    seen = (other[None, :] <= query[:, None]) & (other < count)[None, :]
    s = tl.where(seen, s * LOG2E, float("-inf"))
    best = tl.max(s, axis=1)
    p = tl.exp2(s - best[:, None])
    return best, total + tl.sum(p, axis=1), tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)


@triton.jit(do_not_specialize=["table_stride", "splits"])
def draft_kernel(
    qkv_ptr, out_ptr, part_ptr, part_max_ptr, part_sum_ptr, done_ptr, starts_ptr, contexts_ptr, tables_ptr,
    keys, values, cos_ptr, sin_ptr, qnorm_ptr, knorm_ptr, sinks_ptr, q_eps, k_eps,
    scale, softcap, qkv_stride, table_stride, block_stride, head_stride, token_stride, splits,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD: tl.constexpr, WIDE: tl.constexpr, HALF: tl.constexpr,
    NORM: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr, QUERIES: tl.constexpr, TILE_M: tl.constexpr,
    NEW: tl.constexpr, TILE: tl.constexpr, SPLITS_2: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    SHARE: tl.constexpr = HEADS // KV_HEADS
    DTYPE: tl.constexpr = qkv_ptr.dtype.element_ty
    head, split, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    context = tl.load(contexts_ptr + request)
    first = tl.load(starts_ptr + request)
    count = tl.load(starts_ptr + request + 1) - first
    before = context - count  # tokens in the cache before this step
    last_split = split_of(tl.maximum(before - 1, 0))
    if (split > last_split) | (context <= 0):
        if PDL:
            gdc_wait()
            gdc_launch_dependents()
        return
    begin, end = split_start(split), tl.minimum(split_start(split + 1), before)
    table = tables_ptr + request * table_stride
    index, dims = tl.arange(0, TILE_M), tl.arange(0, WIDE)
    query = index // SHARE
    mine = (index < QUERIES * SHARE) & (query < count)
    row = (first + tl.where(mine, query, 0)).to(tl.int64)
    place = head * SHARE + index % SHARE
    if sinks_ptr is not None:
        sinks = load_sinks(sinks_ptr, place)
    keys += head * head_stride
    values += head * head_stride
    blocks = blocks_of(table, begin, begin, end, BLOCK, TILE)
    seen, k, v = load_kv(
        begin, begin, end, blocks, keys, values, block_stride, token_stride, HEAD, WIDE, BLOCK, TILE, DTYPE
    )
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    heads = qkv_ptr + row * qkv_stride + place * HEAD
    rms = head_scale(heads, q_eps, HEAD, WIDE, NORM)
    q = turned(heads, mine, dims, rms, qnorm_ptr, cos_ptr, sin_ptr, (before + query)[:, None], HEAD, HALF, NORM, True)
    q = q.to(DTYPE)
    best = tl.full((TILE_M,), float("-inf"), tl.float32)
    total = tl.zeros((TILE_M,), tl.float32)
    acc = tl.zeros((TILE_M, WIDE), tl.float32)
    if split == last_split:
        other = tl.arange(0, NEW)
        new = other < count
        at = before + tl.where(new, other, 0)
        token = tl.load(table + at // BLOCK).to(tl.int64) * block_stride + at % BLOCK * token_stride
        k_heads = qkv_ptr + (first + tl.where(new, other, 0)).to(tl.int64) * qkv_stride + (HEADS + head) * HEAD
        new_k = store_head(
            keys + token, keys, k_heads, new, knorm_ptr, k_eps, cos_ptr, sin_ptr, at[:, None],
            HEAD, WIDE, HALF, NORM, 0, 1, True,
        )  # fmt: skip
        new_v = store_head(
            values + token, values, k_heads + KV_HEADS * HEAD, new, knorm_ptr, k_eps, cos_ptr, sin_ptr, at[:, None],
            HEAD, WIDE, 0, False, 0, 1, True,
        )  # fmt: skip
        best, total, acc = attend_new(
            q, total, acc, new_k.to(DTYPE), new_v.to(DTYPE), query, count, scale, softcap, SOFTCAP, PRECISION
        )
    if begin < end:
        best, total, acc = attend_tile(q, best, total, acc, seen, k, v, scale, softcap, SOFTCAP, DTYPE, PRECISION)
    for n0 in tl.range(begin + TILE, end, TILE, num_stages=1):
        blocks = blocks_of(table, n0, begin, end, BLOCK, TILE)
        seen, k, v = load_kv(
            n0, begin, end, blocks, keys, values, block_stride, token_stride, HEAD, WIDE, BLOCK, TILE, DTYPE
        )
        best, total, acc = attend_tile(q, best, total, acc, seen, k, v, scale, softcap, SOFTCAP, DTYPE, PRECISION)
    inside = mine[:, None] & (dims < HEAD)[None, :]
    to = out_ptr + ((row * HEADS + place) * HEAD)[:, None] + dims[None, :]
    if last_split == 0:  # one split: nothing to merge
        if sinks_ptr is not None:
            total, acc = add_sinks(best, total, acc, sinks)
        tl.store(to, (acc / total[:, None]).to(DTYPE), mask=inside)
        return
    part = (row * HEADS + place) * splits  # (TILE_M,): first part of each row's head
    tl.store(part_ptr + ((part + split) * HEAD)[:, None] + dims[None, :], acc, mask=inside)
    tl.store(part_max_ptr + part + split, best, mask=mine)
    tl.store(part_sum_ptr + part + split, total, mask=mine)
    tl.debug_barrier()
    counter = done_ptr + request * KV_HEADS + head
    if tl.atomic_add(counter, 1, sem="acq_rel") != last_split:
        return
    tl.store(counter, 0)
    tl.debug_barrier()
    best, total, acc = combine(part, part_ptr, part_max_ptr, part_sum_ptr, 0, last_split, mine, dims, HEAD, SPLITS_2)
    if sinks_ptr is not None:
        total, acc = add_sinks(best, total, acc, sinks)
    tl.store(to, (acc / total[:, None]).to(DTYPE), mask=inside)


def serves(attention: Attention, kv: KVLayer, batch: Batch, group: int) -> bool:
    few = batch.contexts.shape[0] * attention.kv_heads <= FEW_HEADS
    short = batch.groups[group].tables.shape[1] * BLOCK <= SHORT
    return few and short and kv.key_scales is None and not attention.window


def draft_attention(
    qkv: Tensor, attention: Attention, kv: KVLayer, batch: Batch, group: int, out: Tensor, scratch: DecodeScratch, *,
    queries: int,
) -> Tensor:  # fmt: skip
    """qkv: (T, …) the raw projections, of which K and V are written to the cache. queries: the most rows of a
    request."""
    dim, share = attention.head_dim, attention.heads // attention.kv_heads
    wide = max(16, triton.next_power_of_2(dim))
    rope, qn, kn = attention.rope, attention.query_norm, attention.key_norm
    tables, requests = batch.groups[group].tables, batch.contexts.shape[0]
    splits = split_count(tables.shape[1] * BLOCK)
    part, part_max, part_sum, done = scratch.reserve(qkv.shape[0], attention.heads, splits, dim)
    wide_float = qkv.dtype == torch.float32
    draft_kernel[(attention.kv_heads, splits, requests)](
        qkv, out, part, part_max, part_sum, done, batch.starts, batch.contexts, tables, kv.keys, kv.values,
        rope.cos if rope else qkv, rope.sin if rope else qkv,
        qn.weight if qn else qkv, kn.weight if kn else qkv, attention.sinks,
        qn.eps if qn else 0.0, kn.eps if kn else 0.0,
        attention.scale, attention.softcap, qkv.stride(0), tables.stride(0), *kv.keys.stride()[:3], splits,
        HEADS=attention.heads, KV_HEADS=attention.kv_heads, HEAD=dim, WIDE=wide,
        HALF=rope.cos.shape[1] if rope else 0, NORM=qn is not None, SOFTCAP=attention.softcap > 0, BLOCK=BLOCK,
        QUERIES=queries, TILE_M=max(16, triton.next_power_of_2(queries * share)),
        NEW=max(16, triton.next_power_of_2(queries)), TILE=32 if wide_float or wide > 128 else 128,
        SPLITS_2=max(16, triton.next_power_of_2(splits)), PRECISION="ieee" if wide_float else "tf32", PDL=PDL,
        num_warps=4, **EARLY,
    )  # fmt: skip
    return out
