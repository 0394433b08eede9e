"""A model on machines with settings. `run` simulates arrivals on it.

Deployments are frozen: a lever is a function from one deployment to another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from twostroke.config import COPIES_SHARE, SETTINGS, Config, Resolved, make_config, resolve
from twostroke.cost.model.calibration import Calibration
from twostroke.cost.model.devices import NARROW, Device
from twostroke.cost.model.drafts import DraftingRoofline, DraftQuality, DraftSource, right_for
from twostroke.cost.model.rates import Rates, datasheet_rates, narrow_read
from twostroke.cost.model.roofline import ModelCost, Roofline, model_cost
from twostroke.cost.simulation.fleet import Fleet, Pools
from twostroke.cost.simulation.routed import RoutedFleet
from twostroke.cost.simulation.served import Served, Summary, summarize
from twostroke.cost.simulation.trace import Arrival
from twostroke.cost.simulation.worker import Jitter
from twostroke.draft.replay import GUESSED, LookupCounts
from twostroke.draft.speculate import STREAMS
from twostroke.model.arch import Arch, GroupedArch
from twostroke.record import replace
from twostroke.run.cuda.request_count import MOST, RowTimes, request_count

# Settings of an engine that a replay takes over. Two others decide what these are: kv_memory gives kv_blocks, and dtype
# the bytes of the weights, which a replay is given.
# What `speculate` does depends on the text: a replay takes it over, and uses it where drafts were counted.
LEFT_OUT = ("kv_memory", "dtype")
COUNTED = "a step of so many streams takes half of max_gap at most, or the KV cache holds no more"
REPLAYED = [name for name, one in SETTINGS.items() if name == "speculate" or not (one.unsimulated or name in LEFT_OUT)]


@dataclass(frozen=True, slots=True)
class Deployment:
    arch: Arch
    device: Device
    config: Config = field(default_factory=Config)
    precision: str = "bfloat16"  # of the weights, unless `stored_bytes` is given
    stored_bytes: int | None = None  # bytes of the weights in the file
    rates: Rates | None = None  # measured; None: a share of the datasheet
    gpus: int = 1  # devices that make up one worker
    pools: Pools = field(default_factory=Pools)
    lookup: DraftQuality | None = None  # how good prompt lookup's guesses are on the recorded answers; None: not known

    @property
    def looks_up(self) -> bool:
        """Whether the engine guesses by prompt lookup."""
        return self.config.speculate in ("auto", "lookup")

    @property
    def model(self) -> ModelCost:
        quantize = self.config.quantize
        stored = None if quantize else self.stored_bytes
        return model_cost(self.arch, quantize or self.precision, stored, self.device.kind)

    @property
    def settings(self) -> Resolved:
        config = self.config if self.config.seed is not None else replace(self.config, seed=0)
        if not self._counts_requests:
            return self._resolved(config)
        most = self._resolved(replace(config, max_requests=MOST))
        line = self.roofline(most)
        times = RowTimes.measure(lambda rows: line.decode_seconds(rows, 0))
        read = round(self.model.read_bytes(1) + self.model.head_bytes)
        count = request_count(times, read, most.layout, most.kv_blocks, most.max_gap)
        found = self._resolved(replace(config, max_requests=min(count, most.max_requests)))
        return replace(found, reasons={**found.reasons, "max_requests": COUNTED})

    @property
    def _counts_requests(self) -> bool:
        """Whether a server on such a device measures how many requests it runs at once (run/cuda/request_count.py)."""
        grouped = all(isinstance(mixer, GroupedArch) for mixer, _ in self.arch.mixers)
        return self._one_gpu and grouped and self.config.max_requests is None

    @property
    def _one_gpu(self) -> bool:
        return self.device.kind == "cuda" and self.gpus == 1 and not self.config.exact

    def _resolved(self, config: Config) -> Resolved:
        hardware, weights = self.device.hardware(self.gpus), self.model.bytes
        return resolve(config, self.arch, hardware, weights + self._copies(config, hardware.free_memory - weights))

    def _copies(self, config: Config, free: int) -> int:
        """Bytes of the copies in floats that narrow weights have where memory is free (run/cuda/spare_memory.py)."""
        given = config.kv_blocks is not None or config.kv_memory is not None
        if given or not self._one_gpu or self.model.precision not in NARROW:
            return 0
        size = 2 * (self.arch.layer_weights - self.arch.expert_weights + self.arch.head_weights)
        return size if size <= COPIES_SHARE * free else 0

    def roofline(self, settings: Resolved | None = None) -> Roofline:
        model = self.model
        rates = self.rates or datasheet_rates(self.device, model.precision, self.gpus)
        line = Roofline(model, (settings or self.settings).layout, rates, self.gpus, self.device.link)
        return line if self.lookup is None or not self.looks_up else DraftingRoofline(line, self.lookup)

    @property
    def workers(self) -> int:
        return self.pools.workers + self.pools.prefill

    @property
    def price(self) -> float:
        """Dollars an hour; a machine that is not rented counts as one dollar, so that two cost twice as much."""
        return (self.device.price or 1.0) * self.gpus * self.workers

    def quantized(self, precision: str) -> Deployment:
        """The same with weights in int8, int4 or fp8. Measured rates change by the datasheet's ratio."""
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
        fleet = self.fleet(jitter)
        fleet.run(arrivals)
        return self.outcome(fleet)

    def fleet(self, jitter: Jitter | None = None) -> Fleet:
        """The deployment's workers, idle, at the start of a simulation."""
        settings = self.settings
        kind = RoutedFleet if self.pools.router in ("cost", "apart") else Fleet
        return kind(self.roofline(settings), settings, self.pools, jitter=jitter)

    def outcome(self, fleet: Fleet, skipped: int = 0) -> Outcome:
        """The outcome of a fleet that has served everything, without the first `skipped` requests."""
        settings, workers = fleet.settings, [worker for worker in fleet.workers if worker is not None]
        held = max((worker.held_peak for worker in workers), default=0)
        busy = sum(worker.busy_seconds for worker in workers)
        whole = max((one.end for one in fleet.served if one.answered), default=0.0)
        utilisation = min(1.0, busy / max(whole * self.workers, 1e-12))
        served = fleet.served[skipped:]
        return Outcome(self, settings, served, summarize(served), held / settings.kv_blocks, utilisation)


