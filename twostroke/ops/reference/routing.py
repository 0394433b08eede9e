"""Which experts a row uses, and what each counts: the specification of `Routing`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from twostroke.ops.interface import Routing

TINY = 1e-20  # added to a sum of weights before it divides


SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits: torch.softmax(logits, dim=0),
    "sigmoid": torch.sigmoid,
    "sqrt_softplus": lambda logits: torch.sqrt(logits.clamp(min=0) + torch.log1p(torch.exp(-logits.abs()))),
}


def route(
    logits: Tensor, correction: Tensor | None, routing: Routing, given: list[int] | None = None
) -> list[tuple[int, float]]:
    """(experts,) outputs of the router -> the chosen experts and their weights, the best first. given: experts that
    were chosen otherwise."""
    wide = logits.double()
    scores = SCORES[routing.scores](wide).float()
    if given is not None:
        return _weighed(given, scores, routing)
    keys = (scores if correction is None else scores + correction).tolist()
    size = routing.experts // routing.groups
    of_groups = [sum(sorted(keys[start : start + size], reverse=True)[: routing.group_best])
                 for start in range(0, routing.experts, size)]  # fmt: skip
    kept = best(of_groups, range(routing.groups), routing.kept_groups)
    allowed = [expert for group in sorted(kept) for expert in range(group * size, (group + 1) * size)]
    return _weighed(best(keys, allowed, routing.chosen), scores, routing)


def _weighed(chosen: list[int], scores: Tensor, routing: Routing) -> list[tuple[int, float]]:
    weights = scores[chosen].double()
    if routing.normalised:
        weights = weights / (weights.sum() + TINY)
    return list(zip(chosen, (weights * routing.factor).float().tolist(), strict=True))


def best(keys: list[float], among: range | list[int], count: int) -> list[int]:
    """The indices of the largest keys, the largest first, the lowest index first among equals."""
    return sorted(among, key=lambda index: -keys[index])[:count]
