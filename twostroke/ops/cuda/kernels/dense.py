"""Attention of one request's long run of new tokens through the vendor's kernel, on contiguous K and V.

One call lets the new tokens attend to each other causally, further calls let them attend to all tokens before. The
results are merged by their softmax sums. The first run of a prompt needs neither the merge nor a gather. The library
takes a good part of a second to plan a new shape, so runs are multiples of UNIT, and the tokens before them are passed
in powers of two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from twostroke.ops.cuda.kernels.heads import FORMATS, load_tile
from twostroke.ops.interface import BLOCK, Attention, KVLayer

UNIT = 2048  # new tokens, and tokens before them, are passed in multiples of this


@triton.jit
def gather_kernel(
    table, keys, values, key_scales, value_scales, k_out, v_out, context, block_stride, head_stride, token_stride,
    scale_block_stride, scale_head_stride,
    KV_HEADS: tl.constexpr, HEAD: tl.constexpr, WIDE: tl.constexpr, FORMAT: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    places = tl.program_id(0) * TILE + tl.arange(0, TILE)
    valid = places < context
    blocks = tl.load(table + places // BLOCK, mask=valid, other=0)
    dims = tl.arange(0, WIDE)
    inside = valid[:, None] & (dims < HEAD)[None, :]
    where = blocks.to(tl.int64) * scale_block_stride + head * scale_head_stride + places % BLOCK
    out = (places * KV_HEADS + head)[:, None] * HEAD + dims[None, :]
    for which in tl.static_range(2):
        base = (keys if which == 0 else values) + head * head_stride
        x = load_tile(
            base, blocks, places % BLOCK, valid, block_stride, 1 if FORMAT > 0 and which == 1 else token_stride,
            BLOCK if FORMAT > 0 and which == 1 else 1, HEAD, WIDE, True, tl.float32,
        )  # fmt: skip
        if FORMAT > 0:
            scales = key_scales if which == 0 else value_scales
            x *= tl.load(scales + where, mask=valid, other=0.0)[:, None]
        to = k_out if which == 0 else v_out
        tl.store(to + out, x.to(to.dtype.element_ty), mask=inside)


def gather(kv: KVLayer, table: Tensor, context: int, attention: Attention, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """K and V of the first `context` tokens, each (context, kv_heads, head_dim)."""
    heads, dim = attention.kv_heads, attention.head_dim
    k, v = (torch.empty(context, heads, dim, dtype=dtype, device=table.device) for _ in "kv")
    scales = kv.key_scales if kv.key_scales is not None else kv.keys
    value_scales = kv.value_scales if kv.value_scales is not None else kv.keys
    gather_kernel[(triton.cdiv(context, 64), heads)](
        table, kv.keys, kv.values, scales, value_scales, k, v, context, *kv.keys.stride()[:3], *scales.stride()[:2],
        KV_HEADS=heads, HEAD=dim, WIDE=max(16, triton.next_power_of_2(dim)), FORMAT=FORMATS[kv.format], BLOCK=BLOCK,
        TILE=64, num_warps=4,
    )  # fmt: skip
    return k, v


@triton.jit
def merge_kernel(
    a_ptr, b_ptr, la_ptr, lb_ptr, sums_ptr, out_ptr, count, out_stride, HEADS: tl.constexpr, HEAD: tl.constexpr,
    WIDE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """a, b: (count, HEADS, HEAD) with log-sums (HEADS, count). Not in place: warps do not run in step."""
    rows, head = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    dims = tl.arange(0, WIDE)
    valid = rows < count
    inside = valid[:, None] & (dims < HEAD)[None, :]
    la = tl.load(la_ptr + head * count + rows, mask=valid, other=0.0)
    lb = tl.load(lb_ptr + head * count + rows, mask=valid, other=0.0)
    top = tl.maximum(la, lb)
    wa, wb = tl.exp(la - top)[:, None], tl.exp(lb - top)[:, None]
    at = (rows.to(tl.int64) * HEADS + head)[:, None] * HEAD + dims[None, :]
    a = tl.load(a_ptr + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(sums_ptr + head * count + rows, top + tl.log(tl.exp(la - top) + tl.exp(lb - top)), mask=valid)
    place = out_ptr + rows.to(tl.int64)[:, None] * out_stride + head * HEAD + dims[None, :]
    tl.store(place, ((a * wa + b * wb) / (wa + wb)).to(out_ptr.dtype.element_ty), mask=inside)


def merge(
    a: Tensor, b: Tensor, sums: tuple[Tensor, Tensor], merged: Tensor, merged_sums: Tensor, attention: Attention
) -> None:
    """a and b (count, heads, head_dim) with their log-sums (heads, count) into `merged`, whose rows may lie apart."""
    count, dim = a.shape[0], attention.head_dim
    merge_kernel[(triton.cdiv(count, 32), attention.heads)](
        a, b, *sums, merged_sums, merged, count, merged.stride(0), HEADS=attention.heads, HEAD=dim,
        WIDE=max(16, triton.next_power_of_2(dim)), ROWS=32, num_warps=4,
    )  # fmt: skip


def sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, sums: bool) -> tuple[Tensor, Tensor | None]:
    """q (T, heads, dim), k and v (n, kv_heads, dim) -> (T, heads, dim), and the log-sums (heads, T) if asked for."""
    q4, k4, v4 = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    out = torch.ops.aten._scaled_dot_product_cudnn_attention(q4, k4, v4, None, sums, 0.0, causal, False, scale=scale)
    return out[0].squeeze(0).transpose(0, 1), out[1].reshape(q.shape[1], q.shape[0]) if sums else None


def attend_long(
    q: Tensor, k: Tensor, v: Tensor, attention: Attention, kv: KVLayer, table: Tensor, first: int, count: int,
    context: int, out: Tensor,
) -> Tensor:  # fmt: skip
    """Rows first : first + count of q, k, v (the step's own, k rotated), their context ending at `context`, into `out`;
    where they are all of its rows, the result may be a tensor of its own."""
    dim = attention.head_dim
    rows = slice(first, first + count)
    mine = q[rows].view(count, attention.heads, dim)
    before = context - count
    if kv.format != "bfloat16" or before:
        all_k, all_v = gather(kv, table, context, attention, q.dtype)  # attention reads what the cache stores
        own_k, own_v = all_k[before:], all_v[before:]
    else:
        own_k, own_v = k[rows].view(count, -1, dim), v[rows].view(count, -1, dim)
    if not before:
        own, _ = sdpa(mine, own_k, own_v, attention.scale, True, False)
        if count == out.shape[0]:
            return own.reshape(out.shape)
        out[rows].view(count, attention.heads, dim).copy_(own)
        return out
    whole, sums = sdpa(mine, own_k, own_v, attention.scale, True, True)
    whole, start = whole.contiguous(), 0
    assert sums is not None
    while start < before:
        size = 1 << ((before - start).bit_length() - 1)
        piece = slice(start, start + size)
        old, old_sums = sdpa(mine, all_k[piece], all_v[piece], attention.scale, False, True)
        start += size
        merged, merged_sums = out[rows] if start == before else torch.empty_like(whole), torch.empty_like(sums)
        assert old_sums is not None
        merge(whole, old.contiguous(), (sums, old_sums), merged, merged_sums, attention)
        whole, sums = merged, merged_sums
    return out
