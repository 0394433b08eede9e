"""Matrix products whose rows do not know how many they are.

A BLAS picks its kernel, and with it the order of additions over the inner axis, by the shape of the call: one row times
a matrix may differ in the last bit from the same row among a hundred. But the kernel is a function of the shape, so
calls of a fixed set of shapes that agree with each other are exact. Which row counts agree is found by trying: random
rows go through the product at every candidate count, each time at other places, and the counts whose results are
bit-identical form a class. Any batch is then cut into tiles whose row counts all come from one class.

The choice depends on bits only, never on timing, so two processes on one machine agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

SIZES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256)
_SPLITS = (1, 2, 3, 4)  # cutting the inner axis can bring more row counts into agreement
_CHEAP = 64  # up to about this many rows a product costs what reading the weight costs: padding is nearly free


def agreeing(product: Callable[[Tensor], Tensor | None], rows: Tensor, sizes: Sequence[int]) -> tuple[int, ...]:
    """The largest set of row counts for which `product` gives the same rows the same bits (first one on a tie).

    product: (n, in) -> (n, …), or None where it contradicts itself. Every count is tried twice, with the rows moved on
    by one place and to other addresses; a count whose rows notice is left out.
    """
    results: dict[int, Tensor] = {}
    for turn, n in enumerate(sizes):
        shift = (3 * turn + 1) % n
        first = product(rows[:n].roll(shift, 0))
        moved = torch.cat((rows[:1], rows[:n].roll(shift + 1, 0)))[1:]
        second = product(moved) if first is not None else None
        if first is not None and second is not None and torch.equal(first.roll(-shift, 0), second.roll(-shift - 1, 0)):
            results[n] = first.roll(-shift, 0)
    classes: list[list[int]] = []
    for n, out in results.items():
        for found in classes:
            least = min(n, found[-1])
            if torch.equal(out[:least], results[found[-1]][:least]):
                found.append(n)
                break
        else:
            classes.append([n])
    return max((tuple(found) for found in classes), key=len, default=())


def cut(count: int, sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Tiles (rows used, size) for `count` rows: largest first, the last one padded up where that is cheap."""
    tiles = []
    while count > 0:
        fitting = min((s for s in sizes if s >= count), default=None)
        smaller = max((s for s in sizes if s <= count), default=None)
        if fitting is not None and (smaller is None or fitting <= _CHEAP or 2 * fitting <= 3 * count):
            tiles.append((count, fitting))
            break
        assert smaller is not None  # sizes is never empty: the largest one is at most `count` here
        tiles.append((smaller, smaller))
        count -= smaller
    return tiles


def padded(x: Tensor, size: int) -> Tensor:
    """x (n, width) with zero rows up to `size`."""
    return x if x.shape[0] == size else torch.nn.functional.pad(x, (0, 0, 0, size - x.shape[0]))


def multiply(x: Tensor, weight: Tensor, splits: int, out: Tensor) -> None:
    """out = x (n, in) @ weight (in, out), the inner axis in `splits` runs added up in order."""
    step = -(-weight.shape[0] // splits)
    torch.mm(x[:, :step], weight[:step], out=out)
    for start in range(step, weight.shape[0], step):
        out.addmm_(x[:, start : start + step], weight[start : start + step])


@lru_cache(maxsize=1024)
def plan_product(inner: int, outer: int, threads: int) -> tuple[int, tuple[int, ...]]:
    """(splits, row counts) for products with an (inner, outer) matrix; the fewest splits among the largest classes."""
    generator = torch.Generator().manual_seed(inner * 1_000_003 + outer)
    weight = torch.randn(inner, outer, generator=generator)
    rows = torch.randn(SIZES[-1], inner, generator=generator)
    best: tuple[int, tuple[int, ...]] = (1, ())
    for splits in _SPLITS:
        if splits > 1 and inner < 64 * splits:
            break

        def product(x: Tensor, splits: int = splits) -> Tensor:
            out = torch.empty(x.shape[0], outer)
            multiply(x, weight, splits, out)
            return out

        found = agreeing(product, rows, SIZES)
        if len(found) > len(best[1]):
            best = (splits, found)
        if len(best[1]) >= len(SIZES) - 1:
            break
    return best


def tiled_product(x: Tensor, weight: Tensor) -> Tensor:
    """x (n, inner) @ weight (inner, outer), every row with the same bits whatever n is."""
    splits, sizes = plan_product(weight.shape[0], weight.shape[1], torch.get_num_threads())
    tiles = cut(x.shape[0], sizes)
    out = x.new_empty(sum(size for _, size in tiles), weight.shape[1])
    start = 0
    for used, size in tiles:  # only the last one can be padded, so tiles lie back to back
        multiply(padded(x[start : start + used], size), weight, splits, out[start : start + size])
        start += size
    return out[: x.shape[0]]
