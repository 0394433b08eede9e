"""A deployment: a model on some machines with some settings, and what it would do with recorded arrivals.

Frozen, so that a lever is a function from one deployment to another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from twostroke.config import Config, Resolved, make_config, resolve
from twostroke.cost.fleet import Fleet, Pools, Served
from twostroke.cost.hardware import Calibration, Device, Rates, datasheet_rates, narrow_read
from twostroke.cost.roofline import ModelCost, Roofline, model_cost
from twostroke.cost.simulate import Jitter
from twostroke.cost.summary import Summary, summarize
from twostroke.cost.trace import Arrival
from twostroke.model.arch import Arch

CONFIG_FIELDS = (
    "kv_dtype", "max_model_len", "max_batch_tokens", "max_requests", "kv_blocks", "kv_offload", "prefix_cache",
    "chunked_prefill", "batching", "policy", "max_gap", "quantize",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Deployment:
    arch: Arch
    device: Device
    config: Config = field(default_factory=Config)
    precision: str = "bfloat16"  # of the weights, unless `stored_bytes` says what the file has
    stored_bytes: int | None = None
    rates: Rates | None = None  # measured; None: a part of the datasheet
    gpus: int = 1  # devices that make up one worker
    pools: Pools = field(default_factory=Pools)

    @property
    def model(self) -> ModelCost:
        quantize = self.config.quantize
        stored = None if quantize else self.stored_bytes
        return model_cost(self.arch, quantize or self.precision, stored, self.device.kind)

    @property
    def settings(self) -> Resolved:
        config = self.config if self.config.seed is not None else replace(self.config, seed=0)
        return resolve(config, self.arch, self.device.hardware(self.gpus), self.model.bytes)

    def roofline(self, settings: Resolved | None = None) -> Roofline:
        model = self.model
        rates = self.rates or datasheet_rates(self.device, model.precision, self.gpus)
        return Roofline(model, (settings or self.settings).layout, rates, self.gpus, self.device.link)

    @property
    def workers(self) -> int:
        return self.pools.workers + self.pools.prefill

    @property
    def price(self) -> float:
        """Dollars an hour; a machine you own counts as one dollar, so that two of them still cost twice."""
        return (self.device.price or 1.0) * self.gpus * self.workers

    def quantized(self, precision: str) -> Deployment:
        """The same with its weights in int8, int4 or fp8; rates that were measured change as those of datasheets do."""
        config = replace(self.config, quantize=precision, dtype=None)
        return replace(self, config=config, precision=precision, stored_bytes=None, rates=self._rates_in(precision))

    def _rates_in(self, precision: str) -> Rates | None:
        if self.rates is None:
            return None
        kind, now = self.device.kind, self.model.precision
        read = narrow_read(kind, precision) / narrow_read(kind, now)
        times = self.device.peak(precision) / self.device.peak(now)
        return replace(self.rates, bandwidth=read * self.rates.bandwidth, compute=times * self.rates.compute)

    def run(self, arrivals: Sequence[Arrival], jitter: Jitter | None = None) -> Outcome:
        settings = self.settings
        fleet = Fleet(self.roofline(settings), settings, self.pools, jitter=jitter)
        served = fleet.run(arrivals)
        held = max((worker.held_peak for worker in fleet.workers if worker is not None), default=0)
        busy = sum(worker.busy_seconds for worker in fleet.workers if worker is not None)
        summary = summarize(served)
        utilisation = busy / max(summary.seconds * self.workers, 1e-12)
        return Outcome(self, settings, served, summary, held / settings.kv_blocks, min(1.0, utilisation))


@dataclass(frozen=True, slots=True)
class Outcome:
    deployment: Deployment
    settings: Resolved
    served: list[Served]
    summary: Summary
    kv_peak: float  # share of the blocks that was held at once
    utilisation: float  # share of the time in which workers computed

    @property
    def dollars_per_million(self) -> float:
        """Cost of a million output tokens at this load."""
        return self.deployment.price / 3600 * 1e6 / max(self.summary.output_rate, 1e-12)


def config_of(settings: dict[str, Any], instead: dict[str, Any] | None = None) -> Config:
    """The settings an engine ran with, every one given, so that a replay derives nothing anew. `instead`: those that
    somebody wants to be others, and then what cannot stand beside them goes."""
    wanted = instead or {}
    given = {name: settings[name] for name in CONFIG_FIELDS if settings.get(name) is not None}
    for name, gone in (("kv_memory", "kv_blocks"), ("dtype", "quantize")):
        if name in wanted:
            given.pop(gone, None)
    known = {"seed": 0, **given, **wanted}
    if "max_gap" not in wanted and (not known.get("chunked_prefill", True) or known.get("policy") == "prefill-first"):
        known.pop("max_gap", None)
    return make_config(**known)


def deployment_of(
    arch: Arch, settings: dict[str, Any], calibration: Calibration, weight_bytes: int | None
) -> Deployment:
    return Deployment(
        arch, calibration.device(), config_of(settings), "float32", weight_bytes, rates=calibration.rates
    )  # fmt: skip
