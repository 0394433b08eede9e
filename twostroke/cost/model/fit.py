"""Fits the cost model's rates to a step log: non-negative least squares on relative errors, robust to outliers.

Every term of a step's time is linear in an unknown: seconds per step, per request, per attention FLOP, per byte of K
and V, and the extra time of products from one number of rows (a knot) to the next. That extra time is never negative,
so the predicted time of a step never falls when rows are added. Where a log cannot separate two unknowns (overhead and
bandwidth, in a log of single streams), weak priors decide: overhead as expected, products on the roofline.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from math import log2

import numpy as np

from twostroke.cost.model.rates import COLD_LEFT, Rates, TileRates
from twostroke.cost.model.roofline import ModelCost, Roofline, roof
from twostroke.cost.model.tiles import attend
from twostroke.kv.layout import KVLayout
from twostroke.metrics.steplog import Step
from twostroke.record import replace

# Rows at which the slowdown is fitted: dense where kernels have tiles of few rows, sparse where FLOPs set the time.
KNOTS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64, 96, *(2**power for power in range(7, 15)))
PRIOR = 0.02  # weight of a prior; one step of the log has weight 1
ROUNDS = 6
FLOORS = (2, 5, 10, 20, 30, 40, 50, 60, 70)  # percentiles of steps with prompts, tried as the least time of such a step
ABOVE = 1.15  # a step with prompts counts only if it takes this many times the least time
LEAST = 0.01  # smallest slowdown of a product
PASSES = 4  # of a fit on a GPU: each decides anew whether FLOPs or the walk over keys limit the tiles of a step


def fit(
    steps: Sequence[Step], model: ModelCost, layout: KVLayout, start: Rates, cold: Sequence[float] | None = None
) -> Rates:
    """Rates under which the predicted times are as near as possible to the logged ones. Fitted again with a roofline
    that the fastest products reach, because interpolation between two knots depends on which side of the ridge they
    are. `cold`: the `coldness` of each step, for a log of consecutive steps."""
    largest = max(step.tokens for step in steps)
    found = fit_once(steps, model, layout, start, cold)
    for _ in range(1 if start.tiles is None else PASSES - 1):
        found = fit_once(steps, model, layout, on_the_roof(found, model, largest), cold)
    return found


def fit_launched(steps: Sequence[Step], model: ModelCost, layout: KVLayout, start: Rates) -> Rates:
    """The same for a GPU, where a step with prompts has a least time. Several are tried and the one with the smallest
    error is kept. Steps near the least time are left out: they carry no information on their products."""
    times = [step.seconds for step in steps if step.chunks]
    tried = [fit(steps, model, layout, start)]
    for least in np.percentile(times, FLOORS) if len(times) >= len(FLOORS) else ():
        kept = [step for step in steps if not step.chunks or step.seconds > ABOVE * least]
        tried.append(replace(fit(kept, model, layout, start), chunk_seconds=float(least)))
    return min(tried, key=lambda rates: mean_error(steps, Roofline(model, layout, rates)))


def mean_error(steps: Sequence[Step], roofline: Roofline) -> float:
    return float(np.mean([abs(np.log(predicted(step, roofline) / step.seconds)) for step in steps]))


def on_the_roof(rates: Rates, model: ModelCost, largest: int) -> Rates:
    """The same times from rates that products reach: bandwidth from one row, compute from the best up to `largest`."""
    at = {rows: max(factor, LEAST) * roof(rates, int(rows), model.read_bytes(int(rows)), model.row_weights)
          for rows, factor in rates.slowdown}  # fmt: skip
    products = [(int(rows), seconds) for rows, seconds in at.items() if rows <= largest]
    each = 2.0 * model.row_weights  # FLOPs of a row
    bound = [one for one in products if each * one[0] / rates.compute > model.read_bytes(one[0]) / rates.bandwidth]
    compute = max((each * rows / seconds for rows, seconds in bound), default=rates.compute)
    first, shortest = products[0]
    bandwidth = rates.bandwidth if products[0] in bound else model.read_bytes(first) / shortest
    reached = replace(rates, bandwidth=bandwidth, compute=compute)
    factors = tuple(
        (rows, seconds / roof(reached, int(rows), model.read_bytes(int(rows)), model.row_weights))
        for rows, seconds in at.items()
    )
    return replace(reached, slowdown=factors)


def fit_once(
    steps: Sequence[Step], model: ModelCost, layout: KVLayout, start: Rates, cold: Sequence[float] | None = None
) -> Rates:
    roofline = Roofline(model, layout, start)
    largest = max(max(step.tokens for step in steps), 1)
    knots = [knot for knot in KNOTS if knot <= 2 * largest]
    roofs = np.array([roof(start, knot, model.read_bytes(knot), model.row_weights) for knot in knots])
    seconds = np.array([step.seconds for step in steps])
    features = np.array([_features(step, roofline, knots) for step in steps])
    known = _known(start)
    prior, expected = _priors(known, [max(roofline.slowdown(knot), LEAST) for knot in knots])
    # Unknowns: not the slowdown at each knot but the increment of time from knot to knot, which is never negative.
    fixed = len(known)
    change = np.eye(fixed + len(knots))
    change[fixed:, fixed:] = np.tril(np.ones((len(knots), len(knots)))) / roofs[:, None]
    features, prior = features @ change, prior @ change
    if cold is not None:  # one more unknown, with a weak prior at zero
        features, expected = np.column_stack([features, cold]), np.append(expected, 0.0)
        prior = np.pad(prior, ((0, 1), (0, 1)))
        prior[-1, -1] = PRIOR / float(np.median(seconds))
    weights, about = np.ones(len(steps)), seconds
    for _ in range(ROUNDS):
        # Errors relative to the prediction: relative to the measurement, low predictions would cost less than high ones
        rows, targets = features * (weights / about)[:, None], seconds * (weights / about)
        found = nnls(np.concatenate([rows, prior]), np.concatenate([targets, expected]))
        about = np.maximum(features @ found, 0.1 * seconds)
        residual = np.abs(np.log(seconds / about))
        scale = max(1e-3, float(np.median(residual)))
        weights = np.sqrt(np.minimum(1.0, 2 * scale / np.maximum(residual, 1e-9)))
    rates = _as_rates(start, change @ found[: len(change)], knots)
    return rates if cold is None else replace(rates, cold_seconds=float(found[-1]))


def _known(rates: Rates) -> list[float]:
    """Starting values of the unknowns before the knots: step, request, attention, K and V, and those of tiles."""
    known = [rates.step_seconds, rates.request_seconds, 1 / rates.attention_compute, 1 / rates.kv_bandwidth]
    return known if rates.tiles is None else [*known, 1 / rates.tiles.compute, rates.tiles.key_seconds]


def _features(step: Step, roofline: Roofline, knots: Sequence[int]) -> list[float]:
    """Seconds that one unit of each unknown adds to this step."""
    model, rates = roofline.model, roofline.rates
    values = [1.0, float(len(step.works)), *_attention(step, roofline)]
    fixed = len(values)
    values += [0.0] * len(knots)
    rows, sampled = roofline.rows_run(step.tokens, step.sampled, bool(step.chunks))
    parts = ((rows, model.read_bytes(rows), model.row_weights), (sampled, model.head_bytes, model.head_weights))
    for rows, size, weights in parts:
        if rows:
            time = roof(rates, rows, size, weights)
            for knot, share in _hats(rows, knots):
                values[fixed + knot] += share * time
    return values


def _attention(step: Step, roofline: Roofline) -> list[float]:
    """Attention FLOPs and bytes of K and V; on a GPU also the tiles' FLOPs or keys, whichever take longer."""
    arch, tiles = roofline.model.arch, roofline.rates.tiles
    chunks = [(work.start, work.count) for work in step.chunks]
    kv = roofline.attended(work.start + work.count for work in step.works)
    if tiles is None:
        return [float(sum(arch.attention_flops(*chunk) for chunk in chunks)), kv]
    dense, tiled, walk, merged = attend(arch, chunks, step.tokens, roofline.count)
    by_flops = tiled / tiles.compute > walk * tiles.key_seconds
    return [float(dense), kv + merged, *((float(tiled), 0.0) if by_flops else (0.0, walk))]


