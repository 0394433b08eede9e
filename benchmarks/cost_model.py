"""The cost model and the simulator against measurements on this machine.

    python -m benchmarks.cost_model                  # the default model: grid, trace, bytes, speed; 6 to 9 minutes
    python -m benchmarks.cost_model --device cuda    # random weights in the shape of Llama-3.1-8B: grid and bytes
    python -m benchmarks.cost_model --refit RESULT.json     # today's model on the steps of an earlier result

1. grid: prompt length × batch × context on the engine. The rates are fitted to one set of shapes (that of `twostroke
   plan --calibrate`); the errors are those of other shapes, which lie between them. A step is measured in several
   rounds, each in another order, and its time is the median. `repeats` is the distance of single repeats from it, which
   no model can predict.
2. trace: excerpts of the Azure conversation trace, served and simulated (served_trace.py). Each excerpt is predicted
   from the grid and from the steps of the excerpts served before and after it. The percentiles are over all requests of
   all turns; `turns apart` is the difference of the same requests from turn to turn.
3. bytes: K and V by the layout against what was allocated.
4. speed: simulated requests a minute on a 64-worker fleet, one core.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.machine import RESULTS, describe
from benchmarks.served_trace import served_trace
from twostroke.bench.calibrate import first_guess
from twostroke.bench.grid import CALIBRATION, Sizes, by_shape, cells, run_grid, typical
from twostroke.bench.workload import shipped_trace
from twostroke.config import make_config, resolve
from twostroke.cost.model.devices import find_device
from twostroke.cost.model.fit import errors, fit, fit_launched, predicted, with_between
from twostroke.cost.model.known_models import known_arch
from twostroke.cost.model.rates import Rates, datasheet_rates, rates_from
from twostroke.cost.model.roofline import ModelCost, Roofline, model_cost
from twostroke.cost.simulation.fleet import Fleet, Pools
from twostroke.cost.simulation.trace import faster, rate, repeat
from twostroke.engine.core import Core
from twostroke.kv.layout import KVLayout, make_layout
from twostroke.metrics.steplog import LoggedWork, Step
from twostroke.weights.catalog import DEFAULT

TARGET = {"median": 0.10, "p95": 0.20}
WORST = 12  # cells that are written out
COLUMNS = ("streams", "context", "start", "count", "sampled", "measured", "predicted")
# Cells between those of the calibration.
HELD_OUT = {
    "cpu": Sizes(
        (1, 2, 3, 4, 7, 10, 14, 20, 28, 40), (48, 256, 1024),
        (12, 20, 40, 80, 112, 160, 320, 448), (0, 256, 1024),
        ((1, 256), (5, 256)), ((0, 20), (1024, 20), (0, 112), (1024, 112)), 16_384, 400_000,
    ),
    "cuda": Sizes(
        (1, 2, 3, 6, 12, 20, 40, 80, 112, 160, 224), (128, 1024, 4096, 16_384),
        (48, 192, 384, 768, 1536, 3072, 6144), (0, 1024, 8192),
        ((2, 1024), (32, 1024)), ((0, 192), (8192, 192), (0, 768), (8192, 768)), 200_000, 1 << 26,
    ),
}  # fmt: skip


def grid(core: Core, cost: ModelCost, kind: str, seconds: float, rounds: int) -> tuple[Rates, dict[str, Any]]:
    known, unknown = cells(CALIBRATION[kind], core), cells(HELD_OUT[kind], core)
    say = lambda text: print(f"grid: {text}", flush=True) if text.endswith("0") else None  # noqa: E731
    steps = run_grid(core, cost.arch.vocab, [*known, *unknown], seconds, rounds, say)
    layout, seen, usual = core.scheduler.tables.layout, set(known), typical(steps)
    fitted = [step for step in usual if cell_of(step) in seen]
    held_out = [step for step in usual if cell_of(step) not in seen]
    rates, found = judged(fitted, held_out, cost, layout, kind)
    found = {
        "weight bytes": cost.bytes,
        "steps": len(steps),
        "rounds": median(len(alike) for alike in by_shape(steps) if alike[0].chunks),
        "repeats": {"median": median(spread(steps)), "p95": float(np.percentile(spread(steps), 95))},
        **found,
    }
    return with_between(fitting(kind)(usual, cost, layout, rates), steps), found


def fitting(kind: str) -> Callable[[Sequence[Step], ModelCost, KVLayout, Rates], Rates]:
    return fit if kind == "cpu" else fit_launched


def judged(
    fitted: Sequence[Step], held_out: Sequence[Step], cost: ModelCost, layout: KVLayout, kind: str,
    start: Rates | None = None,
) -> tuple[Rates, dict[str, Any]]:  # fmt: skip
    """Rates from some shapes, and their errors on others; the result contains every shape, to be fitted again."""
    start = start or first_guess(kind)
    rates = fitting(kind)(fitted, cost, layout, start)
    line = Roofline(cost, layout, rates)
    return rates, {
        "shapes fitted": {"count": len(fitted), **errors(fitted, line)},
        "shapes held out": {"count": len(held_out), **errors(held_out, line)},
        "of these": {name: errors(some, line) for name, some in kinds(held_out).items() if some},
        "target": TARGET,
        "met": all(errors(held_out, line)[name] <= most for name, most in TARGET.items()),
        "worst": worst(held_out, line),
        "first guess": asdict(start),
        "rates": asdict(rates),
        "columns": COLUMNS,
        "fitted": [row_of(step, line) for step in fitted],
        "held out": [row_of(step, line) for step in held_out],
    }


def row_of(step: Step, line: Roofline) -> list[float]:
    return [*cell_of(step), step.sampled, float(f"{step.seconds:.6g}"), float(f"{predicted(step, line):.6g}")]


def step_of(row: Sequence[float]) -> Step:
    """The step of a row; its streams are two tokens into their block."""
    streams, context, start, count, sampled = (int(value) for value in row[:5])
    pieces = [LoggedWork(number, context + 2, 1) for number in range(streams)]
    pieces += [LoggedWork(streams, start, count, "read")] if count else []
    return Step(0, 0.0, row[5], tuple(pieces), sampled)


def refit(path: Path) -> dict[str, Any]:
    """Today's model fitted to the steps of an earlier result."""
    document = json.loads(path.read_text())
    if "fitted" not in document["grid"]:
        raise SystemExit(f"{path}: its grid has no rows of shapes: it is too old. Measure again.")
    kind = "cuda" if "device" in document else "cpu"
    arch = known_arch("llama-3.1-8b" if kind == "cuda" else document["model"])
    if arch is None:
        raise SystemExit(f"{path}: {document['model']} is not in the table (cost/model/known_models.py).")
    rows = document["grid"]
    fitted, held_out = ([step_of(row) for row in rows[name]] for name in ("fitted", "held out"))
    cost, layout = model_cost(arch, "float32", rows["weight bytes"]), make_layout(arch, "float16")
    return judged(fitted, held_out, cost, layout, kind, rates_from(rows["first guess"]))[1]


