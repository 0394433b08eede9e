"""Attention of one new token for each of tens of requests: every program gets about the same share of the work.

The cached tokens of a request are cut into tiles, and its tiles into equal parts, one for each program. A request has
as many parts as its share of all tiles asks for. Together the parts fill the device once, whatever the lengths of the
contexts. The program that finishes a head's last part merges the results in order of position. FUSED is as in
decode.py: q, k and v are the output of the projection.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from twostroke.ops.cuda.kernels.decode import DecodeScratch, add_newest, attend_tile, blocks_of, load_kv
from twostroke.ops.cuda.kernels.heads import head_scale, store_head, turned
from twostroke.ops.cuda.kernels.launch import EARLY, PDL, gdc_launch_dependents, gdc_wait
from twostroke.ops.cuda.kernels.one_row import processors
from twostroke.ops.cuda.kernels.sinks import add_sinks, load_sinks
from twostroke.ops.interface import BLOCK, Attention, Batch, KVLayer

ROWS = (256, 1024)  # requests that a compiled kernel can serve
PROGRAMS = 8  # on a multiprocessor
LEAST, MOST = 128, 1024  # K/V heads of all requests together, for which this is faster than decode.py


@triton.jit
def first_seen(context, WINDOW: tl.constexpr, BLOCK: tl.constexpr):
    """The first position that is read, and that of its block."""
    first = tl.maximum(context - WINDOW, 0) if WINDOW > 0 else context * 0
    return first, first // BLOCK * BLOCK


@triton.jit
def tile_counts(contexts, WINDOW: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, FUSED: tl.constexpr):
    """Tiles of each request's cached tokens, at least one; none of padding. FUSED: the newest token is not cached."""
    _, begin = first_seen(contexts, WINDOW, BLOCK)
    counts = tl.maximum(tl.cdiv(contexts - begin - (1 if FUSED else 0), TILE), 1)
    return tl.where(contexts > 0, counts, 0)


@triton.jit
def part_of(number, counts, parts, every):
    """The row of the request that this part belongs to, the number of its first part, its parts and its tiles."""
    row = tl.sum((tl.cumsum(parts, axis=0) <= number).to(tl.int32), axis=0)
    first, mine = tl.sum(tl.where(every < row, parts, 0), axis=0), every == row
    return row, first, tl.sum(tl.where(mine, parts, 0), axis=0), tl.sum(tl.where(mine, counts, 0), axis=0)


@triton.jit
def merge_parts(first, last, at, part_ptr, part_max_ptr, part_sum_ptr, shared, dims, inside, HEAD: tl.constexpr):
    """What the programs of the parts from `first` to `last` left of a head, in order of position."""
    best = tl.load(part_max_ptr + at + first, mask=shared, other=float("-inf"), cache_modifier=".cg")
    total = tl.load(part_sum_ptr + at + first, mask=shared, other=0.0, cache_modifier=".cg")
    place = part_ptr + (at * HEAD)[:, None] + dims[None, :]
    acc = tl.load(place + first * HEAD, mask=inside, other=0.0, cache_modifier=".cg")
    for number in range(first + 1, last + 1):
        other = tl.load(part_max_ptr + at + number, mask=shared, other=float("-inf"), cache_modifier=".cg")
        new = tl.maximum(best, other)
        old_weight = tl.where(shared, tl.exp2(best - new), 0.0)
        weight = tl.where(shared, tl.exp2(other - new), 0.0)
        sums = tl.load(part_sum_ptr + at + number, mask=shared, other=0.0, cache_modifier=".cg")
        more = tl.load(place + number * HEAD, mask=inside, other=0.0, cache_modifier=".cg")
        total, best = total * old_weight + sums * weight, new
        acc = acc * old_weight[:, None] + more * weight[:, None]
    return best, total, acc


