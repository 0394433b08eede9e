"""Norm and rotate every row's q and k, and write K and V to the cache: one pass over the projections."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from twostroke.ops.cuda.kernels.heads import FORMATS, head_scale, store_head, turned
from twostroke.ops.cuda.kernels.launch import EARLY, PDL, gdc_launch_dependents, gdc_wait
from twostroke.ops.interface import BLOCK, Attention, Batch, KVLayer


@triton.jit(do_not_specialize=["table_stride"])
def rope_kernel(
    qkv_ptr, q_ptr, k_ptr, positions_ptr, slots_ptr, contexts_ptr, cos_ptr, sin_ptr, qnorm_ptr, knorm_ptr, q_eps, k_eps,
    keys, values, key_scales, value_scales, qkv_stride, block_stride, head_stride, token_stride,
    scale_block_stride, scale_head_stride, table_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEADS_2: tl.constexpr, KV_HEADS_2: tl.constexpr, HEAD: tl.constexpr,
    WIDE: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, FORMAT: tl.constexpr, BLOCK: tl.constexpr,
    KEEP_K: tl.constexpr, STREAMS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """STREAMS: a row is a request, and `slots_ptr` its table of blocks; rows without a context are padding."""
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + row)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    mine = qkv_ptr + row * qkv_stride
    dims = tl.arange(0, WIDE)
    if tl.program_id(1) == 0:
        index = tl.arange(0, HEADS_2)
        heads, mask = mine + index * HEAD, index < HEADS
        scale = head_scale(tl.where(mask, heads, mine), q_eps, HEAD, WIDE, NORM)
        q = turned(heads, mask, dims, scale, qnorm_ptr, cos_ptr, sin_ptr, position, HEAD, HALF, NORM)
        place = q_ptr + row * HEADS * HEAD + index[:, None] * HEAD + dims[None, :]
        tl.store(place, q.to(q_ptr.dtype.element_ty), mask=mask[:, None] & (dims < HEAD)[None, :])
    else:
        if STREAMS:
            block = tl.load(slots_ptr + row * table_stride + position // BLOCK).to(tl.int64)
            offset = position % BLOCK
            stored = tl.load(contexts_ptr + row) > 0
        else:
            slot = tl.load(slots_ptr + row).to(tl.int64)
            block, offset = slot // BLOCK, slot % BLOCK
            stored = slot >= 0
        kv_index = tl.arange(0, KV_HEADS_2)
        kv_mask = tl.where(stored, kv_index, KV_HEADS) < KV_HEADS
        token = block * block_stride + kv_index * head_stride + offset * token_stride
        v_token = token
        if FORMAT > 0:
            v_token = block * block_stride + kv_index * head_stride + offset
        where = block * scale_block_stride + kv_index * scale_head_stride + offset
        k_heads = mine + tl.where(kv_mask, HEADS + kv_index, 0) * HEAD
        store_head(
            keys + token, key_scales + where, k_heads, kv_mask, knorm_ptr, k_eps, cos_ptr, sin_ptr, position,
            HEAD, WIDE, HALF, NORM, FORMAT, 1,
        )  # fmt: skip
        if KEEP_K:
            k_scale = head_scale(k_heads, k_eps, HEAD, WIDE, NORM)
            k = turned(k_heads, kv_mask, dims, k_scale, knorm_ptr, cos_ptr, sin_ptr, position, HEAD, HALF, NORM)
            kept = k_ptr + row * KV_HEADS * HEAD + kv_index[:, None] * HEAD + dims[None, :]
            tl.store(kept, k.to(k_ptr.dtype.element_ty), mask=kv_mask[:, None] & (dims < HEAD)[None, :])
        v_heads = k_heads + KV_HEADS * HEAD
        store_head(
            values + v_token, value_scales + where, v_heads, kv_mask, knorm_ptr, k_eps, cos_ptr, sin_ptr, position,
            HEAD, WIDE, 0, False, FORMAT, BLOCK if FORMAT > 0 else 1,
        )  # fmt: skip


def rotate_and_store(
    qkv: Tensor, attention: Attention, kv: KVLayer, batch: Batch, group: int, keep_k: bool, streams: bool = False,
    exact: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """q (T, heads · head_dim) ready for attention, and with `keep_k` k (T, kv_heads · head_dim) too. Rows with a
    negative slot are padding: nothing is stored for them.

    streams: one row for each request; the block to write to is found in its table. exact: every operation is rounded
    by itself, so that all variants of the kernel round alike."""
    blocks = batch.groups[group]
    rows, dim = qkv.shape[0], attention.head_dim
    q = torch.empty(rows, attention.heads * dim, dtype=qkv.dtype, device=qkv.device)
    k = torch.empty(rows, attention.kv_heads * dim, dtype=qkv.dtype, device=qkv.device) if keep_k else q
    rope, qn, kn = attention.rope, attention.query_norm, attention.key_norm
    scales = kv.key_scales if kv.key_scales is not None else kv.keys
    value_scales = kv.value_scales if kv.value_scales is not None else kv.keys
    rope_kernel[(rows, 2)](
        qkv, q, k, batch.positions, blocks.tables if streams else blocks.slots, batch.contexts,
        rope.cos if rope else q, rope.sin if rope else q,
        qn.weight if qn else q, kn.weight if kn else q, qn.eps if qn else 0.0, kn.eps if kn else 0.0,
        kv.keys, kv.values, scales, value_scales, qkv.stride(0), *kv.keys.stride()[:3], *scales.stride()[:2],
        blocks.tables.stride(0),
        HEADS=attention.heads, KV_HEADS=attention.kv_heads, HEADS_2=triton.next_power_of_2(attention.heads),
        KV_HEADS_2=triton.next_power_of_2(attention.kv_heads), HEAD=dim, WIDE=max(16, triton.next_power_of_2(dim)),
        HALF=rope.cos.shape[1] if rope else 0, NORM=qn is not None, FORMAT=FORMATS[kv.format], BLOCK=BLOCK,
        KEEP_K=keep_k, STREAMS=streams, PDL=PDL, num_warps=4, enable_fp_fusion=not exact, **EARLY,
    )  # fmt: skip
    return q, k