def cell_of(step: Step) -> tuple[int, int, int, int]:
    """The cell of the step, the context as whole blocks."""
    context = max((work.start for work in step.streams), default=0) // 16 * 16
    start, count = next(((work.start, work.count) for work in step.chunks), (0, 0))
    return len(step.streams), context, start, count


def spread(steps: Sequence[Step]) -> list[float]:
    """Distance of each step from the median of its repeats, relative to it. No model can predict it."""
    found = []
    for alike in by_shape(steps):
        middle = median(step.seconds for step in alike)
        found += [abs(step.seconds / middle - 1) for step in alike]
    return found


def kinds(steps: Sequence[Step]) -> dict[str, list[Step]]:
    return {
        "streams": [step for step in steps if not step.chunks],
        "prompts": [step for step in steps if step.chunks and not step.streams],
        "both": [step for step in steps if step.chunks and step.streams],
    }


def worst(steps: Sequence[Step], line: Roofline) -> list[dict[str, Any]]:
    rows = []
    for step in steps:
        expected, cell = predicted(step, line), cell_of(step)
        names = dict(zip(("streams", "context", "start", "count"), cell, strict=True))
        rows.append({**names, "measured": step.seconds, "predicted": expected, "error": expected / step.seconds - 1})
    return sorted(rows, key=lambda row: -abs(row["error"]))[:WORST]


