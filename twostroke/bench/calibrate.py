"""Measures this machine with this model in under a minute: a grid of steps on the engine, and a fit to its step log."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import product
from typing import TYPE_CHECKING

import numpy as np

from twostroke.bench.inprocess import measure
from twostroke.bench.workload import Load
from twostroke.cost.fit import errors, fit, with_between
from twostroke.cost.hardware import DEVICES, Calibration, Device, Rates, datasheet_rates, machine_name
from twostroke.cost.roofline import Roofline, model_cost
from twostroke.cost.trace import Arrival, Contents
from twostroke.hardware import free_memory
from twostroke.metrics.steplog import Step

if TYPE_CHECKING:
    from twostroke.engine.llm import LLM

SECONDS = 45.0
PROMPTS = (16, 48, 128, 384, 1000, 2500)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
ANSWER = 12


def calibrate(
    llm: LLM, model: str, weight_bytes: int, seconds: float = SECONDS, progress: Callable[[str], None] | None = None
) -> Calibration:
    steps = run_grid(llm, seconds, progress)
    cost, layout = model_cost(llm.arch, "float32", weight_bytes), llm.settings.layout
    rates = fit(steps, cost, layout, first_guess(llm))
    reached = errors(steps, Roofline(cost, layout, rates))
    kind = llm.settings.device
    memory = free_memory() + weight_bytes if kind == "cpu" else gpu().memory
    name = machine_name() if kind == "cpu" else gpu().title
    return Calibration(name, model, with_between(rates, steps), memory, llm.settings.threads, kind, len(steps), reached)


def run_grid(llm: LLM, seconds: float, progress: Callable[[str], None] | None) -> list[Step]:
    """Batches of streams at many contexts after prompts of many lengths, the cheap ones first, until the time is up."""
    contents, began = Contents(1 << 35), time.monotonic()
    longest = llm.settings.max_model_len - ANSWER - 1
    core = llm.engine.core
    assert core.steplog is not None
    measure(llm, Load("warm up", [Arrival(0.0, (contents.own(min(64, longest)),), 4)], 1), "")
    last = max((step.number for step in core.steplog), default=0)
    steps: list[Step] = []
    for batch, prompt in sorted(product(BATCHES, PROMPTS), key=lambda cell: cell[0] * cell[1]):
        left = seconds - (time.monotonic() - began)
        if batch > llm.settings.max_requests or prompt > longest or left <= 0:
            continue
        if progress is not None:
            progress(f"{batch} × {prompt} tokens, {left:.0f} s left")
        rows = [Arrival(0.0, (contents.own(prompt),), ANSWER) for _ in range(batch)]
        measure(llm, Load("grid", rows, batch), "")
        steps += [step for step in core.steplog if step.number > last and step.seconds > 0]
        last = max(step.number for step in core.steplog)
    return steps


def first_guess(llm: LLM) -> Rates:
    """Where the fit starts: the datasheet of a known GPU, a quick measurement of a CPU."""
    if llm.settings.device == "cuda":
        return datasheet_rates(gpu(), "bfloat16")
    bandwidth, compute = numpy_bandwidth(), numpy_compute()
    return Rates(bandwidth, compute, bandwidth, compute / 2, 0.0015, 3e-5, source="numpy")


def gpu() -> Device:
    import torch  # only where a GPU was used

    name = torch.cuda.get_device_name().lower().replace(" ", "")
    for key in sorted(DEVICES, key=len, reverse=True):
        if key.replace("-", "") in name:
            return DEVICES[key]
    memory = int(torch.cuda.get_device_properties(0).total_memory)
    return Device("this", torch.cuda.get_device_name(), "cuda", memory, 1e12, {"bfloat16": 1e14})


def numpy_bandwidth(size: int = 1 << 27) -> float:
    """Bytes/s that one pass over a large array reads."""
    data = np.ones(size // 4, dtype=np.float32)
    return size / best_of(lambda: float(data.sum()))


def numpy_compute(size: int = 768) -> float:
    matrix = np.ones((size, size), dtype=np.float32)
    return 2.0 * size**3 / best_of(lambda: matrix @ matrix)


def best_of(work: Callable[[], object], times: int = 5) -> float:
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return min(taken)
