"""Machines by name: memory, bandwidth and peak rates as vendors print them (dense rates, no sparsity)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from twostroke.cost.model.weight_formats import NARROW
from twostroke.errors import ConfigError
from twostroke.hardware import Hardware

GB, TFLOP = 10**9, 10**12


@dataclass(frozen=True, slots=True)
class Device:
    """One machine or accelerator, as its datasheet describes it."""

    name: str
    title: str
    kind: str  # "cpu" or "cuda": which of the engine's defaults apply
    memory: int  # bytes
    bandwidth: float  # bytes/s
    flops: Mapping[str, float]  # FLOP/s by precision of the product
    price: float | None = None  # US dollars an hour, a typical on-demand price; None: not rented
    link: float = 25e9  # bytes/s to another device of the same worker
    cores: int = 8

    def peak(self, precision: str) -> float:
        """FLOP/s for weights of this precision. Narrow weights count as 16-bit ones: fp8 and int4 are widened as they
        are read, int8 on a CPU too. A GPU multiplies int8 directly, but rounds the rows before and scales the sums
        after, which costs most of the gain: 8,192 tokens take 194 ms on an H200 instead of 203."""
        own = () if precision in NARROW else (precision,)
        for name in (*own, "bfloat16", "float32"):
            if name in self.flops:
                return self.flops[name]
        raise ConfigError(f"{self.name}: no peak rate is known for {precision}.")

    def hardware(self, count: int = 1) -> Hardware:
        """The machine as the engine's `resolve` takes it."""
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
    """The entry of the table for a card's name as its driver reports it ("NVIDIA H200"); None: not in the table."""
    plain = name.lower().replace(" ", "").replace("-", "")
    longest_first = sorted(DEVICES.values(), key=lambda device: -len(device.name))
    gpus = (device for device in longest_first if device.kind == "cuda")
    return next((device for device in gpus if device.name.replace("-", "") in plain), None)
