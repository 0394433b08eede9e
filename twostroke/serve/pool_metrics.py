"""Metrics of a deployment: its workers, and the transfers between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from twostroke.cluster.journal import EndedTransfer
from twostroke.cluster.member import Member
from twostroke.cluster.pools import Pools
from twostroke.metrics.histogram import Histogram

SIZES = tuple(4.0**power * 1e4 for power in range(10))  # 10 kB to 2.6 GB
TIMES = tuple(2.0**power * 1e-3 for power in range(14))  # 1 ms to 8 s
GAUGES: dict[str, tuple[str, Callable[[Member], float]]] = {
    "up": ("1 while it takes requests.", lambda one: float(one.usable)),
    "requests_running": ("Samples in its batch.", lambda one: one.counts.running),
    "requests_waiting": ("Samples in its queue.", lambda one: one.counts.waiting),
    "streams": ("Answers that it writes or is to write.", lambda one: one.streams),
    "queued_tokens": ("Prompt tokens sent to it and not computed.", lambda one: one.queued),
    "kv_usage_perc": ("KV blocks held by requests, 0 to 1.", lambda one: held(one)),
    "leases": ("Transfers for which it keeps blocks.", lambda one: one.worker.held.leases),
}


def held(member: Member) -> float:
    counts = member.counts
    return (counts.blocks_total - counts.blocks_free - counts.blocks_cached) / max(1, counts.blocks_total)


class PoolMetrics(Collector):
    """Read when they are written out."""

    def __init__(self, pools: Pools, model: str, registry: CollectorRegistry):
        self.pools, self.model = pools, model
        self.bytes = Histogram("twostroke:transfer_size_bytes", "Bytes of one transfer.", model, SIZES)
        self.times = Histogram("twostroke:transfer_time_seconds", "Seconds of one transfer.", model, TIMES)
        pools.journal.hear = self._hear
        for part in (self, self.bytes, self.times):
            registry.register(part)

    def _hear(self, entry: EndedTransfer) -> None:
        if entry.moved.bytes:
            self.bytes.observe(entry.moved.bytes)
            self.times.observe(entry.moved.on_way)

    def collect(self) -> Iterator[Metric]:
        labels = ["model_name", "worker", "role"]
        for name, (text, value) in GAUGES.items():
            gauge = GaugeMetricFamily(f"twostroke:worker_{name}", text, labels=labels)
            for member in self.pools.members.values():
                gauge.add_metric([self.model, member.name, member.role.value], value(member))
            yield gauge
        losses = CounterMetricFamily("twostroke:worker_losses", "Times that it was lost.", labels=labels)
        for member in self.pools.members.values():
            losses.add_metric([self.model, member.name, member.role.value], member.losses)
        yield losses
        journal = self.pools.journal
        for name, text, sums in (
            ("sent_bytes", "Bytes of KV blocks that it sent to others.", journal.sent),
            ("received_bytes", "Bytes of KV blocks that came from others.", journal.received),
            ("received_seconds", "Seconds in which they came.", journal.seconds),
        ):
            total = CounterMetricFamily(f"twostroke:worker_{name}", text, labels=labels)
            for member in self.pools.members.values():
                total.add_metric([self.model, member.name, member.role.value], sums[member.name])
            yield total
        yield from self._transfers()

    def _transfers(self) -> Iterator[Metric]:
        counts = self.pools.counts
        failed = CounterMetricFamily(
            "twostroke:transfers_failed", "Prompts computed again instead, by reason.", labels=["model_name", "reason"]
        )
        for reason, count in counts.failed.items():
            failed.add_metric([self.model, reason], count)
        yield failed
        totals = {
            "transfers_done": ("Requests that went on after blocks of another worker.", counts.done),
            "transfer_bytes": ("Bytes of these blocks.", counts.bytes),
            "transfer_seconds": ("Seconds in which they came.", counts.seconds),
            "requests_resumed": ("Requests that another worker went on with.", self.pools.resumed),
        }
        for name, (text, value) in totals.items():
            total = CounterMetricFamily(f"twostroke:{name}", text, labels=["model_name"])
            total.add_metric([self.model], value)
            yield total
        moving = GaugeMetricFamily("twostroke:transfers_in_flight", "Requests that move now.", labels=["model_name"])
        moving.add_metric([self.model], len(self.pools.moving))
        yield moving
