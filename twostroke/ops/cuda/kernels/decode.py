"""Attention of one new token per request over its cached context, cut into splits that run side by side.

Splits near the start of a context are short, so that a short context occupies many programs too. Splits further out are
longer, so that there are few partial results. Where many streams fill the device, all splits are longer, by a
factor of two for each of `doublings`. The program that finishes a head's last split merges the partial results in order
of position.

FUSED: q, k and v are the output of the projection. Every program norms and rotates the q it needs; the program that
owns the newest position writes its K and V and attends to them. It needs a step in which no request reads blocks that
the step itself fills. The cached tokens were then written by earlier steps, and with AHEAD a program loads their first
tile before the projection ends.

This kernel reads caches of floats, for few streams and for very many; even_decode.py serves the tens between them.
tall_decode.py reads int8 and fp8.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from twostroke.ops.cuda.kernels.heads import head_scale, load_tile, store_head, turned
from twostroke.ops.cuda.kernels.launch import EARLY, PDL, gdc_launch_dependents, gdc_wait
from twostroke.ops.cuda.kernels.rows import tanh
from twostroke.ops.cuda.kernels.sinks import add_sinks, load_sinks
from twostroke.ops.interface import BLOCK, Attention, Batch, KVLayer

# Splits of NEAR tokens up to position 1024, of MIDDLE up to 16384, of FAR beyond.
NEAR, MIDDLE, FAR = tl.constexpr(128), tl.constexpr(512), tl.constexpr(2048)
NEAR_SPLITS, MIDDLE_SPLITS = tl.constexpr(8), tl.constexpr(38)  # splits that end at 1024 and at 16384
LOG2E = tl.constexpr(1.4426950408889634)


LONGEST = 8  # largest factor by which splits are longer than usual
FEW_HEADS = 64  # K/V heads of all streams together


class DecodeForm(NamedTuple):
    """What a compiled kernel depends on, beside the model."""

    ahead: bool  # few programs: latency counts. With many, registers do
    short: bool  # few tokens for each program, or enough programs
    merged: int  # splits that the last program can merge


def form_of(heads: int, splits: int, scale: int, fused: bool = True) -> DecodeForm:
    """heads: K/V heads of all streams together. scale: the factor by which splits are longer."""
    ahead = fused and heads <= FEW_HEADS
    short = not ahead and (scale == LONGEST or (scale == 1 and splits <= 8))
    return DecodeForm(ahead, short, 16 if ahead and splits <= 16 else max(128, triton.next_power_of_2(splits)))


def longer(heads: int) -> int:
    """The factor for so many K/V heads of all streams together, as measured on an H200."""
    return LONGEST if heads >= 1024 else 4 if heads >= 512 else 2 if heads >= 256 else 1


def split_count(context: int) -> int:
    """Splits that `context` tokens are cut into."""
    if context <= 1024:
        return max(1, -(-context // 128))
    if context <= 16384:
        return 8 + -(-(context - 1024) // 512)
    return 38 + -(-(context - 16384) // 2048)


@triton.jit
def split_start(split):
    middle = 1024 + (split - NEAR_SPLITS) * MIDDLE
    far = 16384 + (split - MIDDLE_SPLITS) * FAR
    return tl.where(split <= NEAR_SPLITS, split * NEAR, tl.where(split <= MIDDLE_SPLITS, middle, far))


@triton.jit
def split_of(position):
    middle = NEAR_SPLITS + (position - 1024) // MIDDLE
    far = MIDDLE_SPLITS + (position - 16384) // FAR
    return tl.where(position < 1024, position // NEAR, tl.where(position < 16384, middle, far))


@triton.jit
def share_of(
    split, request, rows_ptr, shared_ptr, contexts_ptr, doublings, WINDOW: tl.constexpr, LISTED: tl.constexpr,
    FUSED: tl.constexpr, CASCADE: tl.constexpr,
):  # fmt: skip
    """The request of a program, the splits that its token sees, the first of them that is not computed already, and the
    positions from `begin` to `end` that the program itself computes."""
    if LISTED:
        request = tl.load(rows_ptr + request)
    context = tl.load(contexts_ptr + request)
    newest = context - 1
    first = tl.maximum(context - WINDOW, 0) if WINDOW > 0 else 0
    first_split, last_split = split_of(first >> doublings), split_of(newest >> doublings)
    first_own = first_split
    if CASCADE:
        first_own = tl.load(shared_ptr + request)  # the splits before it are computed already
    begin = tl.maximum(split_start(split) << doublings, first)
    end = tl.minimum(split_start(split + 1) << doublings, context)
    if FUSED:
        end = tl.minimum(end, newest)
    return request, context, first_split, last_split, first_own, begin, end


@triton.jit
def blocks_of(table, n0, begin, end, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """The blocks of the positions from n0 on. They are looked up a tile ahead: the compiler would wait for what a tile
    looks up for itself before it asks for the tile after it."""
    places = n0 + tl.arange(0, TILE)
    return tl.load(table + places // BLOCK, mask=(places >= begin) & (places < end), other=0)


@triton.jit
def load_kv(
    n0, begin, end, blocks, keys, values, block_stride, token_stride,
    HEAD: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The tile of positions from n0 on, which lies in `blocks`."""
    places = n0 + tl.arange(0, TILE)
    seen = (places >= begin) & (places < end)
    k = load_tile(keys, blocks, places % BLOCK, seen, block_stride, token_stride, 1, HEAD, WIDE, True, DTYPE)
    v = load_tile(values, blocks, places % BLOCK, seen, block_stride, token_stride, 1, HEAD, WIDE, True, DTYPE)
    return seen, k, v


