"""Where the time of a decode step and of a prefill goes, product by product, beside the hardware's limits.

    python -m benchmarks.cpu_breakdown

Products are timed through all layers in turn, with their norm or gate, so that weights are read from where a real step
reads them. The rest of the layers' time is attention and the work between products; the rest of a step's time is
scheduling, sampling and Python. The last line is JSON.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np

from benchmarks.cpu_engines import greedy, prompt
from benchmarks.cpu_limits import dot_peaks, read_bandwidth
from benchmarks.machine import describe
from twostroke import LLM
from twostroke.weights.catalog import DEFAULT

ROUNDS = 15


def typical(call: Callable[[], object], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return median(times)


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape, np.float32)


def products(model: Any, rows: int, logit_rows: int, rounds: int) -> dict[str, dict[str, float]]:
    """Seconds, bytes and operations of each kind of product in one step."""
    ops, found = model.ops, {}
    for kind in ("qkv", "output", "gate_up", "down"):
        mine = [product for layer in model.layers for product in layer.products() if product.name == kind]
        x = normal(rows, mine[0].weight.inputs * (2 if kind == "down" else 1))

        def all_layers(mine: Any = mine, x: Any = x) -> None:
            for product in mine:
                ops.linear(x, product.weight, before=product.before)

        found[kind] = figures(typical(all_layers, rounds), [product.weight for product in mine], rows, ops)
    hidden = normal(logit_rows, model.arch.hidden)
    found["head"] = figures(typical(lambda: model.logits(hidden), rounds), [model.head], logit_rows, ops)
    return found


def figures(seconds: float, weights: list[Any], rows: int, ops: Any) -> dict[str, float]:
    read = sum(ops.weight_bytes(weight) for weight in weights)
    work = 2 * rows * sum(weight.inputs * weight.outputs for weight in weights)
    return {"ms": seconds * 1e3, "gb_s": read / seconds / 1e9, "gop_s": work / seconds / 1e9}


class Watch:
    """Seconds that a model's layers and its logits take inside real steps."""

    def __init__(self, model: Any):
        self.model, self.forward, self.logits = model, [], []  # type: ignore[var-annotated]
        for name in ("forward", "logits"):
            setattr(model, name, self._timed(getattr(model, name), getattr(self, name)))

    @staticmethod
    def _timed(call: Callable[..., Any], into: list[float]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            start = time.perf_counter()
            result = call(*arguments)
            into.append(time.perf_counter() - start)
            return result

        return timed

    def stop(self) -> None:
        del self.model.forward, self.model.logits


def steps(llm: LLM, batch: int, context: int, tokens: int) -> dict[str, float]:
    """Milliseconds of a decode step of `batch`, or of a prefill of `context` where tokens is 1."""
    watch = Watch(llm.engine.core.runner.model)
    try:
        outputs = llm.generate([prompt(context, seed) for seed in range(batch)], greedy(tokens))
    finally:
        watch.stop()
    if tokens == 1:
        whole, layers = outputs[0].timeline.prefill, sum(watch.forward)
    else:
        times = outputs[0].timeline.token_times
        whole = median(later - earlier for earlier, later in pairwise(times[8:]))
        layers = median(watch.forward[8:])
    return {"whole": whole * 1e3, "layers": layers * 1e3, "logits": median(watch.logits) * 1e3}


def breakdown(whole: dict[str, float], parts: dict[str, dict[str, float]]) -> dict[str, float]:
    """Milliseconds by kind. With one row the layers, which are one native call, may take less than their products timed
    one by one: then they are one row of the result."""
    inside = {kind: figure["ms"] for kind, figure in parts.items() if kind != "head"}
    rest = whole["layers"] - sum(inside.values())
    return {
        **({**inside, "attention and between": rest} if rest > 0 else {"layers": whole["layers"]}),
        "head": whole["logits"],
        "outside the model": whole["whole"] - whole["layers"] - whole["logits"],
    }


def main() -> None:
    llm = LLM(DEFAULT, prefix_cache=False, speculate="off", max_requests=16)
    model = llm.engine.core.runner.model
    llm.generate([prompt(64, 0)], greedy(8))
    bandwidth, peaks = read_bandwidth() / 1e9, {name: value / 1e9 for name, value in dot_peaks().items()}
    result: dict[str, Any] = {"machine": describe(), "read_bandwidth_gb_s": bandwidth, "int8_dot_gop_s": peaks}
    cases = {
        "decode 1": (1, 64, 96),
        "decode 16": (16, 64, 64),
        "prefill 512": (1, 512, 1),
        "prefill 2048": (1, 2048, 1),
    }
    for name, (batch, context, tokens) in cases.items():
        prefill = tokens == 1
        whole = steps(llm, batch, context, tokens)
        parts = products(model, context if prefill else batch, 1 if prefill else batch, 3 if prefill else ROUNDS)
        result[name] = {"step": whole, "products": parts, "ms": breakdown(whole, parts)}
        print(f"{name}: {whole['whole']:.2f} ms", flush=True)
        for part, ms in result[name]["ms"].items():
            rate = parts.get(part)
            speed = f"  {rate['gb_s']:6.1f} GB/s {rate['gop_s']:8.0f} GOP/s" if rate else ""
            print(f"  {part:24} {ms:8.2f} ms {ms / whole['whole']:6.1%}{speed}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
