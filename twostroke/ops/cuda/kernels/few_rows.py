"""A few rows through the experts they choose, in three kernels: each pair of row and expert reads its own matrices.

router   norm, and the product of some experts' rows. The last program of a row to finish chooses the row's experts
gate     activation(gate) · up of every pair, times what the expert counts
down     the sum of a row's pairs, added to the row

An expert that every row takes, where there is one, is cut into PARTS of the width of the others. They come first in a
row's list, as the experts EXPERTS, EXPERTS + 1 …, and count 1.

All three start early (launch.py). Router and down load their first weights then: the choice was made before the kernel
in front of down began. The gate's choice is not known yet: it asks for its part of the expert that every row takes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from twostroke.ops.cuda.kernels.experts import ExpertMatrices, choice, routing_constants, store_choice
from twostroke.ops.cuda.kernels.few_codes import GATE, down_codes_kernel, down_form, gate_codes_kernel
from twostroke.ops.cuda.kernels.launch import (
    EARLY,
    FETCH_BYTES,
    INTERPRETED,
    PDL,
    ask_ahead,
    gdc_launch_dependents,
    gdc_wait,
)
from twostroke.ops.cuda.kernels.rows import gated_pair
from twostroke.ops.interface import Routing


@triton.jit
def router_kernel(
    x_ptr, norm_ptr, w_ptr, bias_ptr, correction_ptr, table_ptr, tokens_ptr, normed_ptr, logits_ptr, done_ptr, ids_ptr,
    weights_ptr, eps, factor, x_stride, K: tl.constexpr, K_2: tl.constexpr, PARTS: tl.constexpr, PARTS_2: tl.constexpr,
    EXPERTS: tl.constexpr, GROUPS: tl.constexpr, G: tl.constexpr, S: tl.constexpr, KEPT: tl.constexpr,
    BEST: tl.constexpr, CHOSEN: tl.constexpr, CHOSEN_2: tl.constexpr, SCORES: tl.constexpr, NORMALISED: tl.constexpr,
    BIASED: tl.constexpr, CORRECTED: tl.constexpr, BLOCK_E: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program has BLOCK_E experts. The first of a row also stores the normed row."""
    row, k = tl.program_id(1).to(tl.int64), tl.arange(0, K_2)
    expert = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    inside = (expert < EXPERTS)[:, None] & (k < K)[None, :]
    w = tl.load(w_ptr + expert.to(tl.int64)[:, None] * K + k[None, :], mask=inside, other=0.0)
    norm = tl.load(norm_ptr + k, mask=k < K, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x = tl.load(x_ptr + row * x_stride + k, mask=k < K, other=0.0).to(tl.float32)
    size = tl.rsqrt(tl.sum(x * x, axis=0) / K + eps)
    x *= norm
    logits = tl.sum(w.to(tl.float32) * x[None, :], axis=1) * size
    tl.store(logits_ptr + row * EXPERTS + expert, logits, mask=expert < EXPERTS)
    if tl.program_id(0) == 0:
        tl.store(normed_ptr + row * K + k, (x * size).to(normed_ptr.dtype.element_ty), mask=k < K)
    tl.debug_barrier()
    if tl.atomic_add(done_ptr + row, 1, sem="acq_rel") != tl.num_programs(0) - 1:
        return
    tl.store(done_ptr + row, 0)
    ids, weights = choice(
        logits_ptr + row * EXPERTS, bias_ptr, correction_ptr, table_ptr, tokens_ptr, row, factor, EXPERTS, GROUPS, G, S,
        KEPT, BEST, CHOSEN, CHOSEN_2, SCORES, NORMALISED, BIASED, CORRECTED,
    )  # fmt: skip
    store_choice(ids, weights, ids_ptr, weights_ptr, row, EXPERTS, CHOSEN, CHOSEN_2, PARTS, PARTS_2)


@triton.jit
def gate_tile(w_rows, inside, k0, k, K: tl.constexpr):
    """(rows, BLOCK_K) weights or codes of columns k0 on; zeros past the end."""
    return tl.load(w_rows + (k0 + k)[None, :], mask=inside[:, None] & (k0 + k < K)[None, :], other=0.0)


@triton.jit
def few_gate_kernel(
    x_ptr, w_ptr, places_ptr, scales_ptr, scale_places_ptr, bias_ptr, ids_ptr, weights_ptr, out_ptr, K: tl.constexpr,
    WIDTH: tl.constexpr, SHARED: tl.constexpr, EXPERTS: tl.constexpr, MATRICES_2: tl.constexpr, PARTS: tl.constexpr,
    PAIRS: tl.constexpr, FORMAT: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    ASK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out (pairs, WIDTH) from x (T, K), normed. The first half of an expert's rows is gate. PAIRS of each row. All
    matrices' places are loaded before the choice is known: one load less stands before the first weights."""
    pair = tl.program_id(1).to(tl.int64)
    part = tl.program_id(1) % PAIRS
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    inside = n < WIDTH
    every = tl.arange(0, MATRICES_2)
    places = tl.load(places_ptr + every, mask=every < EXPERTS + PARTS, other=0) // 16
    if ASK > 0:  # noqa: SIM102  (one is known at compile time)
        if part < PARTS:
            beginning = w_ptr + tl.load(places_ptr + EXPERTS + part) + tl.program_id(0) * BLOCK_N * K
            ask_ahead(beginning, 0, 1, ASK)
            ask_ahead(beginning + SHARED * K, 0, 1, ASK)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    expert = tl.load(ids_ptr + pair)
    place = tl.sum(tl.where(every == expert, places, 0), axis=0) * 16  # a hint of 16 gets lost in the sum
    between = tl.where(part < PARTS, SHARED, WIDTH)  # rows from gate to up
    gates = w_ptr + place + n.to(tl.int64)[:, None] * K
    ups = gates + between * K
    x_row = x_ptr + pair // PAIRS * K
    gate, up = gate_tile(gates, inside, 0, k, K), gate_tile(ups, inside, 0, k, K)
    left, right = tl.zeros((BLOCK_N, BLOCK_K), tl.float32), tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for k0 in range(0, K, BLOCK_K):
        next_gate, next_up = gate, up
        if BLOCK_K < K:
            next_gate = gate_tile(gates, inside, k0 + BLOCK_K, k, K)
            next_up = gate_tile(ups, inside, k0 + BLOCK_K, k, K)
        x = tl.load(x_row + k0 + k, mask=k0 + k < K, other=0.0).to(tl.float32)
        left += gate.to(tl.float32) * x[None, :]
        right += up.to(tl.float32) * x[None, :]
        gate, up = next_gate, next_up
    gate, up = tl.sum(left, axis=1), tl.sum(right, axis=1)
    if FORMAT > 0:
        scales = scales_ptr + tl.load(scale_places_ptr + expert) + n
        gate *= tl.load(scales, mask=inside, other=0.0)
        up *= tl.load(scales + between, mask=inside, other=0.0)
    if bias_ptr is not None:
        side = bias_ptr + expert * (2 * WIDTH) + n
        gate += tl.load(side, mask=inside, other=0.0)
        up += tl.load(side + WIDTH, mask=inside, other=0.0)
    out = gated_pair(gate, up, ACTIVATION) * tl.load(weights_ptr + pair)
    tl.store(out_ptr + pair * WIDTH + n, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def down_tile(rows, mask, k0, k, K: tl.constexpr):
    """(outputs, pairs, BLOCK_K) weights or codes of columns k0 on of every pair; zeros past the end."""
    return tl.load(rows + (k0 + k)[None, None, :], mask=mask & (k0 + k < K)[None, None, :], other=0.0)


@triton.jit
def inner_tile(inner, pair, k0, k, K: tl.constexpr, PAIRS: tl.constexpr):
    at = inner + pair[:, None] * K + (k0 + k)[None, :]
    return tl.load(at, mask=(pair < PAIRS)[:, None] & (k0 + k < K)[None, :], other=0.0)


@triton.jit
def few_down_kernel(
    inner_ptr, w_ptr, places_ptr, scales_ptr, scale_places_ptr, bias_ptr, ids_ptr, weights_ptr, out_ptr,
    N: tl.constexpr, K: tl.constexpr, SHARED: tl.constexpr, PARTS: tl.constexpr, PAIRS: tl.constexpr,
    PAIRS_2: tl.constexpr, FORMAT: tl.constexpr, ADD: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    DEPTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out (T, N): the sum of a row's pairs; ADD: added to what `out` holds. All pairs' matrices are read side by side,
    the first DEPTH tiles before the kernel in front has ended."""
    row = tl.program_id(1).to(tl.int64)
    n, k, pair = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K), tl.arange(0, PAIRS_2)
    # Not from the L1 cache: it may hold what lay there before, and nothing was waited for yet.
    expert = tl.load(ids_ptr + row * PAIRS + pair, mask=pair < PAIRS, other=0, cache_modifier=".cg")
    place = tl.multiple_of(tl.load(places_ptr + expert), 16)
    width = tl.where(pair < PARTS, SHARED, K)
    rows = w_ptr + place[None, :, None] + n.to(tl.int64)[:, None, None] * width[None, :, None]
    mask = (n < N)[:, None, None] & (pair < PAIRS)[None, :, None]
    tile = down_tile(rows, mask, 0, k, K)
    second, third = tile, tile
    if DEPTH > 1:
        second = down_tile(rows, mask, BLOCK_K, k, K)
    if DEPTH > 2:
        third = down_tile(rows, mask, 2 * BLOCK_K, k, K)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    inner = inner_ptr + row * PAIRS * K
    x = inner_tile(inner, pair, 0, k, K, PAIRS)
    total = tl.zeros((BLOCK_N, PAIRS_2, BLOCK_K), tl.float32)
    for k0 in range(0, K, BLOCK_K):
        new, next_x = tile, x
        if K > DEPTH * BLOCK_K:
            new = down_tile(rows, mask, k0 + DEPTH * BLOCK_K, k, K)
        if K > BLOCK_K:
            next_x = inner_tile(inner, pair, k0 + BLOCK_K, k, K, PAIRS)
        total += tile.to(tl.float32) * x.to(tl.float32)[None, :, :]
        x = next_x
        if DEPTH == 1:
            tile = new
        elif DEPTH == 2:
            tile, second = second, new
        else:
            tile, second, third = second, third, new
    sums = tl.sum(total, axis=2)
    if FORMAT > 0:
        at = scales_ptr + tl.load(scale_places_ptr + expert)[None, :] + n[:, None]
        sums *= tl.load(at, mask=(n < N)[:, None] & (pair < PAIRS)[None, :], other=0.0)
    if bias_ptr is not None:
        counts = tl.load(weights_ptr + row * PAIRS + pair, mask=pair < PAIRS, other=0.0)
        side = bias_ptr + expert[None, :] * N + n[:, None]
        sums += tl.load(side, mask=(n < N)[:, None] & (pair < PAIRS)[None, :], other=0.0) * counts[None, :]
    out = tl.sum(sums, axis=1)
    if ADD:
        out += tl.load(out_ptr + row * N + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * N + n, out.to(out_ptr.dtype.element_ty), mask=n < N)


class FewExperts(NamedTuple):
    """A layer's experts for few rows. Matrices past the router's experts are the parts of one that every row takes."""

    router: Tensor  # (experts, hidden)
    bias: Tensor | None  # of the router
    correction: Tensor | None
    table: Tensor | None  # the experts of each token
    routing: Routing
    gate_up: ExpertMatrices
    down: ExpertMatrices
    width: int  # of an expert
    shared: int  # width of the one that every row takes; 0: there is none
    activation: int  # as in rows.py

    @property
    def parts(self) -> int:
        return self.shared // self.width


ROUTED = 1  # experts of a program of the router
NARROW = 1024  # width below which an expert's matrices are cut in other ways: 768 and 1,408 were measured


class GateTile(NamedTuple):
    n: int
    k: int
    warps: int


class DownTile(NamedTuple):
    n: int
    k: int
    warps: int
    depth: int


def gate_shape(hidden: int, width: int) -> GateTile:
    """The fastest shape, as measured on an H200 in whole steps. Widths where 2,048 lanes would be a third idle take
    fewer."""
    if hidden > 2048 and -(-hidden // 2048) * 2048 > 1.3 * hidden:
        return GateTile(4, 1024, 4)
    return GateTile(2, min(2048, triton.next_power_of_2(hidden)), 2 if width < NARROW else 4)


def down_shape(width: int, pairs: int) -> DownTile:
    outputs = 16 if width < NARROW and pairs <= 8 else 8
    return DownTile(outputs, min(128, triton.next_power_of_2(width)), 8, 2)


def few_rows_experts(
    x: Tensor, norm: Tensor, eps: float, experts: FewExperts, tokens: Tensor | None, done: Tensor, out: Tensor | None,
    gate_tile: GateTile | None = None, down_tile: DownTile | None = None,
) -> Tensor:  # fmt: skip
    """x (T, hidden), not normed -> what its experts add; with `out` that is added to it. done: zeros, one for each
    row."""
    (rows, hidden), routing, parts = x.shape, experts.routing, experts.parts
    pairs, width, device = parts + routing.chosen, experts.width, x.device
    logits = torch.empty(rows, routing.experts, dtype=torch.float32, device=device)
    ids = torch.empty(rows, pairs, dtype=torch.int32, device=device)
    weights = torch.empty(rows, pairs, dtype=torch.float32, device=device)
    inner = torch.empty(rows, pairs, width, dtype=x.dtype, device=device)
    normed = torch.empty(rows, hidden, dtype=x.dtype, device=device)
    router_kernel[(triton.cdiv(routing.experts, ROUTED), rows)](
        x, norm, experts.router, experts.router if experts.bias is None else experts.bias,
        experts.router if experts.correction is None else experts.correction, experts.table, tokens, normed, logits,
        done, ids, weights, eps, routing.factor, x.stride(0), K=hidden, K_2=triton.next_power_of_2(hidden), PARTS=parts,
        PARTS_2=triton.next_power_of_2(max(1, parts)), **routing_constants(routing, experts.bias, experts.correction),
        BLOCK_E=ROUTED, PDL=PDL, num_warps=8, **EARLY,
    )  # fmt: skip
    launch_gate(normed, experts, ids, weights, inner, gate_tile)
    into = torch.empty(rows, hidden, dtype=x.dtype, device=device) if out is None else out
    launch_down(inner, experts, ids, weights, into, out is not None, down_tile)
    return into


def launch_gate(
    normed: Tensor, experts: FewExperts, ids: Tensor, weights: Tensor, inner: Tensor, given: GateTile | None
) -> None:
    (rows, pairs, width), hidden, matrices = inner.shape, normed.shape[1], experts.gate_up
    common = {"K": hidden, "WIDTH": width, "PAIRS": pairs, "FORMAT": matrices.format, "PDL": PDL,
              "ACTIVATION": experts.activation, **EARLY}  # fmt: skip
    if matrices.four_bits:
        every = len(matrices.places)
        gate_codes_kernel[(triton.cdiv(width, GATE.warps * GATE.turns), rows * pairs)](
            normed, *matrices[:5], ids, weights, inner, **common, EXPERTS=every,
            EXPERTS_2=triton.next_power_of_2(every), W=GATE.warps, TURNS=GATE.turns, PRECISION=precision(normed),
            FAST=not INTERPRETED, num_warps=GATE.warps,
        )  # fmt: skip
        return
    tile, parts = given or gate_shape(hidden, width), experts.parts
    piece = tile.n * hidden * matrices.codes.element_size()
    whole = width % tile.n == 0 and piece % FETCH_BYTES.value == 0
    few_gate_kernel[(triton.cdiv(width, tile.n), rows * pairs)](
        normed, *matrices[:5], ids, weights, inner, **common, SHARED=experts.shared, EXPERTS=experts.routing.experts,
        MATRICES_2=triton.next_power_of_2(experts.routing.experts + parts), PARTS=parts, BLOCK_N=tile.n, BLOCK_K=tile.k,
        ASK=piece // FETCH_BYTES.value if parts and whole and not INTERPRETED else 0, num_warps=tile.warps,
    )  # fmt: skip


def launch_down(
    inner: Tensor, experts: FewExperts, ids: Tensor, weights: Tensor, into: Tensor, add: bool, given: DownTile | None
) -> None:
    (rows, pairs, width), hidden, matrices = inner.shape, into.shape[1], experts.down
    common = {"N": hidden, "K": width, "PAIRS": pairs, "FORMAT": matrices.format, "ADD": add, "PDL": PDL, **EARLY}
    if matrices.four_bits:
        form = down_form(pairs)
        down_codes_kernel[(triton.cdiv(hidden, 2 * form.turns), rows)](
            inner, *matrices[:5], ids, weights, into, **common, W=form.warps, TURNS=form.turns,
            PRECISION=precision(inner), FAST=not INTERPRETED, num_warps=form.warps,
        )  # fmt: skip
        return
    cut = given or down_shape(width, pairs)
    few_down_kernel[(triton.cdiv(hidden, cut.n), rows)](
        inner, *matrices[:5], ids, weights if matrices.bias is not None else None, into, **common,
        SHARED=experts.shared, PARTS=experts.parts, PAIRS_2=triton.next_power_of_2(pairs), BLOCK_N=cut.n, BLOCK_K=cut.k,
        DEPTH=cut.depth, num_warps=cut.warps,
    )  # fmt: skip


def precision(x: Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"
