"""Which experts a row uses, and what each counts: the specification of `Routing`."""

from __future__ import annotations

import torch
from torch import Tensor

from twostroke.ops.interface import Routing

TINY = 1e-20  # added to a sum of weights before it divides


def route(logits: Tensor, correction: Tensor | None, routing: Routing) -> list[tuple[int, float]]:
    """(experts,) outputs of the router -> the chosen experts and their weights, the best first."""
    wide = logits.double()
    scores = (torch.softmax(wide, dim=0) if routing.scores == "softmax" else torch.sigmoid(wide)).float()
    keys = (scores if correction is None else scores + correction).tolist()
    size = routing.experts // routing.groups
    of_groups = [sum(sorted(keys[start : start + size], reverse=True)[: routing.group_best])
                 for start in range(0, routing.experts, size)]  # fmt: skip
    kept = best(of_groups, range(routing.groups), routing.kept_groups)
    allowed = [expert for group in sorted(kept) for expert in range(group * size, (group + 1) * size)]
    chosen = best(keys, allowed, routing.chosen)
    weights = scores[chosen].double()
    if routing.normalised:
        weights = weights / (weights.sum() + TINY)
    return list(zip(chosen, (weights * routing.factor).float().tolist(), strict=True))


def best(keys: list[float], among: range | list[int], count: int) -> list[int]:
    """The indices of the largest keys, the largest first, the lowest index first among equals."""
    return sorted(among, key=lambda index: -keys[index])[:count]