@dataclass(frozen=True, slots=True)
class Outcome:
    deployment: Deployment
    settings: Resolved
    served: list[Served]
    summary: Summary
    kv_peak: float  # largest share of the blocks that was held at once
    utilisation: float  # share of the time in which workers computed


def config_of(settings: dict[str, Any], changes: dict[str, Any] | None = None) -> Config:
    """The settings of a running engine as given ones, so that a replay derives none of them again. `changes`: settings
    to replace; those that conflict with them are dropped."""
    wanted = changes or {}
    given = {name: settings[name] for name in REPLAYED if settings.get(name) is not None}
    for name, gone in (("kv_memory", "kv_blocks"), ("dtype", "quantize")):
        if name in wanted:
            given.pop(gone, None)
    if given.get("speculate") == "draft":
        given["speculate"] = "off"  # a draft model is not replayed: the rates are tuned to what was measured with it
    known = {"seed": 0, **given, **wanted}
    if "max_gap" not in wanted and (not known.get("chunked_prefill", True) or known.get("policy") == "prefill-first"):
        known.pop("max_gap", None)
    return make_config(**known)


def drafts_of(counts: LookupCounts, kind: str) -> DraftQuality | None:
    """How good drafts are by a replay of prompt lookup over answers, on a kind of device; None where there were
    none."""
    if not counts.steps:
        return None
    kinds = zip(counts.covered, counts.tried, counts.right, strict=True)
    sources = (
        DraftSource(covered / counts.steps, right_for(right / covered, GUESSED))
        for covered, tried, right in kinds
        if tried
    )
    return DraftQuality(tuple(sources), STREAMS[kind])


def deployment_of(
    arch: Arch, settings: dict[str, Any], calibration: Calibration, weight_bytes: int | None
) -> Deployment:
    return Deployment(
        arch, calibration.device(), config_of(settings), "float32", weight_bytes, rates=calibration.rates
    )  # fmt: skip
