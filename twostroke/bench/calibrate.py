"""Measures this machine with this model in under a minute: a grid of steps, and a fit to their times."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from twostroke.bench.grid import CALIBRATION, cells, run_grid, typical
from twostroke.cost.model.calibration import Calibration
from twostroke.cost.model.devices import Device, known_gpu
from twostroke.cost.model.fit import errors, fit, fit_launched, with_between
from twostroke.cost.model.rates import Rates, datasheet_rates
from twostroke.cost.model.roofline import Roofline, model_cost
from twostroke.hardware import free_memory, machine_name
from twostroke.record import replace

if TYPE_CHECKING:
    from twostroke.engine.llm import LLM

SECONDS = 45.0


def calibrate(
    llm: LLM, model: str, weight_bytes: int, seconds: float = SECONDS, progress: Callable[[str], None] | None = None
) -> Calibration:
    kind = llm.settings.device
    core = llm.engine.core
    steps = run_grid(core, llm.arch.vocab, cells(CALIBRATION[kind], core), seconds, progress=progress)
    cost, layout, usual = model_cost(llm.arch, "float32", weight_bytes), llm.settings.layout, typical(steps)
    rates = (fit if kind == "cpu" else fit_launched)(usual, cost, layout, first_guess(kind))
    reached = errors(usual, Roofline(cost, layout, rates))
    memory = free_memory() + weight_bytes if kind == "cpu" else gpu().memory
    name = machine_name() if kind == "cpu" else gpu().title
    if kind == "cpu":
        rates = replace(rates, host_link=numpy_copy())
    return Calibration(name, model, with_between(rates, steps), memory, llm.settings.threads, kind, len(steps), reached)


def first_guess(kind: str) -> Rates:
    """Start of the fit: the datasheet of a GPU, a quick measurement of a CPU."""
    if kind == "cuda":
        return datasheet_rates(gpu(), "bfloat16")
    bandwidth, compute = numpy_bandwidth(), numpy_compute()
    return Rates(bandwidth, compute, bandwidth, compute / 2, 0.0015, 3e-5, source="numpy", kv_by_bytes=False)


def gpu() -> Device:
    import torch  # only where a GPU was used

    name = torch.cuda.get_device_name()
    memory = int(torch.cuda.get_device_properties(0).total_memory)
    return known_gpu(name) or Device("this", name, "cuda", memory, 1e12, {"bfloat16": 1e14})


def numpy_bandwidth(size: int = 1 << 27) -> float:
    """Bytes/s of one pass over a large array."""
    data = np.ones(size // 4, dtype=np.float32)
    return size / fastest(lambda: float(data.sum()))


def numpy_copy(size: int = 1 << 27) -> float:
    """Bytes/s of copying a large array: the cost of offloaded blocks on a CPU."""
    source = np.ones(size // 4, dtype=np.float32)
    target = np.empty_like(source)
    return size / fastest(lambda: np.copyto(target, source))


def numpy_compute(size: int = 768) -> float:
    matrix = np.ones((size, size), dtype=np.float32)
    return 2.0 * size**3 / fastest(lambda: matrix @ matrix)


def fastest(work: Callable[[], object], times: int = 5) -> float:
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return min(taken)
