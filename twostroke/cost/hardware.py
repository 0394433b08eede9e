"""Machines by name: memory, bandwidth and peak rates from datasheets, and what was really measured on this one.

The table is what vendors print (dense rates, no sparsity); `Rates` is what a program reaches, which is what times are
predicted from. Without a calibration a part of the datasheet is assumed; with one, nothing is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from twostroke.errors import ConfigError
from twostroke.hardware import Hardware

GB, TFLOP = 10**9, 10**12
BANDWIDTH_REACHED = {"cuda": 0.8, "cpu": 0.7}  # share of the datasheet that plain kernels reach
COMPUTE_REACHED = {"cuda": 0.6, "cpu": 0.5}
STEP_SECONDS = {"cuda": 0.0006, "cpu": 0.0015}  # planning, launching, sampling: a step's cost beside the model
REQUEST_SECONDS = {"cuda": 4e-6, "cpu": 3e-5}
KEY_SECONDS = 6e-8  # measured on an H200
# Share of the bandwidth of 16-bit weights at which narrower ones are read on a GPU by a few streams: decoding costs
# part of what their bytes save (docs/gpu.md, products of three rows on an H200). One stream has a kernel of its own
# there that reads them as fast as 16-bit ones: what is predicted of it is too slow by a quarter.
NARROW_READ = {"fp8": 0.70, "int8": 0.76, "int4": 0.65}
HOST_LINK = 25e9  # bytes/s between a card and the host's memory: PCIe 4 × 16, pinned; nobody has measured it here
COLD_LEFT = 0.88  # measured on two cores of a Xeon with a 135M model: half after 5 steps, a tenth after 18
LINK_LATENCY = 12e-6  # seconds of one all-reduce between the devices of a worker


@dataclass(frozen=True, slots=True)
class Device:
    """One machine or accelerator, as its datasheet has it."""

    name: str
    title: str
    kind: str  # "cpu" or "cuda": which of the engine's defaults apply
    memory: int  # bytes
    bandwidth: float  # bytes/s
    flops: Mapping[str, float]  # FLOP/s by precision of the product
    price: float | None = None  # US dollars an hour, a typical on-demand price; None: you own it
    link: float = 25e9  # bytes/s to another device of the same worker
    cores: int = 8

    def peak(self, precision: str) -> float:
        """FLOP/s for weights of this precision. int4 is widened as it is read and multiplied in 16 bits, int8 on a CPU
        too. A GPU multiplies int8 as it is, but rounds the rows before and scales the sums after: on an H200 8,192
        tokens take 194 ms instead of 203 (fp8: 135). So integers save bytes, hardly FLOPs."""
        own = () if precision in ("int8", "int4") else (precision,)
        for name in (*own, "bfloat16", "float32"):
            if name in self.flops:
                return self.flops[name]
        raise ConfigError(f"{self.name}: no peak rate is known for {precision}.")

    def hardware(self, count: int = 1) -> Hardware:
        """What the engine's own `resolve` wants to know of it."""
        return Hardware(self.kind, self.cores, self.memory * count)


def _gpu(
    name: str, title: str, memory: int, bandwidth: float, bf16: float, low: float | None, price: float, link: float
) -> Device:
    flops = {"bfloat16": bf16 * TFLOP, "float16": bf16 * TFLOP}
    if low is not None:
        flops |= {"fp8": low * TFLOP, "int8": low * TFLOP}
    return Device(name, title, "cuda", memory * GB, bandwidth * GB, flops, price, link * GB)


def _apple(name: str, title: str, memory: int, bandwidth: float, rate: float) -> Device:
    return Device(name, title, "cpu", memory * GB, bandwidth * GB, {"float32": rate * TFLOP, "float16": rate * TFLOP})


def _cpu(name: str, title: str, memory: int, bandwidth: float, f32: float, bf16: float | None, cores: int) -> Device:
    flops = {"float32": f32 * TFLOP} | ({"bfloat16": bf16 * TFLOP, "int8": 2 * bf16 * TFLOP} if bf16 else {})
    return Device(name, title, "cpu", memory * GB, bandwidth * GB, flops, None, 10e9, cores)


