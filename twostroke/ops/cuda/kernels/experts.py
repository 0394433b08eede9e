"""Which experts each row takes, and the products of a few rows with the experts they chose.

A pair is a row and one of its chosen experts, numbered row · CHOSEN + place. With few rows each pair reads its expert's
matrices by itself, so a step reads the chosen experts and no others; grouped.py multiplies many rows.

An expert's matrix is found by its distance, in elements, from the first expert's: matrices need not lie together. Its
weights are floats, or codes of 8 bits as in quantized.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from twostroke.ops.cuda.kernels.launch import EARLY, PDL, gdc_launch_dependents, gdc_wait
from twostroke.ops.cuda.kernels.rows import activated
from twostroke.ops.interface import Routing

TINY = tl.constexpr(1e-20)  # added to a sum of weights before it divides
NONE = tl.constexpr(1 << 30)  # an index that no expert has


@triton.jit
def first_best(keys, index):
    """The lowest index among those of the largest key. NONE if a key is not a number."""
    best = tl.max(tl.max(keys, axis=1), axis=0)
    return tl.min(tl.min(tl.where(keys == best, index, NONE), axis=1), axis=0)


@triton.jit
def kept_groups(keys, GROUPS: tl.constexpr, G: tl.constexpr, S: tl.constexpr, KEPT: tl.constexpr, BEST: tl.constexpr):
    """(G, 1): whether experts of the group may be chosen. keys (G, S), -inf where there is no expert."""
    place = tl.arange(0, S)[None, :]
    left, score = keys, tl.zeros((G,), tl.float32)
    for _ in tl.static_range(BEST):
        best = tl.max(left, axis=1)
        score += best
        at = tl.min(tl.where(left == best[:, None], place, S), axis=1)
        left = tl.where(place == at[:, None], float("-inf"), left)
    group = tl.arange(0, G)
    score = tl.where(group < GROUPS, score, float("-inf"))
    kept = tl.zeros((G,), tl.int32)
    for _ in tl.static_range(KEPT):
        at = tl.min(tl.where(score == tl.max(score, axis=0), group, NONE), axis=0)
        kept = tl.where(group == at, 1, kept)
        score = tl.where(group == at, float("-inf"), score)
    return (kept > 0)[:, None]


@triton.jit
def route_kernel(
    logits_ptr, bias_ptr, correction_ptr, ids_ptr, weights_ptr, factor,
    EXPERTS: tl.constexpr, GROUPS: tl.constexpr, G: tl.constexpr, S: tl.constexpr, KEPT: tl.constexpr,
    BEST: tl.constexpr, CHOSEN: tl.constexpr, CHOSEN_2: tl.constexpr, SIGMOID: tl.constexpr, NORMALISED: tl.constexpr,
    BIASED: tl.constexpr, CORRECTED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row: its experts are laid out as G groups of S places, of which GROUPS times EXPERTS / GROUPS are taken."""
    SIZE: tl.constexpr = EXPERTS // GROUPS
    row = tl.program_id(0).to(tl.int64)
    group, place = tl.arange(0, G)[:, None], tl.arange(0, S)[None, :]
    there = (group < GROUPS) & (place < SIZE)
    index = tl.where(there, group * SIZE + place, NONE)
    at = tl.where(there, index, 0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    logits = tl.load(logits_ptr + row * EXPERTS + at)
    if BIASED:
        logits += tl.load(bias_ptr + at)
    logits = tl.where(there, logits, float("-inf"))
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        shares = tl.exp(logits - tl.max(tl.max(logits, axis=1), axis=0))
        scores = shares / tl.sum(tl.sum(shares, axis=1), axis=0)
    keys = scores
    if CORRECTED:
        keys += tl.load(correction_ptr + at)
    keys = tl.where(there, keys, float("-inf"))
    if KEPT < GROUPS:
        keys = tl.where(kept_groups(keys, GROUPS, G, S, KEPT, BEST), keys, float("-inf"))
    places = tl.arange(0, CHOSEN_2)
    ids, weights = tl.zeros((CHOSEN_2,), tl.int32), tl.zeros((CHOSEN_2,), tl.float32)
    for place_of in tl.static_range(CHOSEN):
        best = first_best(keys, index)
        weight = tl.sum(tl.sum(tl.where(index == best, scores, 0.0), axis=1), axis=0)
        weight = tl.where(best < EXPERTS, weight, float("nan"))
        ids = tl.where(places == place_of, tl.minimum(best, EXPERTS - 1), ids)
        weights = tl.where(places == place_of, weight, weights)
        keys = tl.where(index == best, float("-inf"), keys)
    if NORMALISED:
        weights = weights / (tl.sum(weights, axis=0) + TINY)
    mine = places < CHOSEN
    tl.store(ids_ptr + row * CHOSEN + places, ids, mask=mine)
    tl.store(weights_ptr + row * CHOSEN + places, weights * factor, mask=mine)


def route(logits: Tensor, bias: Tensor | None, correction: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    """logits (T, experts) float32 -> the chosen experts (T, chosen) int32 and their weights float32, the best first."""
    rows = logits.shape[0]
    ids = torch.empty(rows, routing.chosen, dtype=torch.int32, device=logits.device)
    weights = torch.empty(rows, routing.chosen, dtype=torch.float32, device=logits.device)
    size = routing.experts // routing.groups
    route_kernel[(rows,)](
        logits, logits if bias is None else bias, logits if correction is None else correction, ids, weights,
        routing.factor, EXPERTS=routing.experts, GROUPS=routing.groups, G=triton.next_power_of_2(routing.groups),
        S=triton.next_power_of_2(size), KEPT=routing.kept_groups, BEST=routing.group_best, CHOSEN=routing.chosen,
        CHOSEN_2=triton.next_power_of_2(routing.chosen), SIGMOID=routing.scores == "sigmoid",
        NORMALISED=routing.normalised, BIASED=bias is not None, CORRECTED=correction is not None, PDL=PDL,
        num_warps=1 if routing.experts <= 128 else 4, **EARLY,
    )  # fmt: skip
    return ids, weights


class ExpertMatrices(NamedTuple):
    """One matrix of each expert, all of one shape and format."""

    codes: Tensor  # the first expert's; floats, or codes
    places: Tensor  # (experts,) int64: from the first to each expert's, in elements
    scales: Tensor  # the first expert's; `codes` where they are floats
    scale_places: Tensor
    format: int  # 0: floats; else as in narrow_tiles.py


@triton.jit
def expert_tile(w_rows, inside, k0, k, K: tl.constexpr):
    """(rows, BLOCK_K) weights or codes of columns k0 on; zeros past the end."""
    return tl.load(w_rows + (k0 + k)[None, :], mask=inside[:, None] & (k0 + k < K)[None, :], other=0.0)


@triton.jit
def as_weights(codes, scales, n, inside, FORMAT: tl.constexpr):
    """Codes of the rows n as float32; their scales are applied."""
    weights = codes.to(tl.float32)
    if FORMAT > 0:
        weights *= tl.load(scales + n, mask=inside, other=0.0)[:, None]
    return weights


@triton.jit
def pair_gate_kernel(
    x_ptr, w_ptr, places_ptr, scales_ptr, scale_places_ptr, ids_ptr, out_ptr, K: tl.constexpr, WIDTH: tl.constexpr,
    CHOSEN: tl.constexpr, FORMAT: tl.constexpr, SILU: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out (pairs, WIDTH) = activation(gate) · up of a pair's row of x (T, K). The first half of an expert's rows is
    gate."""
    pair = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    inside = n < WIDTH
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    expert = tl.load(ids_ptr + pair)
    place = tl.multiple_of(tl.load(places_ptr + expert), 16)
    scales = scales_ptr + tl.load(scale_places_ptr + expert)
    gates = w_ptr + place + n.to(tl.int64)[:, None] * K
    ups = gates + WIDTH * K
    x_row = x_ptr + pair // CHOSEN * K
    gate, up = expert_tile(gates, inside, 0, k, K), expert_tile(ups, inside, 0, k, K)
    left, right = tl.zeros((BLOCK_N, BLOCK_K), tl.float32), tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for k0 in range(0, K, BLOCK_K):
        next_gate = expert_tile(gates, inside, k0 + BLOCK_K, k, K)
        next_up = expert_tile(ups, inside, k0 + BLOCK_K, k, K)
        x = tl.load(x_row + k0 + k, mask=k0 + k < K, other=0.0).to(tl.float32)[None, :]
        left += as_weights(gate, scales, n, inside, FORMAT) * x
        right += as_weights(up, scales, WIDTH + n, inside, FORMAT) * x
        gate, up = next_gate, next_up
    out = activated(tl.sum(left, axis=1), SILU) * tl.sum(right, axis=1)
    tl.store(out_ptr + pair * WIDTH + n, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def pair_down_kernel(
    inner_ptr, w_ptr, places_ptr, scales_ptr, scale_places_ptr, ids_ptr, weights_ptr, out_ptr, N: tl.constexpr,
    K: tl.constexpr, CHOSEN: tl.constexpr, FORMAT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out (T, N): the sum of a row's experts, each times its weight. One loop runs over all experts' columns, so that
    the next tile is being loaded at all times."""
    ROUNDS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    row = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    inside = n < N
    rows = w_ptr + n.to(tl.int64)[:, None] * K
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    place = tl.multiple_of(tl.load(places_ptr + tl.load(ids_ptr + row * CHOSEN)), 16)
    tile = expert_tile(rows + place, inside, 0, k, K)
    for turn in range(CHOSEN * ROUNDS):
        following = tl.minimum(turn + 1, CHOSEN * ROUNDS - 1)
        place = tl.load(places_ptr + tl.load(ids_ptr + row * CHOSEN + following // ROUNDS))
        next_tile = expert_tile(rows + tl.multiple_of(place, 16), inside, following % ROUNDS * BLOCK_K, k, K)
        pair, k0 = row * CHOSEN + turn // ROUNDS, turn % ROUNDS * BLOCK_K
        x = tl.load(inner_ptr + pair * K + k0 + k, mask=k0 + k < K, other=0.0).to(tl.float32)
        scales = scales_ptr + tl.load(scale_places_ptr + tl.load(ids_ptr + pair))
        tile_weights = as_weights(tile, scales, n, inside, FORMAT)
        total += tile_weights * (x * tl.load(weights_ptr + pair))[None, :]
        tile = next_tile
    tl.store(out_ptr + row * N + n, tl.sum(total, axis=1).to(out_ptr.dtype.element_ty), mask=inside)


def pair_experts(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: ExpertMatrices, down: ExpertMatrices, silu: bool
) -> Tensor:
    """x (T, hidden) normed -> (T, hidden)."""
    rows, hidden = x.shape
    chosen, width = ids.shape[1], down.codes.shape[1]
    inner = torch.empty(rows * chosen, width, dtype=x.dtype, device=x.device)
    out = torch.empty(rows, hidden, dtype=x.dtype, device=x.device)
    block_k = min(512, triton.next_power_of_2(hidden))
    pair_gate_kernel[(triton.cdiv(width, 8), rows * chosen)](
        x, *gate_up[:4], ids, inner, K=hidden, WIDTH=width, CHOSEN=chosen, FORMAT=gate_up.format, SILU=silu, BLOCK_N=8,
        BLOCK_K=block_k, PDL=PDL, num_warps=4, **EARLY,
    )  # fmt: skip
    block_k = min(1024, triton.next_power_of_2(width))
    pair_down_kernel[(triton.cdiv(hidden, 8), rows)](
        inner, *down[:4], ids, weights, out, N=hidden, K=width, CHOSEN=chosen, FORMAT=down.format, BLOCK_N=8,
        BLOCK_K=block_k, PDL=PDL, num_warps=4 if block_k <= 512 else 8, **EARLY,
    )  # fmt: skip
    return out