@triton.jit
def attend_tile(
    q, best, total, acc, seen, k, v, scale, softcap, SOFTCAP: tl.constexpr, DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    if SOFTCAP:
        s = softcap * tanh(s / softcap)
    s = tl.where(seen[None, :], s * LOG2E, float("-inf"))
    new = tl.maximum(best, tl.max(s, axis=1))
    p = tl.exp2(s - new[:, None])
    shrink = tl.exp2(best - new)
    total = total * shrink + tl.sum(p, axis=1)
    acc = tl.dot(p.to(DTYPE), v, acc * shrink[:, None], input_precision=PRECISION)
    return new, total, acc


@triton.jit
def add_newest(q, total, acc, k, v, scale, softcap, SOFTCAP: tl.constexpr):
    """Start from the newest token alone; k and v (2, WIDE) hold it in their first row and zeros in the second."""
    s = tl.sum(q.to(tl.float32) * tl.sum(k, axis=0)[None, :], axis=1) * scale
    if SOFTCAP:
        s = softcap * tanh(s / softcap)
    return s * LOG2E, total + 1.0, acc + tl.sum(v, axis=0)[None, :]


@triton.jit
def combine(
    part, part_ptr, part_max_ptr, part_sum_ptr, first_split, last_split, shared, dims, HEAD: tl.constexpr,
    SPLITS_2: tl.constexpr,
):  # fmt: skip
    """Merges the splits of a head in order of position: the maximum, the sums, and elements `dims`, which are not yet
    divided by the sums."""
    every = tl.arange(0, SPLITS_2)
    active = shared[:, None] & ((every >= first_split) & (every <= last_split))[None, :]
    place = part_max_ptr + part[:, None] + every[None, :]
    top = tl.max(tl.load(place, mask=active, other=float("-inf"), cache_modifier=".cg"), axis=1)
    acc = tl.zeros((shared.shape[0], dims.shape[0]), tl.float32)
    total = tl.zeros((shared.shape[0],), tl.float32)
    inside = shared[:, None] & (dims < HEAD)[None, :]
    for split in range(first_split, last_split + 1):
        best = tl.load(part_max_ptr + part + split, mask=shared, other=float("-inf"), cache_modifier=".cg")
        weight = tl.where(shared, tl.exp2(best - top), 0.0)
        total += weight * tl.load(part_sum_ptr + part + split, mask=shared, other=0.0, cache_modifier=".cg")
        at = part_ptr + ((part + split) * HEAD)[:, None] + dims[None, :]
        acc += weight[:, None] * tl.load(at, mask=inside, other=0.0, cache_modifier=".cg")
    return top, total, acc


@triton.jit(do_not_specialize=["table_stride", "splits", "doublings"])
def decode_kernel(
    q_ptr, out_ptr, part_ptr, part_max_ptr, part_sum_ptr, done_ptr, rows_ptr, shared_ptr, starts_ptr,
    contexts_ptr, tables_ptr,
    keys, values, cos_ptr, sin_ptr, qnorm_ptr, knorm_ptr, sinks_ptr, q_eps, k_eps,
    scale, softcap, q_stride, table_stride, block_stride, head_stride, token_stride, splits, doublings,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SHARE_2: tl.constexpr, HEAD: tl.constexpr, WIDE: tl.constexpr,
    HALF: tl.constexpr, NORM: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, SPLITS_2: tl.constexpr, LISTED: tl.constexpr,
    FUSED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr, AHEAD: tl.constexpr,
    CASCADE: tl.constexpr,
):  # fmt: skip
    SHARE: tl.constexpr = HEADS // KV_HEADS
    DTYPE: tl.constexpr = q_ptr.dtype.element_ty
    head, split = tl.program_id(0), tl.program_id(1)
    request, context, first_split, last_split, first_own, begin, end = share_of(
        split, tl.program_id(2), rows_ptr, shared_ptr, contexts_ptr, doublings, WINDOW, LISTED, FUSED, CASCADE
    )
    if (split < first_own) | (split > last_split) | (context <= 0):
        if PDL:
            gdc_wait()
            gdc_launch_dependents()
        return
    newest = context - 1
    row = tl.load(starts_ptr + request).to(tl.int64)
    table = tables_ptr + request * table_stride
    index = tl.arange(0, SHARE_2)
    shared = index < SHARE
    dims = tl.arange(0, WIDE)
    heads = q_ptr + row * q_stride + (head * SHARE + tl.where(shared, index, 0)) * HEAD
    keys += head * head_stride
    values += head * head_stride
    best = tl.full((SHARE_2,), float("-inf"), tl.float32)
    total = tl.zeros((SHARE_2,), tl.float32)
    acc = tl.zeros((SHARE_2, WIDE), tl.float32)
    start = begin // BLOCK * BLOCK
    blocks = blocks_of(table, start, begin, end, BLOCK, TILE)
    if AHEAD:
        seen, k, v = load_kv(
            start, begin, end, blocks, keys, values, block_stride, token_stride, HEAD, WIDE, BLOCK, TILE, DTYPE
        )
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    inside = shared[:, None] & (dims < HEAD)[None, :]
    if FUSED:
        rms = head_scale(heads, q_eps, HEAD, WIDE, NORM)
        q = turned(heads, shared, dims, rms, qnorm_ptr, cos_ptr, sin_ptr, newest, HEAD, HALF, NORM).to(DTYPE)
        if split == last_split:
            block = tl.load(table + newest // BLOCK).to(tl.int64)
            one = tl.arange(0, 2)
            mine = one < 1
            token = block * block_stride + newest % BLOCK * token_stride + one * 0
            k_head = q_ptr + row * q_stride + (HEADS + head) * HEAD + one * 0
            new_k = store_head(
                keys + token, keys, k_head, mine, knorm_ptr, k_eps, cos_ptr, sin_ptr, newest,
                HEAD, WIDE, HALF, NORM, 0, 1,
            )  # fmt: skip
            new_v = store_head(
                values + token, values, k_head + KV_HEADS * HEAD, mine, knorm_ptr, k_eps, cos_ptr, sin_ptr, newest,
                HEAD, WIDE, 0, False, 0, 1,
            )  # fmt: skip
            best, total, acc = add_newest(
                q, total, acc, tl.where(mine[:, None], new_k, 0.0), tl.where(mine[:, None], new_v, 0.0),
                scale, softcap, SOFTCAP,
            )  # fmt: skip
        if AHEAD:
            if begin < end:
                best, total, acc = attend_tile(
                    q, best, total, acc, seen, k, v, scale, softcap, SOFTCAP, DTYPE, PRECISION
                )
            start += TILE
    else:
        q = tl.load(heads[:, None] + dims[None, :], mask=inside, other=0.0)
    for n0 in tl.range(start, end, TILE, num_stages=STAGES):
        following = blocks
        if STAGES == 1:  # no tile is under way that would wait for the lookup
            blocks = blocks_of(table, n0, begin, end, BLOCK, TILE)
        else:
            following = blocks_of(table, n0 + TILE, begin, end, BLOCK, TILE)
        seen, k, v = load_kv(
            n0, begin, end, blocks, keys, values, block_stride, token_stride, HEAD, WIDE, BLOCK, TILE, DTYPE
        )
        best, total, acc = attend_tile(q, best, total, acc, seen, k, v, scale, softcap, SOFTCAP, DTYPE, PRECISION)
        blocks = following
    if sinks_ptr is not None:
        sinks = load_sinks(sinks_ptr, head * SHARE + tl.where(shared, index, 0))
    place = out_ptr + row * HEADS * HEAD + (head * SHARE + index)[:, None] * HEAD
    if first_split == last_split:  # one split: nothing to merge
        if sinks_ptr is not None:
            total, acc = add_sinks(best, total, acc, sinks)
        tl.store(place + dims[None, :], (acc / total[:, None]).to(DTYPE), mask=inside)
        return
    part = (request * HEADS + head * SHARE + index) * splits  # (SHARE_2,): first part of each head
    mine_at = part_ptr + ((part + split) * HEAD)[:, None]
    tl.store(mine_at + dims[None, :], acc, mask=inside)
    tl.store(part_max_ptr + part + split, best, mask=shared)
    tl.store(part_sum_ptr + part + split, total, mask=shared)
    tl.debug_barrier()
    counter = done_ptr + request * KV_HEADS + head
    if tl.atomic_add(counter, 1, sem="acq_rel") != last_split - first_own:
        return
    tl.store(counter, 0)
    tl.debug_barrier()
    best, total, acc = combine(
        part, part_ptr, part_max_ptr, part_sum_ptr, first_split, last_split, shared, dims, HEAD, SPLITS_2
    )
    if sinks_ptr is not None:
        total, acc = add_sinks(best, total, acc, sinks)
    tl.store(place + dims[None, :], (acc / total[:, None]).to(DTYPE), mask=inside)


class DecodeScratch:
    """Partial results of the splits, and a counter for each head; the program of the last split sets it back to 0."""

    def __init__(self, device: torch.device):
        self.device = device
        self.kept: list[Tensor] = []  # too small by now, but captured steps still use them
        self.floats = torch.empty(0, device=device)
        self.done = torch.zeros(0, dtype=torch.int32, device=device)

    def reserve(self, requests: int, heads: int, splits: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """A step of this size has run before where it is captured: memory of a graph is not kept between steps."""
        parts = -(-requests * heads * splits // 16) * 16
        if self.floats.numel() < parts * (head_dim + 2):
            self._grow(self.floats)
            self.floats = torch.empty(2 * parts * (head_dim + 2), device=self.device)
        if self.done.numel() < requests * heads:
            self._grow(self.done)
            self.done = torch.zeros(2 * requests * heads, dtype=torch.int32, device=self.device)
        return self.floats[2 * parts :], self.floats[:parts], self.floats[parts : 2 * parts], self.done

    def _grow(self, small: Tensor) -> None:
        capturing = small.is_cuda and torch.cuda.is_current_stream_capturing()
        assert not capturing, "scratch memory grows inside a capture"
        self.kept.append(small)


def decode_attention(
    q: Tensor, attention: Attention, kv: KVLayer, batch: Batch, group: int, out: Tensor, scratch: DecodeScratch, *,
    requests: int, listed: Tensor | None, splits: int, fused: bool, scale: int = 1,
    shared: Tensor | None = None, tile: int | None = None, stages: int = 2, warps: int = 4,
) -> Tensor:  # fmt: skip
    """q: (T, heads · head_dim) rotated, or with `fused` the raw projections. listed: indices of the requests to serve
    (None: the first `requests`). splits: at least split_count of the longest context over `scale`, the factor
    by which splits are longer than usual. shared: how many of each request's leading splits are computed already
    (cascade.py); only where no layer has a window."""
    dim, share = attention.head_dim, attention.heads // attention.kv_heads
    wide = max(16, triton.next_power_of_2(dim))
    rope, qn, kn = attention.rope, attention.query_norm, attention.key_norm
    total = batch.contexts.shape[0]
    part, part_max, part_sum, done = scratch.reserve(total, attention.heads, splits, dim)
    tables = batch.groups[group].tables
    wide_float = q.dtype == torch.float32
    form = form_of(requests * attention.kv_heads, splits, scale, fused)
    if tile is None:
        tile = 32 if wide > 128 or wide_float else 128 if form.ahead else 64
        stages = 1 if form.ahead else 2
        warps = 8 if tile == 128 and share >= 8 else warps
        if form.short and not wide_float:
            tile, stages, warps = 32, 2, 1
    decode_kernel[(attention.kv_heads, splits, requests)](
        q, out, part, part_max, part_sum, done, tables if listed is None else listed,
        tables if shared is None else shared, batch.starts, batch.contexts, tables, kv.keys, kv.values,
        rope.cos if rope else q, rope.sin if rope else q,
        qn.weight if qn else q, kn.weight if kn else q, attention.sinks, qn.eps if qn else 0.0, kn.eps if kn else 0.0,
        attention.scale, attention.softcap, q.stride(0), tables.stride(0), *kv.keys.stride()[:3], splits,
        scale.bit_length() - 1,
        HEADS=attention.heads, KV_HEADS=attention.kv_heads, SHARE_2=max(16, triton.next_power_of_2(share)),
        HEAD=dim, WIDE=wide, HALF=rope.cos.shape[1] if rope else 0, NORM=qn is not None,
        WINDOW=attention.window, SOFTCAP=attention.softcap > 0, BLOCK=BLOCK,
        TILE=tile, SPLITS_2=form.merged, LISTED=listed is not None, FUSED=fused,
        PRECISION="ieee" if wide_float else "tf32", STAGES=stages, PDL=PDL, AHEAD=form.ahead,
        CASCADE=shared is not None, num_warps=warps, **EARLY,
    )  # fmt: skip
    return out