_TABLE = (
    _gpu("a100", "NVIDIA A100 SXM 80 GB", 80, 2039, 312, None, 1.8, 300),
    _gpu("a100-40", "NVIDIA A100 SXM 40 GB", 40, 1555, 312, None, 1.3, 300),
    _gpu("h100", "NVIDIA H100 SXM 80 GB", 80, 3350, 989, 1979, 2.9, 450),
    _gpu("h200", "NVIDIA H200 SXM 141 GB", 141, 4800, 989, 1979, 3.7, 450),
    _gpu("b200", "NVIDIA B200 SXM 180 GB", 180, 8000, 2250, 4500, 5.5, 900),
    _gpu("l4", "NVIDIA L4 24 GB", 24, 300, 121, 242, 0.7, 32),
    _gpu("l40s", "NVIDIA L40S 48 GB", 48, 864, 362, 733, 1.1, 32),
    _gpu("rtx4090", "NVIDIA RTX 4090 24 GB", 24, 1008, 165, 330, 0.45, 32),
    _gpu("mi300x", "AMD MI300X 192 GB", 192, 5300, 1307, 2615, 2.6, 448),
    _apple("m2-ultra", "Apple M2 Ultra (76-core GPU) 192 GB", 192, 800, 27.2),
    _apple("m3-max", "Apple M3 Max (40-core GPU) 128 GB", 128, 400, 14.2),
    _apple("m4-max", "Apple M4 Max (40-core GPU) 128 GB", 128, 546, 18.4),
    _apple("m4", "Apple M4 (10-core GPU) 32 GB", 32, 120, 4.3),
    _cpu("epyc-9654", "AMD EPYC 9654, 96 cores, 12 × DDR5-4800", 768, 460.8, 7.4, 14.7, 96),
    _cpu("xeon-8480", "Intel Xeon 8480+, 56 cores, 8 × DDR5-4800, AMX", 512, 307.2, 7.2, 114.7, 56),
    _cpu("ryzen-7950x", "AMD Ryzen 9 7950X, 16 cores, 2 × DDR5-5200", 64, 83.2, 2.3, 4.6, 16),
)
DEVICES: dict[str, Device] = {device.name: device for device in _TABLE}


def find_device(name: str) -> Device:
    if name in DEVICES:
        return DEVICES[name]
    near = get_close_matches(name.lower(), DEVICES, n=1)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    raise ConfigError(f"hardware {name!r} is not in the table. {hint}Known: {', '.join(DEVICES)}, and 'this'.")


def known_gpu(name: str) -> Device | None:
    """The entry of the table that a driver's name for a card means ("NVIDIA H200"), if there is one."""
    plain = name.lower().replace(" ", "").replace("-", "")
    longest_first = sorted(DEVICES.values(), key=lambda device: -len(device.name))
    gpus = (device for device in longest_first if device.kind == "cuda")
    return next((device for device in gpus if device.name.replace("-", "") in plain), None)


@dataclass(frozen=True, slots=True)
class Tiles:
    """Attention over stretches of prompts that are too short for the vendor's kernel."""

    compute: float  # FLOP/s where there are enough of them
    key_seconds: float  # for a program to pass one key of one layer: what counts where there are few

    def faster(self, times: float) -> Tiles:
        return Tiles(times * self.compute, self.key_seconds / times)


