"""Decode, prefill, long context, serving and memory on this CPU, beside other engines and the hardware's limits.

    python -m benchmarks.cpu --llama BUILD/bin --q4 smol-q4_0.gguf --q4-pure smol-q4_0-pure.gguf \\
        --onnx smol-ort-int4 --onnx-python PEER/bin/python --scratch FOLDER

About 22 minutes for 5 rounds on two cores; `--parts` chooses among default, context, http and 1b. The machine must be
quiet: llama.cpp's threads spin, so another program slows it far more than the other engines.

BUILD is a native build of llama.cpp (the source package of llama-cpp-python carries it; GGML_NATIVE=ON, targets
llama-bench, llama-batched-bench, llama-server, llama-quantize). The other files are made once, from the default model:

    llama-quantize --allow-requantize        smollm2-135m.gguf smol-q4_0.gguf Q4_0
    llama-quantize --allow-requantize --pure smollm2-135m.gguf smol-q4_0-pure.gguf Q4_0
    python -m benchmarks.peers smol-float                        # the dequantized weights as a transformers folder
    python -m onnxruntime_genai.models.builder -i smol-float -o smol-ort-int4 -p int4 -e cpu \\
        --extra_options int4_accuracy_level=4 int4_block_size=32  # pip: onnxruntime-genai onnx onnx_ir

The 1B-class files are written into --scratch on first use (2 GB). Engines take turns within each round; medians over
the rounds. Results: benchmarks/results/cpu-<machine>.json and .png; the last line is the JSON.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.cpu_engines import THREADS, Engine, Llama, Onnx, Ours, Transformers, decode_in_turns
from benchmarks.cpu_http import served
from benchmarks.cpu_limits import dot_peaks, floors, read_bandwidth
from benchmarks.cpu_plot import plot
from benchmarks.cpu_random import write_random
from benchmarks.machine import describe, save
from twostroke.weights.catalog import DEFAULT, fetch

Measurement = Callable[[], dict[str, float]]  # engine -> tokens/s
Rounds = dict[str, dict[str, list[float]]]  # measure -> engine -> tokens/s of each round
Medians = dict[str, dict[str, float]]  # measure -> engine -> tokens/s
MEASURES: dict[str, Callable[[Engine], float]] = {
    "decode_1": lambda engine: engine.decode(1, 32, 96, repeats=3),
    "decode_16": lambda engine: engine.decode(16, 32, 64),
    "prefill_512": lambda engine: engine.prefill(512, repeats=2),
    "prefill_2048": lambda engine: engine.prefill(2048),
}
DEEP = "decode_1_context_4096"
SERVED = "served_http_16"
LIMITS = {  # least ratios: twostroke over the best peer, and int8 K/V over float16
    "decode_1": 1.15, "decode_1, 4 bits": 1.3, "decode_16": 1.25, "prefill_512": 1.2, "prefill_2048": 1.25, DEEP: 1.3,
    f"{DEEP}, KV int8 over float16": 1.0, SERVED: 1.3,
}  # fmt: skip


class Suite:
    """The measurements of one round, and the engines that stay loaded for them."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.shipped = args, fetch(DEFAULT)
        self.calls: dict[str, list[Measurement]] = defaultdict(list)
        self.ours: dict[str, Ours] = {}
        self.memory: dict[str, list[float]] = defaultdict(list)
        for part in args.parts:
            {"default": self.default, "context": self.context, "http": self.http, "1b": self.billion}[part]()

    def our(self, name: str, path: Path, **settings: Any) -> Ours:
        if name not in self.ours:
            self.ours[name] = Ours(path, **settings)
        return self.ours[name]

    def add(self, measure: str, name: str, engine: Engine, work: Callable[[Engine], float]) -> None:
        self.calls[measure].append(lambda: {name: work(engine)})

    def default(self) -> None:
        args = self.args
        engines: dict[str, Engine] = {
            "twostroke, shipped file": self.our("twostroke, shipped file", self.shipped),
            "llama.cpp, shipped file": Llama(args.llama, self.shipped),
        }
        if args.q4:
            engines["twostroke, Q4_0"] = self.our("twostroke, Q4_0", args.q4)
            engines["llama.cpp, Q4_0"] = Llama(args.llama, args.q4)
        if args.q4_pure:
            engines["twostroke, Q4_0 pure"] = self.our("twostroke, Q4_0 pure", args.q4_pure)
            engines["llama.cpp, Q4_0 pure"] = Llama(args.llama, args.q4_pure)
        if args.onnx:
            engines["ONNX Runtime GenAI int4"] = Onnx(args.onnx_python, args.onnx)
        engines["transformers, float32"] = Transformers(self.shipped)
        for measure, work in MEASURES.items():
            for name, engine in engines.items():
                if measure != "prefill_2048" or name != "llama.cpp, shipped file":  # slow
                    self.add(measure, name, engine, work)

    def context(self) -> None:
        """The peers on their fastest file, llama.cpp with and without flash attention."""
        args = self.args
        formats = {
            "twostroke, shipped file": self.our("twostroke, shipped file", self.shipped),
            "twostroke, shipped file, KV float16": self.our("KV float16", self.shipped, kv_dtype="float16"),
            "twostroke, shipped file, KV int4": self.our("KV int4", self.shipped, kv_dtype="int4"),
        }
        self.calls[DEEP].append(lambda: decode_in_turns(formats, 4096))
        engines: dict[str, Engine] = {}
        best = args.q4_pure or args.q4 or self.shipped
        for flash in (True, False):
            engines[f"llama.cpp, {best.stem}, flash attention {'on' if flash else 'off'}"] = Llama(
                args.llama, best, flash
            )
        if args.onnx:
            engines["ONNX Runtime GenAI int4"] = Onnx(args.onnx_python, args.onnx)
        for name, engine in engines.items():
            self.add(DEEP, name, engine, lambda engine: engine.decode(1, 4096, 32))

    def http(self) -> None:
        def call(name: str) -> dict[str, float]:
            found = served(name, self.args.llama)
            self.memory[name].append(found["peak_memory_mb"])
            return {name: found["output_tokens_per_s"]}

        for name in ("twostroke", "llama.cpp"):
            self.calls[SERVED].append(lambda name=name: call(name))  # type: ignore[misc]

    def billion(self) -> None:
        for kind in ("q4_0", "q8_0"):
            path = write_random(self.args.scratch / f"random-1b-{kind}.gguf", kind)
            for name, engine in (
                ("twostroke", self.our(f"1b {kind}", path, max_model_len=1024, max_requests=4)),
                ("llama.cpp", Llama(self.args.llama, path)),
            ):
                self.add(f"1b_{kind}_decode_1", name, engine, lambda engine: engine.decode(1, 32, 24))
                self.add(f"1b_{kind}_prefill_512", name, engine, lambda engine: engine.prefill(512))


