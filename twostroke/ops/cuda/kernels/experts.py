"""Which experts each row takes, and where their matrices lie.

A pair is a row and one of its chosen experts, numbered row · CHOSEN + place. With few rows each pair reads its expert's
matrices by itself (few_rows.py), so a step reads the chosen experts and no others; grouped.py multiplies many rows.

An expert's matrix is found by its distance, in elements, from the first expert's: matrices need not lie together. Its
weights are floats, codes of 8 bits as in quantized.py, or of 4 bits as in four_bits.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from twostroke.ops.cuda.kernels.launch import EARLY, PDL, gdc_launch_dependents, gdc_wait
from twostroke.ops.cuda.kernels.narrow_tiles import INT4, MXFP4
from twostroke.ops.interface import Routing

TINY = tl.constexpr(1e-20)  # added to a sum of weights before it divides
NONE = tl.constexpr(1 << 30)  # an index that no expert has
SCORES = {"softmax": 0, "sigmoid": 1, "sqrt_softplus": 2}


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
def softplus(x):
    """log(1 + exp(x)). The sum is rounded, and the factor makes up for it."""
    small = tl.exp(-tl.abs(x))
    more = 1.0 + small
    made = tl.where(more == 1.0, 1.0, more - 1.0)
    return tl.maximum(x, 0.0) + tl.where(more == 1.0, small, tl.log(more) * (small / made))


@triton.jit
def choice(
    logits_ptr, bias_ptr, correction_ptr, table_ptr, tokens_ptr, row, factor, EXPERTS: tl.constexpr,
    GROUPS: tl.constexpr, G: tl.constexpr, S: tl.constexpr, KEPT: tl.constexpr, BEST: tl.constexpr,
    CHOSEN: tl.constexpr, CHOSEN_2: tl.constexpr, SCORES: tl.constexpr, NORMALISED: tl.constexpr, BIASED: tl.constexpr,
    CORRECTED: tl.constexpr,
):  # fmt: skip
    """The experts of one row and their weights, (CHOSEN_2,) each, the best first. Experts are laid out as G groups of S
    places, of which GROUPS times EXPERTS / GROUPS are taken. All keys are compared with each other at once: an expert's
    place is the number of better ones. A row with a logit that is not a number gets such weights. table_ptr: the
    experts of each token, or None."""
    SIZE: tl.constexpr = EXPERTS // GROUPS
    group, place = tl.arange(0, G)[:, None], tl.arange(0, S)[None, :]
    there = (group < GROUPS) & (place < SIZE)
    index = tl.where(there, group * SIZE + place, NONE)
    at = tl.where(there, index, 0)
    logits = tl.load(logits_ptr + at, cache_modifier=".cg")
    if BIASED:
        logits += tl.load(bias_ptr + at)
    logits = tl.where(there, logits, float("-inf"))
    if SCORES == 1:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    elif SCORES == 2:
        scores = tl.sqrt(softplus(logits))
    else:
        shares = tl.exp(logits - tl.max(tl.max(logits, axis=1), axis=0))
        scores = shares / tl.sum(tl.sum(shares, axis=1), axis=0)
    keys = scores
    if CORRECTED:
        keys += tl.load(correction_ptr + at)
    keys = tl.where(there, keys, float("-inf"))
    if KEPT < GROUPS:
        keys = tl.where(kept_groups(keys, GROUPS, G, S, KEPT, BEST), keys, float("-inf"))
    key, number = tl.reshape(keys, (G * S, 1)), tl.reshape(index, (G * S, 1))
    others, numbers = tl.reshape(keys, (1, G * S)), tl.reshape(index, (1, G * S))
    places = tl.arange(0, CHOSEN_2)
    if table_ptr is not None:
        given = table_ptr + tl.load(tokens_ptr + row).to(tl.int64) * CHOSEN
        ids = tl.load(given + places, mask=places < CHOSEN, other=0)
        mine = (number == ids[None, :]) & (places < CHOSEN)[None, :]
    else:
        better = (others > key) | ((others == key) & (numbers < number))
        rank = tl.sum(better.to(tl.int32), axis=1)[:, None]
        mine = (rank == places[None, :]) & (number < EXPERTS)
        ids = tl.maximum(tl.max(tl.where(mine, number, -1), axis=0), 0)
    weights = tl.sum(tl.where(mine, tl.reshape(scores, (G * S, 1)), 0.0), axis=0)
    weights = tl.where(places < CHOSEN, weights, 0.0)
    if NORMALISED:
        weights = weights / (tl.sum(weights, axis=0) + TINY)
    return ids, weights * factor


@triton.jit
def route_kernel(
    logits_ptr, bias_ptr, correction_ptr, table_ptr, tokens_ptr, ids_ptr, weights_ptr, factor,
    EXPERTS: tl.constexpr, GROUPS: tl.constexpr, G: tl.constexpr, S: tl.constexpr, KEPT: tl.constexpr,
    BEST: tl.constexpr, CHOSEN: tl.constexpr, CHOSEN_2: tl.constexpr, SCORES: tl.constexpr, NORMALISED: tl.constexpr,
    BIASED: tl.constexpr, CORRECTED: tl.constexpr, PARTS: tl.constexpr, PARTS_2: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program chooses for one row. table_ptr: the experts of each token, or None."""
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    ids, weights = choice(
        logits_ptr + row * EXPERTS, bias_ptr, correction_ptr, table_ptr, tokens_ptr, row, factor, EXPERTS, GROUPS, G, S,
        KEPT, BEST, CHOSEN, CHOSEN_2, SCORES, NORMALISED, BIASED, CORRECTED,
    )  # fmt: skip
    store_choice(ids, weights, ids_ptr, weights_ptr, row, EXPERTS, CHOSEN, CHOSEN_2, PARTS, PARTS_2)


