"""What changed between two results, with bootstrap intervals of the ratios."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from twostroke.bench.record import Run

DRAWS = 2000
Statistic = Callable[[np.ndarray], np.ndarray]  # over the last axis


@dataclass(frozen=True, slots=True)
class Comparison:
    name: str
    before: float
    after: float
    low: float  # 95 % interval of after / before
    high: float
    better: str  # "lower" or "higher"

    @property
    def ratio(self) -> float:
        return self.after / self.before

    @property
    def verdict(self) -> str:
        if self.low <= 1.0 <= self.high:
            return "no clear change"
        return "better" if (self.high < 1.0) == (self.better == "lower") else "worse"


def changes(before: Run, after: Run, seed: int = 0) -> list[Comparison]:
    rng = np.random.default_rng(seed)
    found = []
    for name, pick, statistic in QUANTITIES:
        old, new = pick(before), pick(after)
        if len(old) < 3 or len(new) < 3:
            continue
        drawn_old = statistic(old[rng.integers(len(old), size=(DRAWS, len(old)))])
        drawn_new = statistic(new[rng.integers(len(new), size=(DRAWS, len(new)))])
        low, high = np.percentile(drawn_new / np.maximum(drawn_old, 1e-12), (2.5, 97.5))
        found.append(Comparison(name, float(statistic(old)), float(statistic(new)), float(low), float(high), "lower"))
    rates = [_throughput(run) for run in (before, after)]
    if min(rates) > 0:
        found.append(_throughput_change(before, after, rates[0], rates[1], rng))
    return found


def _throughput(run: Run) -> float:
    return run.summary().output_rate if run.answered else 0.0


def _throughput_change(before: Run, after: Run, old: float, new: float, rng: np.random.Generator) -> Comparison:
    """The samples are tokens/s in windows of the run: requests overlap, so they are not independent samples."""
    slices = [window_rates(run) for run in (before, after)]
    drawn = [
        values[rng.integers(len(values), size=(DRAWS, len(values)))].mean(axis=-1) if len(values) else np.ones(1)
        for values in slices
    ]
    low, high = np.percentile(drawn[1] / np.maximum(drawn[0], 1e-12), (2.5, 97.5))
    return Comparison("output tokens/s", old, new, float(low), float(high), "higher")


def window_rates(run: Run, windows: int = 12) -> np.ndarray:
    moments = np.array([moment for record in run.records for moment in record.pieces])
    if len(moments) < windows:
        return np.empty(0)
    counts, edges = np.histogram(moments, bins=windows)
    return counts / np.diff(edges)


def _ttft(run: Run) -> np.ndarray:
    return np.array([served.ttft for served in run.served() if not served.refused])


def _tpot(run: Run) -> np.ndarray:
    return np.array([tpot for served in run.served() if not served.refused and (tpot := served.tpot) is not None])


def _e2e(run: Run) -> np.ndarray:
    return np.array([served.end - served.arrival for served in run.served() if not served.refused])


def _quantile(percent: float) -> Statistic:
    return lambda values: np.percentile(values, percent, axis=-1)


QUANTITIES: tuple[tuple[str, Callable[[Run], np.ndarray], Statistic], ...] = (
    ("TTFT p50", _ttft, _quantile(50)),
    ("TTFT p95", _ttft, _quantile(95)),
    ("TPOT p50", _tpot, _quantile(50)),
    ("TPOT p95", _tpot, _quantile(95)),
    ("E2E p50", _e2e, _quantile(50)),
)
