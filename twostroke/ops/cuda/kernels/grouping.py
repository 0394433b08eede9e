"""Pairs of row and expert in the order of their experts, and the tiles that this order is cut into.

Everything is decided on the device. The host does not know the number of tiles: enough programs for the worst case are
launched, and those without a tile end at once. So a step of fixed size can be captured.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from twostroke.ops.cuda.kernels.launch import EARLY, PDL, gdc_launch_dependents, gdc_wait

COUNTED = 256  # pairs that a program counts or sorts at a time
FEW_PAIRS = 512  # that one program puts in order


@triton.jit(do_not_specialize=["pairs"])
def count_kernel(ids_ptr, counts_ptr, ranks_ptr, pairs, BLOCK: tl.constexpr):
    """Pairs of each expert, and each pair's number among them."""
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = pair < pairs
    expert = tl.load(ids_ptr + pair, mask=inside, other=0)
    rank = tl.atomic_add(counts_ptr + expert, 1, mask=inside)
    tl.store(ranks_ptr + pair, rank, mask=inside)


@triton.jit(do_not_specialize=["pairs"])
def place_kernel(
    ids_ptr, counts_ptr, ranks_ptr, order_ptr, pairs, EXPERTS: tl.constexpr, EXPERTS_2: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """order: the pairs, those of the first expert first."""
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = pair < pairs
    expert = tl.load(ids_ptr + pair, mask=inside, other=0)
    every = tl.arange(0, EXPERTS_2)
    counts = tl.load(counts_ptr + every, mask=every < EXPERTS, other=0)
    before = tl.sum(tl.where(every[None, :] < expert[:, None], counts[None, :], 0), axis=1)
    tl.store(order_ptr + before + tl.load(ranks_ptr + pair, mask=inside, other=0), pair, mask=inside)


@triton.jit(do_not_specialize=["pairs"])
def order_kernel(
    ids_ptr, counts_ptr, order_ptr, pairs, EXPERTS: tl.constexpr, EXPERTS_2: tl.constexpr, MOST: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Both at once, for at most MOST pairs: a pair's place is the number of pairs that come before it."""
    pair, every = tl.arange(0, MOST), tl.arange(0, EXPERTS_2)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    expert = tl.load(ids_ptr + pair, mask=pair < pairs, other=EXPERTS)
    place, counts = tl.zeros((MOST,), tl.int32), tl.zeros((EXPERTS_2,), tl.int32)
    for start in range(0, pairs, BLOCK):
        other = start + tl.arange(0, BLOCK)
        theirs = tl.load(ids_ptr + other, mask=other < pairs, other=EXPERTS)[None, :]
        before = (theirs < expert[:, None]) | ((theirs == expert[:, None]) & (other[None, :] < pair[:, None]))
        place += tl.sum(before.to(tl.int32), axis=1)
        counts += tl.sum((theirs == every[:, None]).to(tl.int32), axis=1)
    tl.store(order_ptr + place, pair, mask=pair < pairs)
    tl.store(counts_ptr + every, counts, mask=every < EXPERTS)


@triton.jit
def tile_of(counts_ptr, tile, EXPERTS: tl.constexpr, EXPERTS_2: tl.constexpr, BLOCK_M: tl.constexpr):
    """The expert of a tile, its first place in `order`, and one past the last of the expert's places. Past the last
    tile the expert is EXPERTS or more."""
    every = tl.arange(0, EXPERTS_2)
    counts = tl.load(counts_ptr + every, mask=every < EXPERTS, other=0)
    tiles = (counts + BLOCK_M - 1) // BLOCK_M
    ends = tl.cumsum(tiles, axis=0)
    expert = tl.sum((ends <= tile).to(tl.int32), axis=0)
    before = every < expert
    start = tl.sum(tl.where(before, counts, 0), axis=0)
    first = start + (tile - tl.sum(tl.where(before, tiles, 0), axis=0)) * BLOCK_M
    return expert, first, start + tl.sum(tl.where(every == expert, counts, 0), axis=0)


class GroupedRows(NamedTuple):
    """The pairs of a step."""

    counts: Tensor  # (experts,) int32: pairs of each
    order: Tensor  # the pairs, those of the first expert first


def group(ids: Tensor, experts: int) -> GroupedRows:
    """ids (T, chosen): the experts of each row."""
    pairs, blocks = ids.numel(), (triton.cdiv(ids.numel(), COUNTED),)
    if pairs <= FEW_PAIRS:
        counts, order = torch.empty(experts, dtype=torch.int32, device=ids.device), torch.empty_like(ids)
        order_kernel[(1,)](
            ids, counts, order, pairs, EXPERTS=experts, EXPERTS_2=triton.next_power_of_2(experts), MOST=FEW_PAIRS,
            BLOCK=32, PDL=PDL, num_warps=8, **EARLY,
        )  # fmt: skip
        return GroupedRows(counts, order)
    counts = torch.zeros(experts, dtype=torch.int32, device=ids.device)
    order, ranks = torch.empty_like(ids), torch.empty_like(ids)
    count_kernel[blocks](ids, counts, ranks, pairs, BLOCK=COUNTED)
    place_kernel[blocks](
        ids, counts, ranks, order, pairs, EXPERTS=experts, EXPERTS_2=triton.next_power_of_2(experts), BLOCK=COUNTED
    )
    return GroupedRows(counts, order)


def most_tiles(pairs: int, experts: int, size: int) -> int:
    """Every expert may have a tile that is not full."""
    return min(pairs, pairs // size + experts)
