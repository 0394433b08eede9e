"""The rates that a program reaches on a machine. Times are predicted from these, not from the datasheet.

A calibration measures them. Without one, a share of the datasheet is assumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from twostroke.cost.model.devices import Device

BANDWIDTH_REACHED = {"cuda": 0.8, "cpu": 0.7}  # share of the datasheet that kernels reach
COMPUTE_REACHED = {"cuda": 0.6, "cpu": 0.5}
STEP_SECONDS = {"cuda": 0.0006, "cpu": 0.0015}  # planning, launching and sampling of one step
REQUEST_SECONDS = {"cuda": 4e-6, "cpu": 3e-5}
KEY_SECONDS = 6e-8  # measured on an H200
# Bandwidth at which a GPU reads narrow weights for a few streams, as a share of that of 16-bit weights: unpacking costs
# part of what the bytes save (docs/gpu.md, steps of 2 and 5 streams on an H200). One stream has its own kernel, that
# reads fp8 and int8 as fast as 16-bit weights, so the prediction for one stream is too slow. For tens of streams it is
# too fast. Published formats count as the one whose codes have as many bits.
NARROW_READ = {"fp8": 0.82, "int8": 0.81, "int4": 0.69, "mxfp4": 0.69, "fp8-squares": 0.82, "fp8-mxfp4": 0.69}
HOST_LINK = 25e9  # bytes/s between a card and the host's memory: PCIe 4 × 16, pinned; assumed, not measured
# Share of `cold_seconds` that is left one step later. Measured on two cores of a Xeon with a 135M model: half is left
# after 5 steps, a tenth after 18.
COLD_LEFT = 0.88
LINK_LATENCY = 12e-6  # seconds of one all-reduce between the devices of a worker


@dataclass(frozen=True, slots=True)
class TileRates:
    """Attention over prompt chunks that are too short for the vendor's kernel."""

    compute: float  # FLOP/s where the tiles fill the device
    key_seconds: float  # for one program to process one key of one layer: the limit where there are few tiles

    def faster(self, factor: float) -> TileRates:
        return TileRates(factor * self.compute, self.key_seconds / factor)


@dataclass(frozen=True, slots=True)
class Rates:
    """What the engine reaches on a machine. The field names are those of stored calibrations."""

    bandwidth: float  # bytes/s of weights
    compute: float  # FLOP/s of matrix products
    kv_bandwidth: float  # bytes/s of K and V in decode attention
    attention_compute: float  # FLOP/s of attention over prompts; on a GPU over long chunks
    step_seconds: float  # fixed cost of a step
    request_seconds: float  # cost of each request in a step
    # How much longer products take than max(bytes/bandwidth, FLOPs/compute): (rows, factor), rows ascending.
    slowdown: tuple[tuple[float, float], ...] = ()
    source: str = "datasheet"
    chunk_seconds: float = 0.0  # least time of a step with prompts: a GPU must launch kernels that are not captured
    # Whether attention is faster over narrower K and V. Not on a CPU: widening them costs what their bytes save.
    kv_by_bytes: bool = True
    tiles: TileRates | None = None  # of a GPU (tiles.py); None: a CPU
    host_link: float | None = None  # bytes/s of K and V copied to the host's memory and back; None: not measured
    # Extra time of the first decode step after a step with prompts: the prompts seem to push the weights out of a CPU's
    # cache. It falls to COLD_LEFT of itself with each step. Only a log of consecutive steps shows it.
    cold_seconds: float = 0.0


def narrow_read(kind: str, precision: str) -> float:
    return NARROW_READ.get(precision, 1.0) if kind == "cuda" else 1.0


def datasheet_rates(device: Device, precision: str, count: int = 1) -> Rates:
    """Rates assumed for a machine without a calibration; `count` devices share every product."""
    memory = count * BANDWIDTH_REACHED[device.kind] * device.bandwidth
    bandwidth = memory * narrow_read(device.kind, precision)
    compute = count * COMPUTE_REACHED[device.kind] * device.peak(precision)
    wide = count * COMPUTE_REACHED[device.kind] * device.peak("bfloat16")
    overhead = STEP_SECONDS[device.kind]
    gpu = device.kind != "cpu"
    return Rates(
        bandwidth, compute, memory, wide / 2, overhead, REQUEST_SECONDS[device.kind], kv_by_bytes=gpu,
        tiles=TileRates(wide / 2, KEY_SECONDS) if gpu else None,
    )  # fmt: skip


def rates_from(document: Mapping[str, Any]) -> Rates:
    """Rates from the dictionary that `asdict` made of them."""
    slowdown = tuple((float(rows), float(factor)) for rows, factor in document["slowdown"])
    tiles = TileRates(**document["tiles"]) if document.get("tiles") else None
    return Rates(**{**document, "slowdown": slowdown, "tiles": tiles})
