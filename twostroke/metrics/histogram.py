"""A histogram for values of every step: counting is one search among its bounds, without a lock."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector


class Histogram(Collector):
    """Counts on one thread; Prometheus sees it like any other."""

    def __init__(self, name: str, text: str, model: str, bounds: tuple[float, ...]):
        self.name, self.text, self.model = name, text, model
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def observe_all(self, values: list[float]) -> None:
        for value in values:
            self.counts[bisect_left(self.bounds, value)] += 1
        self.total += sum(values)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self.name, self.text, labels=["model_name"])
        limits = [*(str(bound) for bound in self.bounds), "+Inf"]
        buckets = list(zip(limits, map(float, accumulate(self.counts)), strict=True))
        family.add_metric([self.model], buckets, self.total)
        yield family


class Renamed(Collector):
    """The same histogram under another name that dashboards know it by."""

    def __init__(self, other: Histogram, name: str):
        self.other, self.name = other, name

    def collect(self) -> Iterator[HistogramMetricFamily]:
        other = self.other
        same = Histogram(self.name, other.text, other.model, other.bounds)
        same.counts, same.total = other.counts, other.total
        yield from same.collect()