def kv_bytes(core: Core) -> dict[str, int]:
    storage: Any = core.runner.kv  # type: ignore[attr-defined]
    held = storage.data.nbytes
    tables = core.scheduler.tables
    return {"predicted": tables.pool.total * tables.layout.block_bytes, "allocated": held}


def speed(requests: int = 19_366) -> dict[str, float]:
    """With as many requests as the full trace: the shipped excerpt, repeated."""
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


def on_cpu(args: argparse.Namespace) -> dict[str, Any]:
    from twostroke import LLM
    from twostroke.weights.checkpoint import locate, open_checkpoint
    from twostroke.weights.describe import checkpoint_bytes

    llm = LLM(args.model, device="cpu", speculate="off")
    weight_bytes = checkpoint_bytes(open_checkpoint(locate(args.model)))
    core, cost = llm.engine.core, model_cost(llm.arch, "float32", weight_bytes)
    rates, on_grid = grid(core, cost, "cpu", args.seconds, args.rounds)
    print(f"grid: {json.dumps(on_grid)}", flush=True)
    served = served_trace(llm, rates, weight_bytes, args)
    print(f"trace: {json.dumps(served)}", flush=True)
    return {"model": args.model, "grid": on_grid, "trace": served, "kv_bytes": kv_bytes(core), "simulator": speed()}


def on_gpu(args: argparse.Namespace) -> dict[str, Any]:
    import torch

    from benchmarks.gpu_rig import make_rig
    from benchmarks.random_weights import LLAMA_8B

    rig = make_rig(LLAMA_8B, max_model_len=32_768)
    print(f"{torch.cuda.get_device_name()}: {rig.core.scheduler.tables.pool.total} blocks", flush=True)
    _, on_grid = grid(rig.core, model_cost(LLAMA_8B, "bfloat16"), "cuda", args.seconds, args.rounds)
    name = torch.cuda.get_device_name()
    return {"device": name, "model": "random weights, Llama-3.1-8B's shape, bfloat16", "grid": on_grid,
            "kv_bytes": kv_bytes(rig.core)}  # fmt: skip


def compact(document: dict[str, Any]) -> str:
    """Indented JSON with each row of numbers on one line."""
    return re.sub(
        r"\[\s+([^\[\]{}]*?)\s+\]", lambda row: f"[{' '.join(row[1].split())}]", json.dumps(document, indent=2)
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT, help="on a CPU")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--seconds", type=float, default=160.0, help="of the grid, at most")
    parser.add_argument("--rounds", type=int, default=10, help="of the grid, at most")
    parser.add_argument("--pieces", type=int, default=16, help="excerpts of the trace")
    parser.add_argument("--requests", type=int, default=12, help="of each excerpt")
    parser.add_argument("--turns", type=int, default=2, help="times that the excerpts are served")
    parser.add_argument("--utilisation", type=float, default=0.3, help="that sets the rate of the requests")
    parser.add_argument("--scale", type=float, default=4.0, help="divides the trace's lengths")
    parser.add_argument("--json", type=Path, help="instead of under results/")
    parser.add_argument("--refit", type=Path, help="measure nothing: fit to the steps of this result and print")
    args = parser.parse_args(arguments)
    if args.refit is not None:
        print(compact(refit(args.refit)))
        return
    found = on_cpu(args) if args.device == "cpu" else on_gpu(args)
    command = f"python -m benchmarks.cost_model --seconds {args.seconds:g} --rounds {args.rounds}"
    command += " --device cuda" if args.device == "cuda" else f" --pieces {args.pieces} --requests {args.requests}"
    result = {"machine": describe(), "command": command, **found}
    name = f"cpu-{Path(args.model).stem}" if args.device == "cpu" else "h200"
    path = args.json or RESULTS / f"cost-model-{name}.json"
    path.write_text(compact(result) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
