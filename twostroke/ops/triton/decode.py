"""Attention of one new token per request over its cached context, cut into splits that run side by side.

Splits are short at first, so that a short context is spread out too, and long far out, so that there are few partial
results. Where many streams fill the device anyway, all splits are longer (SCALE). The program that finishes a head's
last split puts the parts together, in order of position.

FUSED: q, k and v come straight from the projection; every program norms and rotates the q it needs, and the one that
owns the newest position writes its K and V and adds them by itself. Only for steps in which nobody reads blocks that
this step fills: then the cached tokens depend on nobody, and with AHEAD their first tile is asked for before the
projection ends.

int4 keeps two elements in a byte: the even and the odd ones are multiplied apart (q_a and q_b, acc_a and acc_b).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from twostroke.ops.interface import BLOCK, Attention, Batch, KVLayer
from twostroke.ops.triton.heads import FORMATS, INT4, decoded, head_scale, load_codes, nibbles, store_head, turned
from twostroke.ops.triton.launch import EARLY, INTERPRETED, PDL, gdc_launch_dependents, gdc_wait
from twostroke.ops.triton.rows import tanh

# Splits of NEAR tokens up to position 1024, of MIDDLE up to 16384, of FAR beyond.
NEAR, MIDDLE, FAR = tl.constexpr(128), tl.constexpr(512), tl.constexpr(2048)
NEAR_SPLITS, MIDDLE_SPLITS = tl.constexpr(8), tl.constexpr(38)  # splits that end at 1024 and at 16384
LOG2E = tl.constexpr(1.4426950408889634)


LONGEST = 8  # times that splits may be longer than usual


def longer(heads: int) -> int:
    """Times that splits are longer where so many K/V heads of all streams want programs, as measured on an H200."""
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
def load_kv(
    n0, begin, end, table, keys, values, key_scales, value_scales, block_stride, token_stride, scale_block_stride,
    WIDTH: tl.constexpr, WIDE: tl.constexpr, FORMAT: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Codes and scales of the tile of positions from n0 on."""
    places = n0 + tl.arange(0, TILE)
    seen = (places >= begin) & (places < end)
    blocks = tl.load(table + places // BLOCK, mask=seen, other=0)
    k = load_codes(keys, blocks, places % BLOCK, seen, block_stride, token_stride, WIDTH, WIDE, True, FORMAT)
    v = load_codes(values, blocks, places % BLOCK, seen, block_stride, token_stride, WIDTH, WIDE, True, FORMAT)
    k_scale, v_scale = seen, seen
    if FORMAT > 0:
        where = blocks.to(tl.int64) * scale_block_stride + places % BLOCK
        k_scale = tl.load(key_scales + where, mask=seen, other=0.0)
        v_scale = tl.load(value_scales + where, mask=seen, other=0.0)
    return seen, k, v, k_scale, v_scale


@triton.jit
def attend_tile(
    q_a, q_b, best, total, acc_a, acc_b, seen, k, v, k_scale, v_scale, scale, softcap,
    FORMAT: tl.constexpr, SOFTCAP: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    if FORMAT == 2:
        k_a, k_b = nibbles(k, DTYPE, FAST)
        s = tl.dot(q_a, tl.trans(k_a), input_precision=PRECISION)
        s = tl.dot(q_b, tl.trans(k_b), s, input_precision=PRECISION) * scale
    else:
        s = tl.dot(q_a, tl.trans(decoded(k, FORMAT, DTYPE, FAST)), input_precision=PRECISION) * scale
    if FORMAT > 0:
        s *= k_scale[None, :]
    if SOFTCAP:
        s = softcap * tanh(s / softcap)
    s = tl.where(seen[None, :], s * LOG2E, float("-inf"))
    new = tl.maximum(best, tl.max(s, axis=1))
    p = tl.exp2(s - new[:, None])
    shrink = tl.exp2(best - new)
    total = total * shrink + tl.sum(p, axis=1)
    if FORMAT > 0:
        p *= v_scale[None, :]
    p = p.to(DTYPE)
    if FORMAT == 2:
        v_a, v_b = nibbles(v, DTYPE, FAST)
        acc_a = tl.dot(p, v_a, acc_a * shrink[:, None], input_precision=PRECISION)
        acc_b = tl.dot(p, v_b, acc_b * shrink[:, None], input_precision=PRECISION)
    else:
        acc_a = tl.dot(p, decoded(v, FORMAT, DTYPE, FAST), acc_a * shrink[:, None], input_precision=PRECISION)
    return new, total, acc_a, acc_b


@triton.jit
def add_newest(q_a, q_b, best, total, acc_a, acc_b, k, v, scale, softcap, PAIRS: tl.constexpr, SOFTCAP: tl.constexpr):
    """Start from the newest token alone; k and v (2, WIDE) hold it in their first row and zeros in the second."""
    k, v = tl.sum(k, axis=0), tl.sum(v, axis=0)
    if PAIRS:
        k_a, k_b = tl.split(tl.reshape(k, (k.shape[0] // 2, 2)))
        v_a, v_b = tl.split(tl.reshape(v, (v.shape[0] // 2, 2)))
        s = tl.sum(q_a.to(tl.float32) * k_a[None, :], axis=1) + tl.sum(q_b.to(tl.float32) * k_b[None, :], axis=1)
        acc_b += v_b[None, :]
    else:
        v_a = v
        s = tl.sum(q_a.to(tl.float32) * k[None, :], axis=1)
    s *= scale
    if SOFTCAP:
        s = softcap * tanh(s / softcap)
    return s * LOG2E, total + 1.0, acc_a + v_a[None, :], acc_b


@triton.jit
def combine(
    part, part_ptr, part_max_ptr, part_sum_ptr, first_split, last_split, shared, dims, HEAD: tl.constexpr,
    SPLITS_2: tl.constexpr,
):  # fmt: skip
    """The splits of a head put together in order of position: elements `dims`, not yet divided, and the sums."""
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
    return acc, total


@triton.jit(do_not_specialize=["table_stride", "splits"])
def decode_kernel(
    q_ptr, out_ptr, part_ptr, part_max_ptr, part_sum_ptr, done_ptr, rows_ptr, shared_ptr, starts_ptr,
    contexts_ptr, tables_ptr,
    keys, values, key_scales, value_scales, cos_ptr, sin_ptr, qnorm_ptr, knorm_ptr, q_eps, k_eps,
    scale, softcap, q_stride, table_stride, block_stride, head_stride, token_stride, scale_block_stride,
    scale_head_stride, splits,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SHARE_2: tl.constexpr, HEAD: tl.constexpr, WIDE: tl.constexpr,
    HALF: tl.constexpr, NORM: tl.constexpr, FORMAT: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, SCALE: tl.constexpr, SPLITS_2: tl.constexpr, LISTED: tl.constexpr,
    FUSED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr, FAST: tl.constexpr,
    AHEAD: tl.constexpr, CASCADE: tl.constexpr,
):  # fmt: skip
    SHARE: tl.constexpr = HEADS // KV_HEADS
    DTYPE: tl.constexpr = q_ptr.dtype.element_ty
    PAIRS: tl.constexpr = FORMAT == 2
    WIDTH: tl.constexpr = HEAD // 2 if FORMAT == 2 else HEAD
    PART: tl.constexpr = WIDE // 2 if FORMAT == 2 else WIDE  # elements of q_a
    head, split = tl.program_id(0), tl.program_id(1)
    request = tl.program_id(2)
    if LISTED:
        request = tl.load(rows_ptr + request)
    context = tl.load(contexts_ptr + request)
    newest = context - 1
    first = tl.maximum(context - WINDOW, 0) if WINDOW > 0 else 0
    first_split, last_split = split_of(first // SCALE), split_of(newest // SCALE)
    first_own = first_split
    if CASCADE:
        first_own = tl.load(shared_ptr + request)  # splits before it are in their places already
    if (split < first_own) | (split > last_split) | (context <= 0):
        if PDL:
            gdc_wait()
            gdc_launch_dependents()
        return
    begin = tl.maximum(SCALE * split_start(split), first)
    end = tl.minimum(SCALE * split_start(split + 1), context)
    if FUSED:
        end = tl.minimum(end, newest)
    row = tl.load(starts_ptr + request).to(tl.int64)
    table = tables_ptr + request * table_stride
    index = tl.arange(0, SHARE_2)
    shared = index < SHARE
    dims_a = (2 if PAIRS else 1) * tl.arange(0, PART)
    dims_b = dims_a + 1
    heads = q_ptr + row * q_stride + (head * SHARE + tl.where(shared, index, 0)) * HEAD
    keys += head * head_stride
    values += head * head_stride
    key_scales += head * scale_head_stride
    value_scales += head * scale_head_stride
    best = tl.full((SHARE_2,), float("-inf"), tl.float32)
    total = tl.zeros((SHARE_2,), tl.float32)
    acc_a = tl.zeros((SHARE_2, PART), tl.float32)
    acc_b = acc_a
    start = begin // BLOCK * BLOCK
    if AHEAD:
        seen, k, v, k_scale, v_scale = load_kv(
            start, begin, end, table, keys, values, key_scales, value_scales, block_stride, token_stride,
            scale_block_stride, WIDTH, PART, FORMAT, BLOCK, TILE,
        )  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if FUSED:
        rms = head_scale(heads, q_eps, HEAD, WIDE, NORM)
        q_a = turned(heads, shared, dims_a, rms, qnorm_ptr, cos_ptr, sin_ptr, newest, HEAD, HALF, NORM).to(DTYPE)
        q_b = q_a
        if PAIRS:
            q_b = turned(heads, shared, dims_b, rms, qnorm_ptr, cos_ptr, sin_ptr, newest, HEAD, HALF, NORM).to(DTYPE)
        if split == last_split:
            block = tl.load(table + newest // BLOCK).to(tl.int64)
            one = tl.arange(0, 2)
            mine = one < 1
            token = block * block_stride + newest % BLOCK * token_stride + one * 0
            at = block * scale_block_stride + newest % BLOCK + one * 0
            k_head = q_ptr + row * q_stride + (HEADS + head) * HEAD + one * 0
            new_k = store_head(
                keys + token, key_scales + at, k_head, mine, knorm_ptr, k_eps, cos_ptr, sin_ptr, newest,
                HEAD, WIDE, HALF, NORM, FORMAT,
            )  # fmt: skip
            new_v = store_head(
                values + token, value_scales + at, k_head + KV_HEADS * HEAD, mine, knorm_ptr, k_eps, cos_ptr, sin_ptr,
                newest, HEAD, WIDE, 0, False, FORMAT,
            )  # fmt: skip
            best, total, acc_a, acc_b = add_newest(
                q_a, q_b, best, total, acc_a, acc_b, tl.where(mine[:, None], new_k, 0.0),
                tl.where(mine[:, None], new_v, 0.0), scale, softcap, PAIRS, SOFTCAP,
            )  # fmt: skip
        if AHEAD:
            if begin < end:
                best, total, acc_a, acc_b = attend_tile(
                    q_a, q_b, best, total, acc_a, acc_b, seen, k, v, k_scale, v_scale, scale, softcap,
                    FORMAT, SOFTCAP, DTYPE, PRECISION, FAST,
                )  # fmt: skip
            start += TILE
    else:
        q_mask = shared[:, None] & (dims_a < HEAD)[None, :]
        q_a = tl.load(heads[:, None] + dims_a[None, :], mask=q_mask, other=0.0)
        q_b = tl.load(heads[:, None] + dims_b[None, :], mask=q_mask, other=0.0) if PAIRS else q_a
    for n0 in tl.range(start, end, TILE, num_stages=STAGES):
        seen, k, v, k_scale, v_scale = load_kv(
            n0, begin, end, table, keys, values, key_scales, value_scales, block_stride, token_stride,
            scale_block_stride, WIDTH, PART, FORMAT, BLOCK, TILE,
        )  # fmt: skip
        best, total, acc_a, acc_b = attend_tile(
            q_a, q_b, best, total, acc_a, acc_b, seen, k, v, k_scale, v_scale, scale, softcap,
            FORMAT, SOFTCAP, DTYPE, PRECISION, FAST,
        )  # fmt: skip
    inside = shared[:, None] & (dims_a < HEAD)[None, :]
    place = out_ptr + row * HEADS * HEAD + (head * SHARE + index)[:, None] * HEAD
    if first_split == last_split:  # the only part is the whole
        tl.store(place + dims_a[None, :], (acc_a / total[:, None]).to(DTYPE), mask=inside)
        if PAIRS:
            tl.store(place + dims_b[None, :], (acc_b / total[:, None]).to(DTYPE), mask=inside)
        return
    part = (request * HEADS + head * SHARE + index) * splits  # (SHARE_2,): first part of each head
    mine_at = part_ptr + ((part + split) * HEAD)[:, None]
    tl.store(mine_at + dims_a[None, :], acc_a, mask=inside)
    if PAIRS:
        tl.store(mine_at + dims_b[None, :], acc_b, mask=inside)
    tl.store(part_max_ptr + part + split, best, mask=shared)
    tl.store(part_sum_ptr + part + split, total, mask=shared)
    tl.debug_barrier()
    counter = done_ptr + request * KV_HEADS + head
    if tl.atomic_add(counter, 1, sem="acq_rel") != last_split - first_own:
        return
    tl.store(counter, 0)
    tl.debug_barrier()
    dims = tl.arange(0, WIDE)
    acc, sums = combine(
        part, part_ptr, part_max_ptr, part_sum_ptr, first_split, last_split, shared, dims, HEAD, SPLITS_2
    )  # fmt: skip
    tl.store(place + dims[None, :], (acc / sums[:, None]).to(DTYPE), mask=shared[:, None] & (dims < HEAD)[None, :])


class DecodeScratch:
    """Partial results of the splits, and a counter for each head that the last split sets back to 0."""

    def __init__(self, device: torch.device):
        self.device = device
        self.kept: list[Tensor] = []  # outgrown, but captured steps still use them
        self.floats = torch.empty(0, device=device)
        self.done = torch.zeros(0, dtype=torch.int32, device=device)

    def reserve(self, requests: int, heads: int, splits: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        parts = -(-requests * heads * splits // 16) * 16
        if self.floats.numel() < parts * (head_dim + 2):
            self.kept.append(self.floats)
            self.floats = torch.empty(2 * parts * (head_dim + 2), device=self.device)
        if self.done.numel() < requests * heads:
            self.kept.append(self.done)
            self.done = torch.zeros(2 * requests * heads, dtype=torch.int32, device=self.device)
        return self.floats[2 * parts :], self.floats[:parts], self.floats[parts : 2 * parts], self.done


def decode_attention(
    q: Tensor, attention: Attention, kv: KVLayer, batch: Batch, group: int, out: Tensor, scratch: DecodeScratch, *,
    requests: int, listed: Tensor | None, splits: int, fused: bool, scale: int = 1,
    shared: Tensor | None = None, tile: int | None = None, stages: int = 2, warps: int = 4,
) -> Tensor:  # fmt: skip
    """q: (T, heads · head_dim) rotated, or with `fused` the raw projections. listed: indices of the requests to serve
    (None: the first `requests`). splits: at least split_count of the longest context over `scale`, the number of times
    that splits are longer than usual. shared: how many of each
    request's leading splits are done already (cascade.py); only where no layer has a window."""
    dim, share = attention.head_dim, attention.heads // attention.kv_heads
    wide = max(32 if FORMATS[kv.format] == INT4 else 16, triton.next_power_of_2(dim))
    rope, qn, kn = attention.rope, attention.query_norm, attention.key_norm
    scales = kv.key_scales if kv.key_scales is not None else kv.keys
    value_scales = kv.value_scales if kv.value_scales is not None else kv.keys
    total = batch.contexts.shape[0]
    part, part_max, part_sum, done = scratch.reserve(total, attention.heads, splits, dim)
    tables = batch.groups[group].tables
    wide_float = q.dtype == torch.float32
    ahead = fused and requests * attention.kv_heads <= 64  # few programs: latency is all; many: registers are
    if tile is None:
        tile = 32 if wide > 128 or wide_float else 128 if ahead else 64
        stages = 1 if ahead else 2
        short = scale == LONGEST or (scale == 1 and splits <= 8)  # few tokens for a program, or programs enough
        if not ahead and not wide_float and (short or kv.format != "bfloat16"):
            tile, stages, warps = (64 if kv.format == "int4" else 32), 3, 1
    decode_kernel[(attention.kv_heads, splits, requests)](
        q, out, part, part_max, part_sum, done, tables if listed is None else listed,
        tables if shared is None else shared, batch.starts, batch.contexts, tables, kv.keys, kv.values, scales,
        value_scales, rope.cos if rope else q, rope.sin if rope else q,
        qn.weight if qn else q, kn.weight if kn else q, qn.eps if qn else 0.0, kn.eps if kn else 0.0,
        attention.scale, attention.softcap, q.stride(0), tables.stride(0), *kv.keys.stride()[:3], *scales.stride()[:2],
        splits, HEADS=attention.heads, KV_HEADS=attention.kv_heads, SHARE_2=max(16, triton.next_power_of_2(share)),
        HEAD=dim, WIDE=wide, HALF=rope.cos.shape[1] if rope else 0, NORM=qn is not None, FORMAT=FORMATS[kv.format],
        WINDOW=attention.window, SOFTCAP=attention.softcap > 0, BLOCK=BLOCK,
        TILE=tile, SCALE=scale, SPLITS_2=16 if ahead and splits <= 16 else max(128, triton.next_power_of_2(splits)),
        LISTED=listed is not None, FUSED=fused, PRECISION="ieee" if wide_float else "tf32", STAGES=stages, PDL=PDL,
        FAST=not INTERPRETED and q.dtype == torch.bfloat16, AHEAD=ahead, CASCADE=shared is not None,
        num_warps=warps, **EARLY,
    )  # fmt: skip
    return out
