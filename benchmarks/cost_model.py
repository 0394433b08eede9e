"""The cost model and the simulator against reality, on this machine.

    python -m benchmarks.cost_model                  # the default model: grid, trace slice, speed; JSON under results/
    python -m benchmarks.cost_model --model qwen2.5-coder-0.5b --device cuda --requests 200

1. grid: prompt length × batch × context on the engine; the rates are fitted to every other step, the errors are those
   of the steps in between, one by one and by cells of like steps (whose median is free of the machine's hiccups).
2. trace: a slice of the Azure conversation trace served for real and simulated. The rates are those of the grid, slowed
   down to the mean of the steps of an earlier slice: nothing is tuned to the one that is predicted.
3. bytes: K and V as the layout predicts them against what the allocator took.
4. speed: simulated requests a minute on a 64-worker fleet, one core.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.machine import describe
from twostroke import LLM
from twostroke.bench.calibrate import first_guess, run_grid
from twostroke.bench.inprocess import measure, settings_document
from twostroke.bench.workload import Load, shipped_trace, trace_load
from twostroke.config import make_config, resolve
from twostroke.cost.deploy import deployment_of
from twostroke.cost.fit import errors, fit, on_average, predicted, with_between
from twostroke.cost.fleet import Fleet, Pools
from twostroke.cost.hardware import Calibration, Rates, datasheet_rates, find_device
from twostroke.cost.models import known_arch
from twostroke.cost.roofline import Roofline, model_cost
from twostroke.cost.summary import Summary
from twostroke.cost.trace import faster, from_zero, rate, repeat
from twostroke.metrics.steplog import Step
from twostroke.weights.catalog import DEFAULT
from twostroke.weights.checkpoint import locate, open_checkpoint
from twostroke.weights.describe import checkpoint_bytes

RESULTS = Path(__file__).parent / "results"


def grid(llm: LLM, weight_bytes: int, seconds: float) -> tuple[Rates, dict[str, Any]]:
    steps = run_grid(llm, seconds, lambda text: print(f"grid: {text}", flush=True))
    cost, layout = model_cost(llm.arch, "float32", weight_bytes), llm.settings.layout
    rates = fit(steps[::2], cost, layout, first_guess(llm))
    line = Roofline(cost, layout, rates)
    held_out = steps[1::2]
    prompts = [step for step in held_out if step.chunks]
    streams = [step for step in held_out if not step.chunks]
    found = {
        "steps": len(steps),
        "all": errors(held_out, line),
        "cells": cell_errors(held_out, line),
        "with prompts": errors(prompts, line) if prompts else None,
        "streams only": errors(streams, line) if streams else None,
        "target": {"median": 0.10, "p95": 0.20},
    }
    return with_between(rates, steps), found


def cell_errors(steps: Sequence[Step], line: Roofline) -> dict[str, float]:
    """Like steps together: prompt tokens, streams and mean context in powers of two."""
    cells: dict[tuple[int, ...], list[float]] = {}
    for step in steps:
        read = sum(piece.count for piece in step.chunks)
        context = sum(piece.start for piece in step.pieces) // len(step.pieces)
        key = (read.bit_length(), len(step.streams), context.bit_length())
        cells.setdefault(key, []).append(predicted(step, line) / step.seconds)
    found = [abs(median(ratios) - 1) for ratios in cells.values()]
    return {"cells": len(found), "median": median(found), "p95": float(np.percentile(found, 95))}


def trace_slice(llm: LLM, rates: Rates, weight_bytes: int, args: argparse.Namespace) -> dict[str, Any]:
    """The first half of the slice is the calibration, the second half is predicted."""
    found, core, cost = {}, llm.engine.core, model_cost(llm.arch, "float32", weight_bytes)
    assert core.steplog is not None
    for per_second in args.rates:
        whole = trace_load("azure-conv", 2 * args.requests, per_second, args.scale, llm.settings.max_model_len - 2)
        earlier, later = halves(whole)
        last = max(step.number for step in core.steplog)
        measure(llm, earlier, args.model)
        seen = [step for step in core.steplog if step.number > last and step.seconds > 0]
        slowed = on_average(seen, Roofline(cost, llm.settings.layout, rates))
        real = measure(llm, later, args.model)
        calibration = Calibration("this", args.model, slowed, 10**12, 1, llm.settings.device)
        deployment = deployment_of(llm.arch, settings_document(llm), calibration, weight_bytes)
        simulated = deployment.run(real.arrivals()).summary
        found[f"{per_second:g}/s"] = beside(real.summary(), simulated)
        print(f"trace at {per_second:g}/s: {json.dumps(found[f'{per_second:g}/s'])}", flush=True)
    return found


def halves(load: Load) -> tuple[Load, Load]:
    middle = len(load.arrivals) // 2
    return replace(load, arrivals=load.arrivals[:middle]), replace(load, arrivals=from_zero(load.arrivals[middle:]))


def beside(real: Summary, simulated: Summary) -> dict[str, Any]:
    rows = {}
    for metric in ("ttft", "tpot"):
        for percentile in ("p50", "p95"):
            measured = getattr(getattr(real, metric), percentile)
            predicted = getattr(getattr(simulated, metric), percentile)
            rows[f"{metric} {percentile}"] = {
                "measured": measured, "simulated": predicted, "error": predicted / measured - 1,
            }  # fmt: skip
    return rows


def kv_bytes(llm: LLM) -> dict[str, int]:
    storage = llm.engine.core.runner.kv
    held = sum(t.numel() * t.element_size() for t in (storage.data, storage.scales) if t is not None)
    return {"predicted": llm.settings.kv_blocks * llm.settings.layout.block_bytes, "allocated": held}


def speed(requests: int = 19_366) -> dict[str, float]:
    """The full trace where its path is not given: the excerpt again and again."""
    arch, device = known_arch("llama-3.1-8b"), find_device("h200")
    assert arch is not None
    model = model_cost(arch)
    settings = resolve(make_config(max_model_len=32768, seed=0), arch, device.hardware(), model.bytes)
    rows = shipped_trace("azure-conv")
    rows = repeat(faster(rows, 5.5 / rate(rows)), requests)
    began = time.process_time()
    Fleet(Roofline(model, settings.layout, datasheet_rates(device, "bfloat16")), settings, Pools(64)).run(rows)
    taken = time.process_time() - began
    return {"requests": requests, "cpu_seconds": taken, "requests_per_minute": 60 * requests / taken, "target": 20_000}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=40.0, help="of the grid")
    parser.add_argument("--requests", type=int, default=40, help="of either half of the trace slice")
    parser.add_argument("--rates", type=lambda text: [float(one) for one in text.split(",")], default=[0.8])
    parser.add_argument("--scale", type=float, default=4.0, help="divides the trace's lengths")
    args = parser.parse_args()
    llm = LLM(args.model, device=args.device)
    weight_bytes = checkpoint_bytes(open_checkpoint(locate(args.model)))
    rates, on_grid = grid(llm, weight_bytes, args.seconds)
    print(f"grid: {json.dumps(on_grid)}", flush=True)
    result = {
        "machine": describe(),
        "command": "python -m benchmarks.cost_model",
        "model": args.model,
        "device": args.device,
        "grid": on_grid,
        "trace": trace_slice(llm, rates, weight_bytes, args),
        "kv_bytes": kv_bytes(llm),
        "simulator": speed(),
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"cost-model-{args.device}-{Path(args.model).stem}.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