def _hats(rows: int, knots: Sequence[int]) -> list[tuple[int, float]]:
    """Shares of the two knots around `rows`, linear in log2(rows)."""
    right = bisect_left(knots, rows)
    if right == len(knots) or knots[right] == rows:
        return [(min(right, len(knots) - 1), 1.0)]
    part = log2(rows / knots[right - 1]) / log2(knots[right] / knots[right - 1])
    return [(right - 1, 1.0 - part), (right, part)]


def _priors(fixed: Sequence[float], slowdown: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """A weak row for each unknown at its starting value, and one for the ratio of neighbouring slowdowns."""
    knots, count = len(slowdown), len(fixed) + len(slowdown)
    rows = np.diag([PRIOR / max(value, 1e-18) for value in (*fixed, *slowdown)])
    rows[0] *= 10  # the overhead of a step is known better than the other unknowns
    expected = np.full(count, PRIOR)
    expected[0] *= 10
    smooth = np.zeros((knots - 1, count))
    for index in range(knots - 1):
        smooth[index, len(fixed) + index] = PRIOR / slowdown[index]
        smooth[index, len(fixed) + index + 1] = -PRIOR / slowdown[index + 1]
    return np.concatenate([rows, smooth]), np.concatenate([expected, np.zeros(len(smooth))])


def _as_rates(start: Rates, found: np.ndarray, knots: Sequence[int]) -> Rates:
    fixed, factors = [float(value) for value in found[: -len(knots)]], found[-len(knots) :]
    step, request, attention, kv, *tiles = fixed
    return replace(
        start,
        step_seconds=step,
        request_seconds=request,
        attention_compute=1 / max(attention, 1e-18),
        kv_bandwidth=1 / max(kv, 1e-15),
        slowdown=(
            *((float(knot), float(value)) for knot, value in zip(knots, factors, strict=True)),
            *((rows, factor) for rows, factor in start.slowdown if rows > knots[-1]),  # the log has no such steps
        ),
        source="step log",
        tiles=TileRates(1 / max(tiles[0], 1e-18), tiles[1]) if tiles else None,
    )


def nnls(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    """min |matrix·x − target| with x ≥ 0: the active-set method of Lawson and Hanson."""
    scale = np.maximum(np.linalg.norm(matrix, axis=0), 1e-30)
    matrix = matrix / scale
    x = np.zeros(matrix.shape[1])
    free = np.zeros(matrix.shape[1], dtype=bool)
    for _ in range(10 * len(x)):
        gradient = matrix.T @ (target - matrix @ x)
        if free.all() or gradient[~free].max() <= 1e-9:
            break
        free[np.argmax(np.where(free, -np.inf, gradient))] = True
        while True:
            trial = np.zeros_like(x)
            trial[free] = np.linalg.lstsq(matrix[:, free], target, rcond=None)[0]
            if trial[free].min() > 0:
                break
            falling = free & (trial <= 0)
            step = np.min(x[falling] / np.maximum(x[falling] - trial[falling], 1e-30))
            x += step * (trial - x)
            free &= x > 1e-12
            x[~free] = 0.0
        x = trial
    return x / scale


def predicted(step: Step, roofline: Roofline) -> float:
    chunks = [(work.start, work.count) for work in step.chunks]
    return roofline.step(chunks, step.contexts, step.sampled)


def errors(steps: Sequence[Step], roofline: Roofline) -> dict[str, float]:
    """Median and 95th percentile of |predicted − measured| / measured."""
    found = [abs(predicted(step, roofline) - step.seconds) / step.seconds for step in steps]
    return {"median": float(np.median(found)), "p95": float(np.percentile(found, 95))}


def between(steps: Sequence[Step]) -> float:
    """Median seconds from the end of a step to the launch of the next while there is work: committing, sending events,
    planning. They are not part of any step's time, but every stream waits for them."""
    gaps = []
    for one, following in pairwise(steps):
        gap = following.launched - (one.launched + one.seconds)
        if following.number == one.number + 1 and gap < one.seconds:  # longer: the engine was idle
            gaps.append(max(0.0, gap))
    return float(np.median(gaps)) if gaps else 0.0


def coldness(steps: Sequence[Step]) -> list[float]:
    """For consecutive steps, the share of `cold_seconds` in each: 0 in a step with prompts, 1 right after it."""
    found, left = [], 0.0
    for step in steps:
        found.append(0.0 if step.chunks else left)
        left = 1.0 if step.chunks else left * COLD_LEFT
    return found


def with_between(rates: Rates, steps: Sequence[Step]) -> Rates:
    return replace(rates, step_seconds=rates.step_seconds + between(steps))