@dataclass(frozen=True, slots=True)
class Rates:
    """What the engine reaches, from which times are predicted."""

    bandwidth: float  # bytes/s of weights
    compute: float  # FLOP/s of matrix products
    kv_bandwidth: float  # bytes/s of K and V in decode attention
    attention_compute: float  # FLOP/s of attention over prompts; on a GPU over long stretches of them
    step_seconds: float  # of every step, whatever is in it
    request_seconds: float  # of every request in a step
    # How much longer real products take than max(bytes/bandwidth, FLOPs/compute): (rows, factor), rows ascending.
    slowdown: tuple[tuple[float, float], ...] = ()
    source: str = "datasheet"
    chunk_seconds: float = 0.0  # least of a step that reads prompts: on a GPU what is not captured has to be launched
    # Whether narrower K and V are attended to faster. Not on a CPU: widening them costs what their bytes save.
    kv_by_bytes: bool = True
    # A GPU's steps (cost/tiles.py): padded to shapes, attention over prompts in tiles. None: no such machine.
    tiles: Tiles | None = None
    host_link: float | None = None  # bytes/s of K and V copied to the host's memory and back; None: not measured
    # Longer that the first step without prompts takes after one with: it seems that prompts push the weights out of a
    # CPU's cache. Of what one step took longer the next takes COLD_LEFT. Only a log of steps in a row can tell.
    cold_seconds: float = 0.0


def narrow_read(kind: str, precision: str) -> float:
    return NARROW_READ.get(precision, 1.0) if kind == "cuda" else 1.0


def datasheet_rates(device: Device, precision: str, count: int = 1) -> Rates:
    """Rates assumed of a machine that nobody has measured; `count` devices share every product."""
    memory = count * BANDWIDTH_REACHED[device.kind] * device.bandwidth
    bandwidth = memory * narrow_read(device.kind, precision)
    compute = count * COMPUTE_REACHED[device.kind] * device.peak(precision)
    wide = count * COMPUTE_REACHED[device.kind] * device.peak("bfloat16")
    overhead = STEP_SECONDS[device.kind]
    gpu = device.kind != "cpu"
    return Rates(
        bandwidth, compute, memory, wide / 2, overhead, REQUEST_SECONDS[device.kind], kv_by_bytes=gpu,
        tiles=Tiles(wide / 2, KEY_SECONDS) if gpu else None,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was measured on a machine; kept as JSON in the cache folder, one file for each (machine, model) pair."""

    machine: str
    model: str
    rates: Rates
    memory: int  # bytes that could be used when it was made
    cores: int
    kind: str = "cpu"
    steps: int = 0  # steps of the log it was fitted to
    errors: dict[str, float] = field(default_factory=dict)  # of the fit: median and p95 of |predicted − measured|

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")

    def device(self) -> Device:
        """The machine as an entry of the table, with measured values in place of a datasheet's; the rates of fp8 and
        int8 in the datasheet's proportion to those that were measured."""
        rates = self.rates
        flops = {"float32": rates.compute, "bfloat16": rates.compute, "float16": rates.compute}
        known = next((device for device in DEVICES.values() if device.title == self.machine), known_gpu(self.machine))
        if known is not None:
            narrow = {name: rate / known.peak("bfloat16") for name, rate in known.flops.items() if name not in flops}
            flops |= {name: times * rates.compute for name, times in narrow.items()}
        title = f"{self.machine} (measured)"
        return Device("this", title, self.kind, self.memory, rates.bandwidth, flops, None, 10e9, self.cores)


def rates_from(document: Mapping[str, Any]) -> Rates:
    """As `asdict` wrote them."""
    slowdown = tuple((float(rows), float(factor)) for rows, factor in document["slowdown"])
    tiles = Tiles(**document["tiles"]) if document.get("tiles") else None
    return Rates(**{**document, "slowdown": slowdown, "tiles": tiles})


def load_calibration(path: Path) -> Calibration:
    try:
        document: dict[str, Any] = json.loads(path.read_text())
        return Calibration(rates=rates_from(document.pop("rates")), **document)
    except OSError:
        raise ConfigError(
            f"{path}: no calibration of this machine yet: run `twostroke plan MODEL --calibrate`."
        ) from None
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{path}: not a calibration ({error}): delete it and calibrate again.") from None


def calibration_path(folder: Path, model: str) -> Path:
    safe = "".join(letter if letter.isalnum() or letter in "-._" else "-" for letter in Path(model).name)
    return folder / "calibration" / f"{safe}.json"