def run(suite: Suite, rounds: int) -> Rounds:
    found: Rounds = {measure: defaultdict(list) for measure in suite.calls}
    began = time.perf_counter()
    for number in range(rounds):
        for measure, calls in suite.calls.items():
            for call in calls:
                for name, value in call().items():
                    found[measure][name].append(value)
                    minutes = (time.perf_counter() - began) / 60
                    print(
                        f"{minutes:5.1f} min  round {number + 1}/{rounds}  {measure:22} {name:44} {value:8.1f}",
                        flush=True,
                    )
                gc.collect()
    return found


def ratios(medians: Medians, rounds: Rounds) -> dict[str, float]:
    """twostroke over the best peer; also over llama.cpp on the same file, and with 4-bit weights throughout. KV formats
    are compared within each round, in which they took turns."""
    found = {}
    for measure, rows in medians.items():
        peers = {name: value for name, value in rows.items() if not name.startswith("twostroke")}
        mine = {name: value for name, value in rows.items() if name.startswith("twostroke")}
        if not peers or not mine:
            continue
        first = next(iter(mine.values()))
        found[measure] = first / max(peers.values())
        if "llama.cpp, shipped file" in peers:
            found[f"{measure}, the same file"] = first / peers["llama.cpp, shipped file"]
        if "twostroke, Q4_0 pure" in mine:
            found[f"{measure}, 4 bits"] = mine["twostroke, Q4_0 pure"] / max(peers.values())
        if "twostroke, shipped file, KV float16" in mine:
            each = zip(
                *(rounds[measure]["twostroke, shipped file" + suffix] for suffix in ("", ", KV float16")), strict=True
            )
            found[f"{measure}, KV int8 over float16"] = median(int8 / half for int8, half in each)
    return found


def limits(suite: Suite) -> dict[str, Any]:
    bandwidth, peaks = read_bandwidth(), dot_peaks()
    peak = max(peaks.values())
    named = {name: engine.llm for name, engine in suite.ours.items() if "KV" not in name}
    return {
        "read_bandwidth_gb_s": bandwidth / 1e9,
        "int8_dot_gop_s": {name: value / 1e9 for name, value in peaks.items()},
        "floor_tokens_per_s": {
            name: floors(llm.arch, llm.engine.core.runner.model.weight_bytes(), bandwidth, peak)
            for name, llm in named.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama", type=Path, required=True, help="folder of llama.cpp's programs")
    parser.add_argument("--q4", type=Path, help="the default model requantized to Q4_0")
    parser.add_argument("--q4-pure", type=Path, help="the same, the head too")
    parser.add_argument("--onnx", type=Path, help="folder written by ONNX Runtime GenAI's model builder")
    parser.add_argument("--onnx-python", type=Path, default=Path("python"), help="a Python that has onnxruntime-genai")
    parser.add_argument("--scratch", type=Path, default=Path("."), help="where the random 1B-class files go")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--parts", nargs="*", default=["default", "context", "http", "1b"], choices=["default", "context", "http", "1b"]
    )
    parser.add_argument("--json", type=Path, help="instead of a file under results/; the plot is beside it")
    args = parser.parse_args()
    torch.set_num_threads(THREADS)
    suite = Suite(args)
    machine = limits(suite)
    rounds = run(suite, args.rounds)
    medians = {measure: {name: median(values) for name, values in rows.items()} for measure, rows in rounds.items()}
    reached = ratios(medians, rounds)
    memory = {name: median(values) for name, values in suite.memory.items()}
    result = {
        "threads": THREADS,
        "rounds": args.rounds,
        **machine,
        "tokens_per_s": medians,
        "tokens_per_s_each_round": rounds,
        "peak_memory_mb": memory,
        "ratios": reached,
        "within": {name: reached[name] >= limit for name, limit in LIMITS.items() if name in reached}
        | ({"peak_memory": memory["twostroke"] <= memory["llama.cpp"] + 300} if memory else {}),
    }
    for name, ratio in reached.items():
        print(f"{name:44} {ratio:6.2f} x" + (f"   must {LIMITS[name]}" if name in LIMITS else ""))
    path = save("cpu", "cpu", result, args.json)
    plot({"machine": describe(), **result}, path.with_suffix(".png"))


if __name__ == "__main__":
    main()