@triton.jit(do_not_specialize=["table_stride", "requests", "shares"])
def even_kernel(
    q_ptr, out_ptr, part_ptr, part_max_ptr, part_sum_ptr, done_ptr, rows_ptr, starts_ptr, contexts_ptr, tables_ptr,
    keys, values, cos_ptr, sin_ptr, qnorm_ptr, knorm_ptr, sinks_ptr, q_eps, k_eps,
    scale, softcap, q_stride, table_stride, block_stride, head_stride, token_stride, requests, shares,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SHARE_2: tl.constexpr, HEAD: tl.constexpr, WIDE: tl.constexpr,
    HALF: tl.constexpr, NORM: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, LISTED: tl.constexpr, FUSED: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """shares: parts of a head that all requests together should have."""
    SHARE: tl.constexpr = HEADS // KV_HEADS
    DTYPE: tl.constexpr = q_ptr.dtype.element_ty
    head, number = tl.program_id(0), tl.program_id(1)
    every = tl.arange(0, ROWS)
    mine = every < requests
    listed = tl.load(rows_ptr + every, mask=mine, other=0) if LISTED else every
    counts = tile_counts(tl.load(contexts_ptr + listed, mask=mine, other=0), WINDOW, BLOCK, TILE, FUSED)
    tiles = tl.maximum(tl.sum(counts, axis=0), 1)
    parts = tl.minimum(tl.maximum(counts * shares // tiles, 1), counts)
    row, first_part, my_parts, my_tiles = part_of(number, counts, parts, every)
    if row >= requests:
        if PDL:
            gdc_wait()
            gdc_launch_dependents()
        return
    request = tl.load(rows_ptr + row) if LISTED else row
    context = tl.load(contexts_ptr + request)
    newest = context - 1
    place = tl.load(starts_ptr + request).to(tl.int64)
    table = tables_ptr + request * table_stride
    keys += head * head_stride
    values += head * head_stride
    first, start = first_seen(context, WINDOW, BLOCK)
    begin = start + (number - first_part) * my_tiles // my_parts * TILE
    end = tl.minimum(start + (number - first_part + 1) * my_tiles // my_parts * TILE, newest if FUSED else context)
    blocks = blocks_of(table, begin, first, end, BLOCK, TILE)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    index, dims = tl.arange(0, SHARE_2), tl.arange(0, WIDE)
    shared = index < SHARE
    inside = shared[:, None] & (dims < HEAD)[None, :]
    heads = q_ptr + place * q_stride + (head * SHARE + tl.where(shared, index, 0)) * HEAD
    best = tl.full((SHARE_2,), float("-inf"), tl.float32)
    total = tl.zeros((SHARE_2,), tl.float32)
    acc = tl.zeros((SHARE_2, WIDE), tl.float32)
    last_part = first_part + my_parts - 1
    if FUSED:
        rms = head_scale(heads, q_eps, HEAD, WIDE, NORM)
        q = turned(heads, shared, dims, rms, qnorm_ptr, cos_ptr, sin_ptr, newest, HEAD, HALF, NORM).to(DTYPE)
        if number == last_part:
            one = tl.arange(0, 2)
            block = tl.load(table + newest // BLOCK).to(tl.int64)
            token = block * block_stride + newest % BLOCK * token_stride + one * 0
            k_head = q_ptr + place * q_stride + (HEADS + head) * HEAD + one * 0
            new_k = store_head(
                keys + token, keys, k_head, one < 1, knorm_ptr, k_eps, cos_ptr, sin_ptr, newest,
                HEAD, WIDE, HALF, NORM, 0, 1,
            )  # fmt: skip
            new_v = store_head(
                values + token, values, k_head + KV_HEADS * HEAD, one < 1, knorm_ptr, k_eps, cos_ptr, sin_ptr, newest,
                HEAD, WIDE, 0, False, 0, 1,
            )  # fmt: skip
            best, total, acc = add_newest(
                q, total, acc, tl.where((one < 1)[:, None], new_k, 0.0), tl.where((one < 1)[:, None], new_v, 0.0),
                scale, softcap, SOFTCAP,
            )  # fmt: skip
    else:
        q = tl.load(heads[:, None] + dims[None, :], mask=inside, other=0.0)
    for n0 in tl.range(begin, end, TILE, num_stages=STAGES):
        following = blocks_of(table, n0 + TILE, first, end, BLOCK, TILE)
        seen, k, v = load_kv(
            n0, first, end, blocks, keys, values, block_stride, token_stride, HEAD, WIDE, BLOCK, TILE, DTYPE
        )
        best, total, acc = attend_tile(q, best, total, acc, seen, k, v, scale, softcap, SOFTCAP, DTYPE, "tf32")
        blocks = following
    if my_parts > 1:
        at = (head * SHARE + tl.where(shared, index, 0)) * (shares + requests)
        tl.store(part_ptr + ((at + number) * HEAD)[:, None] + dims[None, :], acc, mask=inside)
        tl.store(part_max_ptr + at + number, best, mask=shared)
        tl.store(part_sum_ptr + at + number, total, mask=shared)
        tl.debug_barrier()
        counter = done_ptr + request * KV_HEADS + head
        if tl.atomic_add(counter, 1, sem="acq_rel") != my_parts - 1:
            return
        tl.store(counter, 0)
        tl.debug_barrier()
        best, total, acc = merge_parts(
            first_part, last_part, at, part_ptr, part_max_ptr, part_sum_ptr, shared, dims, inside, HEAD
        )
    if sinks_ptr is not None:
        total, acc = add_sinks(
            best, total, acc, load_sinks(sinks_ptr, head * SHARE + tl.where(shared, index, 0))
        )  # fmt: skip
    to = out_ptr + place * HEADS * HEAD + (head * SHARE + index)[:, None] * HEAD + dims[None, :]
    tl.store(to, (acc / total[:, None]).to(DTYPE), mask=inside)


def serves(q: Tensor, attention: Attention, requests: int, fused: bool) -> bool:
    """Whether these requests are served here. Many streams fill the device without being cut; not so beside prompts,
    where decode.py cuts all contexts."""
    heads = requests * attention.kv_heads
    enough = heads >= LEAST and (heads < MOST or not fused) and requests <= ROWS[-1]
    return (
        enough
        and q.dtype != torch.float32
        and attention.head_dim <= 128
        and attention.heads <= 16 * attention.kv_heads
    )  # fmt: skip


def even_attention(
    q: Tensor, attention: Attention, kv: KVLayer, batch: Batch, group: int, out: Tensor, scratch: DecodeScratch, *,
    requests: int, listed: Tensor | None, fused: bool, programs: int | None = None,
) -> Tensor:  # fmt: skip
    """q: (T, heads · head_dim) rotated, or with `fused` the raw projections. listed: indices of the requests to serve
    (None: the first `requests`). programs: about how many are started."""
    dim, kv_heads = attention.head_dim, attention.kv_heads
    wide = max(16, triton.next_power_of_2(dim))
    rope, qn, kn = attention.rope, attention.query_norm, attention.key_norm
    tables, shares = batch.groups[group].tables, -(-(programs or PROGRAMS * processors(q.device)) // kv_heads)
    part, part_max, part_sum, done = scratch.reserve(shares + requests, attention.heads, 1, dim)
    even_kernel[(kv_heads, shares + requests)](
        q, out, part, part_max, part_sum, done, tables if listed is None else listed, batch.starts, batch.contexts,
        tables, kv.keys, kv.values, rope.cos if rope else q, rope.sin if rope else q,
        qn.weight if qn else q, kn.weight if kn else q, attention.sinks, qn.eps if qn else 0.0, kn.eps if kn else 0.0,
        attention.scale, attention.softcap, q.stride(0), tables.stride(0), *kv.keys.stride()[:3], requests, shares,
        HEADS=attention.heads, KV_HEADS=kv_heads, SHARE_2=16, HEAD=dim, WIDE=wide,
        HALF=rope.cos.shape[1] if rope else 0, NORM=qn is not None, WINDOW=attention.window,
        SOFTCAP=attention.softcap > 0, BLOCK=BLOCK, TILE=32 if wide == 128 else 64,
        ROWS=rows_bucket(requests), LISTED=listed is not None, FUSED=fused, STAGES=2, PDL=PDL, num_warps=1, **EARLY,
    )  # fmt: skip
    return out


def rows_bucket(requests: int) -> int:
    return next(rows for rows in ROWS if rows >= requests)
