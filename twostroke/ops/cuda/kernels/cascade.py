"""Attention of many streams over the prefix they share: its K and V are read once for a whole tile of streams.

The heads of one request fill only a part of a tensor-core tile, and without this kernel each request reads the shared
blocks again. Here the heads of several requests that hold the same blocks fill one tile. Contexts are cut into the same
splits as in the decode kernel (decode.py), and partial results are stored in the same places. The decode kernel then
computes the splits that a request does not share, and merges all of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from twostroke.ops.cuda.kernels.decode import DecodeScratch, split_start
from twostroke.ops.cuda.kernels.heads import FORMATS
from twostroke.ops.cuda.kernels.prefill import step
from twostroke.ops.interface import BLOCK, Attention, Batch, KVLayer

TILE_M, TILE_N = 64, 64


def members_of_tile(attention: Attention) -> int:
    """Requests in one tile."""
    return TILE_M // (attention.heads // attention.kv_heads)


@triton.jit(do_not_specialize=["table_stride", "splits"])
def cascade_kernel(
    q_ptr, part_ptr, part_max_ptr, part_sum_ptr, members_ptr, shared_ptr, starts_ptr, tables_ptr, keys, values,
    key_scales, value_scales, scale, softcap, q_stride, table_stride, block_stride, head_stride, token_stride,
    scale_block_stride, scale_head_stride, splits,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD: tl.constexpr, WIDE: tl.constexpr, FORMAT: tl.constexpr,
    SOFTCAP: tl.constexpr, BLOCK: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, MEMBERS: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    SHARE: tl.constexpr = HEADS // KV_HEADS
    DTYPE: tl.constexpr = q_ptr.dtype.element_ty
    head, split, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    leader = tl.load(members_ptr + tile * MEMBERS)
    if leader < 0:
        return
    if split >= tl.load(shared_ptr + leader):
        return
    index = tl.arange(0, TILE_M)
    request = tl.load(members_ptr + tile * MEMBERS + index // SHARE, mask=index < MEMBERS * SHARE, other=-1)
    mine = request >= 0
    request = tl.where(mine, request, leader)
    row = tl.load(starts_ptr + request).to(tl.int64)
    dims = tl.arange(0, WIDE)
    inside = mine[:, None] & (dims < HEAD)[None, :]
    place = row * q_stride + (head * SHARE + index % SHARE) * HEAD
    q = tl.load(q_ptr + place[:, None] + dims[None, :], mask=inside, other=0.0)
    table = tables_ptr + leader * table_stride
    begin, end = split_start(split), split_start(split + 1)
    best = tl.full((TILE_M,), float("-inf"), tl.float32)
    total = tl.zeros((TILE_M,), tl.float32)
    acc = tl.zeros((TILE_M, WIDE), tl.float32)
    for n0 in tl.range(begin, end, TILE_N, num_stages=STAGES):
        best, total, acc = step(
            q, best, total, acc, n0, end, index, table, keys + head * head_stride, values + head * head_stride,
            key_scales + head * scale_head_stride, value_scales + head * scale_head_stride, scale, softcap,
            block_stride, token_stride, scale_block_stride,
            HEAD, WIDE, FORMAT, 0, SOFTCAP, BLOCK, TILE_N, False, DTYPE, PRECISION,
        )  # fmt: skip
    part = (request * HEADS + head * SHARE + index % SHARE) * splits + split
    tl.store(part_ptr + (part * HEAD)[:, None] + dims[None, :], acc, mask=inside)
    tl.store(part_max_ptr + part, best, mask=mine)
    tl.store(part_sum_ptr + part, total, mask=mine)


def cascade_attention(
    q: Tensor, attention: Attention, kv: KVLayer, batch: Batch, group: int, scratch: DecodeScratch, *, members: Tensor,
    shared: Tensor, splits: int,
) -> None:  # fmt: skip
    """q (T, heads · head_dim) rotated. members (tiles, members_of_tile) int32: requests that share a prefix, -1 for
    an empty place. shared (R,) int32: how many leading splits a request shares. splits: as in decode.py."""
    dim = attention.head_dim
    wide = max(16, triton.next_power_of_2(dim))
    scales = kv.key_scales if kv.key_scales is not None else kv.keys
    value_scales = kv.value_scales if kv.value_scales is not None else kv.keys
    tables = batch.groups[group].tables
    part, part_max, part_sum, _ = scratch.reserve(batch.contexts.shape[0], attention.heads, splits, dim)
    wide_float = q.dtype == torch.float32
    cascade_kernel[(attention.kv_heads, splits, members.shape[0])](
        q, part, part_max, part_sum, members, shared, batch.starts, tables, kv.keys, kv.values, scales, value_scales,
        attention.scale, attention.softcap, q.stride(0), tables.stride(0), *kv.keys.stride()[:3],
        *scales.stride()[:2], splits,
        HEADS=attention.heads, KV_HEADS=attention.kv_heads, HEAD=dim, WIDE=wide, FORMAT=FORMATS[kv.format],
        SOFTCAP=attention.softcap > 0, BLOCK=BLOCK, TILE_M=TILE_M, TILE_N=32 if wide_float or wide > 128 else TILE_N,
        MEMBERS=members.shape[1], PRECISION="ieee" if wide_float else "tf32",
        STAGES=2 if wide_float or wide > 128 else 3, num_warps=4,
    )  # fmt: skip
