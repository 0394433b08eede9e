"""The fastest tiling of products of one row with narrow matrices: `python -m benchmarks.gpu_products [--json F]`.

First every tiling (`RowForm`, `Int4Form`) is compiled and checked against the product in double precision, in several
processes. Then a step of one stream of Llama-3.1-8B with fp8 and with int4 weights is captured and timed with one form
after the other for each matrix, and the fastest is kept; likewise for how much of the next matrix is prefetched. The
form that is fastest alone need not be the fastest within a step. `check I N` is what the processes run: every Nth form
from I on.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from functools import partial
from typing import Any, NamedTuple

import torch

from benchmarks.gpu_bench import Bench
from benchmarks.gpu_kernels import DEVICE, ceilings
from benchmarks.gpu_parts import measure_decode
from benchmarks.gpu_rig import Rig
from benchmarks.random_weights import LLAMA_8B
from twostroke.ops.cuda import backend as cuda
from twostroke.ops.cuda.kernels import one_row as one_row_
from twostroke.ops.cuda.kernels import one_row_int4 as int4_
from twostroke.ops.cuda.kernels.narrow_tiles import FP8, INT4
from twostroke.ops.cuda.kernels.one_row import RowForm, one_row
from twostroke.ops.cuda.kernels.one_row_int4 import Int4Form, one_row_int4
from twostroke.ops.cuda.kernels.quantized import as_float, to_fp8, to_int4
from twostroke.ops.cuda.kernels.rows import ACTIVATIONS, NORM, NOTHING

SILU = ACTIVATIONS["silu"]
KINDS = {FP8: ("fp8", to_fp8), INT4: ("int4", to_int4)}
# outputs, inputs, what happens to x before, what happens after, whether the result is added
SHAPES = {
    "qkv": (6144, 4096, NORM, NOTHING, False), "output": (4096, 4096, NOTHING, NOTHING, True),
    "gate_up": (28672, 4096, NORM, SILU, False), "down": (4096, 14336, NOTHING, NOTHING, True),
    "head": (128256, 4096, NORM, NOTHING, False),
}  # fmt: skip
WIDE = {
    FP8: [
        RowForm(8, 2, 1, 2),
        RowForm(8, 1, 2, 2),
        RowForm(8, 4, 1, 1),
        RowForm(4, 2, 1, 2),
        RowForm(16, 4, 1, 1),
        RowForm(4, 2, 1, 3),
    ],
    INT4: [
        Int4Form(8, 4, 2),
        Int4Form(8, 2, 2),
        Int4Form(8, 2, 3),
        Int4Form(4, 4, 4),
        Int4Form(4, 2, 8),
        Int4Form(16, 2, 1),
    ],
}
LONG = {
    FP8: [RowForm(16, 1, 1, 1), RowForm(8, 1, 1, 1), RowForm(8, 1, 2, 1), RowForm(8, 2, 1, 1)],
    INT4: [Int4Form(8, 2, 3), Int4Form(8, 4, 2), Int4Form(16, 4, 1), Int4Form(4, 4, 4), Int4Form(16, 2, 1)],
}
GATED = [Int4Form(4, 8, 2), Int4Form(4, 8, 4), Int4Form(8, 4, 2), Int4Form(8, 4, 1), Int4Form(16, 2, 1)]  # of int4
FETCHES = (0, 1, 2, 4, 6, 8, 12)
NEXT = {
    "qkv": "output",
    "output": "gate_up",
    "gate_up": "down",
    "down": "qkv",
    "head": "qkv",
}  # the head is multiplied once a step
LIMIT = 4e-3  # bfloat16 results lie 1.7e-3 from the true ones by rounding alone


Form = RowForm | Int4Form


class Variant(NamedTuple):
    fmt: int
    shape: str
    form: Form

    @property
    def name(self) -> str:
        return f"{KINDS[self.fmt][0]} {self.shape} " + " ".join(f"{k} {v}" for k, v in self.form._asdict().items())


def shapes_of(fmt: int) -> list[str]:
    return [shape for shape in SHAPES if fmt != INT4 or shape != "head"]  # which has eight bits


def forms_of(shape: str, fmt: int) -> list[Form]:
    if fmt == INT4 and shape == "gate_up":
        return list(GATED)
    return list((LONG if shape == "down" else WIDE)[fmt])


def all_variants() -> list[Variant]:
    return [Variant(fmt, shape, form) for fmt in KINDS for shape in shapes_of(fmt) for form in forms_of(shape, fmt)]


def use(form: Form, fetches: int | None = None) -> None:
    """Products of one row take this form from now on."""
    module = int4_ if isinstance(form, Int4Form) else one_row_
    module.form_for = lambda *how: form  # type: ignore[attr-defined]
    if fetches is not None:
        module.FETCHES = fetches  # type: ignore[attr-defined]


# ---- correctness -----------------------------------------------------------------------------------------------------


def error(variant: Variant) -> float:
    """Relative distance from the product in double precision, for few outputs; each program has several tiles."""
    one_row_.processors = int4_.processors = lambda device: 3  # type: ignore[assignment]
    use(variant.form)
    _, k, before, gate, add = SHAPES[variant.shape]
    generator = torch.Generator(DEVICE).manual_seed(k)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, device=DEVICE).to(torch.bfloat16)

    weight, x, norm = KINDS[variant.fmt][1](normal(304, k), None), normal(1, k), normal(k)
    out = normal(1, 152 if gate else 304)
    true = x.double()
    if before == NORM:
        true = true * torch.rsqrt(true.square().mean(1, keepdim=True) + 1e-5) * norm.double()
    expected = true @ as_float(weight, torch.float32).double().t()
    if gate:
        expected = torch.nn.functional.silu(expected[:, :152]) * expected[:, 152:]
    expected += out.double() if add else 0.0
    run = one_row_int4 if variant.fmt == INT4 else partial(one_row, fmt=variant.fmt)
    found = run(
        x, weight.codes, weight.scales, None, out, before=before, norm=norm, eps=1e-5, add=add, gate=gate,
        following=weight.codes,
    ).double()  # fmt: skip
    return float((found - expected).norm() / expected.norm())


def check(first: int, step: int) -> None:
    for variant in all_variants()[first::step]:
        try:
            found: object = error(variant)
        except Exception as trouble:
            found = f"{type(trouble).__name__}: {str(trouble)[:200]}"
        print("checked", json.dumps([variant.name, found]), flush=True)


def run_checks(jobs: int) -> set[str]:
    """Names of the correct variants. Compilation takes longest, so several processes share it."""
    command = [sys.executable, "-m", "benchmarks.gpu_products", "check"]
    running = [
        subprocess.Popen([*command, str(i), str(jobs)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        for i in range(jobs)
    ]
    text = "".join(process.communicate()[0] for process in running)
    found = dict(json.loads(line[8:]) for line in text.splitlines() if line.startswith("checked"))
    right = {name for name, value in found.items() if isinstance(value, float) and value < LIMIT}
    for name in found.keys() - right:
        print(f"WRONG  {name:50s} {found[name]}", flush=True)
    return right


# ---- speed -----------------------------------------------------------------------------------------------------------


def step_ms(rig: Rig) -> float:
    """A step of one stream, captured again and replayed."""
    runner = rig.runner
    runner.shapes.clear()
    runner.captures, runner.pool = 0, torch.cuda.graph_pool_handle()
    rig.ask(rig.prompt(128), 24)
    rig.run()
    graph: Any = max((e for e in runner.shapes.values() if e.graph is not None), key=lambda e: e.occurred).graph
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    best = float("inf")
    with torch.cuda.stream(runner.stream):
        for _ in range(3):
            began.record()
            for _ in range(30):
                graph.replay()
            ended.record()
            ended.synchronize()
            best = min(best, began.elapsed_time(ended) / 30)
    return best


class Tuning:
    """Forms and prefetched pieces by matrix, and the time of a step with them."""

    def __init__(self, fmt: int, right: set[str], found: dict[str, float]):
        self.fmt, self.kind = fmt, KINDS[fmt][0]
        self.log: dict[str, float] = {}
        self.shapes = shapes_of(fmt)
        self.forms = {s: [f for f in forms_of(s, fmt) if Variant(fmt, s, f).name in right] for s in self.shapes}
        self.form = {s: self.forms[s][0] for s in self.shapes}
        self.pieces = {s: one_row_.FETCHES if SHAPES[s][0] > SHAPES[s][1] else 0 for s in SHAPES}
        setattr(cuda, "one_row_int4" if fmt == INT4 else "one_row", self.product)
        self.bench = Bench(ceilings=found)
        self.following: dict[int, torch.Tensor] = {}  # every matrix's, by the address of the one before
        self.rig = self.bench.own(LLAMA_8B, quantize=self.kind, max_model_len=16384)
        codes = [product.weight.codes for product in self.rig.model.products()]
        self.following = {a.data_ptr(): b for a, b in zip(codes, [*codes[1:], codes[0]], strict=True)}

    def product(self, x: torch.Tensor, codes: torch.Tensor, *rest: Any, following: Any = None, **how: Any) -> Any:
        wide = 2 if self.fmt == INT4 else 1
        names = {(n, k // wide): name for name, (n, k, *_) in SHAPES.items()}
        name = names[codes.shape[0], codes.shape[1]]
        use(self.form[name], self.pieces[NEXT[name]])
        run = one_row_int4 if self.fmt == INT4 else one_row
        return run(x, codes, *rest, following=self.following.get(codes.data_ptr()), **how)

    def measure(self, name: str) -> float:
        self.log[name] = ms = step_ms(self.rig)
        print(f"{self.kind} {name:40s} {ms:.4f} ms", flush=True)
        return ms

    def best(self, chosen: dict[str, Any], shape: str, candidates: list[Any], best: float) -> float:
        """Try each candidate for one matrix; keep the fastest."""
        kept = chosen[shape]
        for candidate in candidates:
            if candidate == kept:
                continue
            chosen[shape] = candidate
            ms = self.measure(f"{shape} {tuple(candidate) if isinstance(candidate, tuple) else candidate}")
            if ms < best:
                best, kept = ms, candidate
        chosen[shape] = kept
        return best

    def run(self) -> dict[str, object]:
        best = self.measure("as it begins")
        for shape in reversed(self.shapes):
            best = self.best(self.form, shape, self.forms[shape], best)
        for shape in self.shapes:
            best = self.best(self.pieces, shape, list(FETCHES), best)
        self.rig.runner.shapes.clear()
        self.rig.runner.pool = torch.cuda.graph_pool_handle()
        measure_decode(self.bench, self.rig, f"{self.kind}_decode1")
        forms = {shape: tuple(form) for shape, form in self.form.items()}
        return {"ms": self.log, "forms": forms, "pieces": self.pieces, "step": self.bench.rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("check", nargs="*", help="check I N")
    parser.add_argument("--jobs", type=int, default=min(14, os.cpu_count() or 1))
    parser.add_argument("--json")
    options = parser.parse_args()
    if options.check:
        return check(int(options.check[1]), int(options.check[2]))
    began = time.perf_counter()
    right = run_checks(options.jobs)
    print(f"[{len(right)} of {len(all_variants())} forms are right, {time.perf_counter() - began:.0f} s]", flush=True)
    found = ceilings()
    results: dict[str, object] = {"ceilings": found}
    for fmt in KINDS:
        results[KINDS[fmt][0]] = Tuning(fmt, right, found).run()
        torch.cuda.empty_cache()
        if options.json:
            with open(options.json, "w") as file:
                file.write(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