@triton.jit
def store_choice(
    ids, weights, ids_ptr, weights_ptr, row, EXPERTS: tl.constexpr, CHOSEN: tl.constexpr, CHOSEN_2: tl.constexpr,
    PARTS: tl.constexpr, PARTS_2: tl.constexpr,
):  # fmt: skip
    """A row's list: first the parts of the expert that every row takes, which count 1, then what it chose."""
    places, first = tl.arange(0, CHOSEN_2), row * (PARTS + CHOSEN)
    tl.store(ids_ptr + first + PARTS + places, ids, mask=places < CHOSEN)
    tl.store(weights_ptr + first + PARTS + places, weights, mask=places < CHOSEN)
    if PARTS > 0:
        part = tl.arange(0, PARTS_2)
        tl.store(ids_ptr + first + part, EXPERTS + part, mask=part < PARTS)
        tl.store(weights_ptr + first + part, part * 0.0 + 1.0, mask=part < PARTS)


def routing_constants(routing: Routing, bias: Tensor | None, correction: Tensor | None) -> dict[str, object]:
    """What `choice` is compiled for."""
    return {
        "EXPERTS": routing.experts, "GROUPS": routing.groups, "G": triton.next_power_of_2(routing.groups),
        "S": triton.next_power_of_2(routing.experts // routing.groups), "KEPT": routing.kept_groups,
        "BEST": routing.group_best, "CHOSEN": routing.chosen, "CHOSEN_2": triton.next_power_of_2(routing.chosen),
        "SCORES": SCORES[routing.scores], "NORMALISED": routing.normalised, "BIASED": bias is not None,
        "CORRECTED": correction is not None,
    }  # fmt: skip


def route(
    logits: Tensor, bias: Tensor | None, correction: Tensor | None, routing: Routing, table: Tensor | None = None,
    tokens: Tensor | None = None, parts: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """logits (T, experts) float32 -> the chosen experts (T, parts + chosen) int32 and their weights float32, the best
    first. table (vocab, chosen), tokens (T,): experts that a table chooses. parts: of the expert that every row takes;
    they come before the others."""
    rows, pairs = logits.shape[0], parts + routing.chosen
    ids = torch.empty(rows, pairs, dtype=torch.int32, device=logits.device)
    weights = torch.empty(rows, pairs, dtype=torch.float32, device=logits.device)
    route_kernel[(rows,)](
        logits, logits if bias is None else bias, logits if correction is None else correction, table, tokens,
        ids, weights, routing.factor, **routing_constants(routing, bias, correction), PARTS=parts,
        PARTS_2=triton.next_power_of_2(max(1, parts)), PDL=PDL, num_warps=4, **EARLY,
    )  # fmt: skip
    return ids, weights


class ExpertMatrices(NamedTuple):
    """One matrix of each expert, all of one shape and format."""

    codes: Tensor  # the first expert's; floats, or codes
    places: Tensor  # (experts,) int64: from the first to each expert's, in elements
    scales: Tensor  # the first expert's; `codes` where they are floats
    scale_places: Tensor
    bias: Tensor | None  # (experts, outputs) float32
    format: int  # 0: floats; else as in narrow_tiles.py

    @property
    def outputs(self) -> int:
        return self.codes.shape[0]

    @property
    def four_bits(self) -> bool:
        return self.format in (INT4, MXFP4)


@triton.jit
def as_weights(codes, scales, n, inside, FORMAT: tl.constexpr):
    """Codes of the rows n as float32; their scales are applied."""
    weights = codes.to(tl.float32)
    if FORMAT > 0:
        weights *= tl.load(scales + n, mask=inside, other=0.0)[:, None]
    return weights
