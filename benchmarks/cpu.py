"""Decode and prefill on this CPU beside llama.cpp on the same files, and beside what memory allows.

    python -m benchmarks.cpu --llama BUILD/bin [--q4 smollm2-q4_0.gguf] [--q4-pure smollm2-q4_0-pure.gguf]

BUILD is a native build of llama.cpp (the source package of llama-cpp-python carries it; GGML_NATIVE=ON, targets
llama-bench, llama-batched-bench, llama-quantize). The 4-bit files are made from the default model's file:

    llama-quantize --allow-requantize        smollm2-135m.gguf smollm2-q4_0.gguf Q4_0
    llama-quantize --allow-requantize --pure smollm2-135m.gguf smollm2-q4_0-pure.gguf Q4_0

Engines take turns within each round; medians over the rounds. llama.cpp has flash attention on. The last line is JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import subprocess
import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.machine import describe
from twostroke import LLM, SamplingParams
from twostroke.hardware import usable_cores
from twostroke.weights.catalog import DEFAULT, fetch

HERE = Path(__file__).parent
VOCAB = 49_000
THREADS = usable_cores()


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)


class Ours:
    """tokens/s of this engine through its Python face, bookkeeping and sampling included."""

    def __init__(self, path: Path, **settings: Any):
        self.llm = LLM(path, prefix_cache=False, **settings)

    def decode(self, batch: int, context: int, tokens: int) -> float:
        prompts = [prompt(context, seed) for seed in range(batch)]
        outputs = self.llm.generate(prompts, greedy(tokens))
        last_start = max(out.timeline.token_times[0] for out in outputs)  # from here on all of them decode
        first_end = min(out.timeline.token_times[-1] for out in outputs)
        written = sum(last_start < moment <= first_end for out in outputs for moment in out.timeline.token_times)
        return written / (first_end - last_start)

    def prefill(self, length: int) -> float:
        return length / self.llm.generate([prompt(length, length)], greedy(1))[0].timeline.prefill


class Llama:
    """llama.cpp's own benchmarks."""

    def __init__(self, folder: Path, model: Path):
        self.folder, self.model = folder, model

    def _run(self, tool: str, *arguments: str) -> list[dict[str, Any]]:
        command = [str(self.folder / tool), "-m", str(self.model), "-t", str(THREADS), "-fa", "1", *arguments]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return [json.loads(line) for line in output.splitlines() if line.startswith("{")]

    def decode(self, batch: int, context: int, tokens: int) -> float:
        if batch == 1:
            depth = ("-d", str(context)) if context > 64 else ()
            rows = self._run("llama-bench", "-p", "0", "-n", str(tokens), *depth, "-r", "1", "-o", "jsonl")
            return float(rows[0]["avg_ts"])
        sizes = (
            "-npp",
            str(context),
            "-ntg",
            str(tokens),
            "-npl",
            str(batch),
            "-c",
            str(batch * (context + tokens + 8)),
        )
        return float(self._run("llama-batched-bench", *sizes, "--output-format", "jsonl")[0]["speed_tg"])

    def prefill(self, length: int) -> float:
        rows = self._run(
            "llama-bench", "-p", str(length), "-n", "0", "-b", "2048", "-ub", "512", "-r", "1", "-o", "jsonl"
        )
        return float(rows[0]["avg_ts"])


MEASURES: dict[str, Any] = {
    "decode_1": lambda engine: engine.decode(1, 32, 96),
    "decode_16": lambda engine: engine.decode(16, 32, 64),
    "prefill_512": lambda engine: engine.prefill(512),
    "prefill_2048": lambda engine: engine.prefill(2048),
    "decode_1_context_4096": lambda engine: engine.decode(1, 4096, 32),
}


def read_bandwidth(seconds: float = 2.0) -> float:
    """GB/s of reading memory that no cache holds, all cores."""
    data = torch.ones(1 << 28)  # 1 GiB
    best, end = 0.0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        data.sum()
        best = max(best, data.nbytes / (time.perf_counter() - start) / 1e9)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama", type=Path, required=True, help="folder of llama.cpp's programs")
    parser.add_argument("--q4", type=Path, help="the default model requantized to Q4_0")
    parser.add_argument("--q4-pure", type=Path, help="the same, the head too")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--measures", nargs="*", default=list(MEASURES))
    args = parser.parse_args()
    shipped = fetch(DEFAULT)
    torch.set_num_threads(THREADS)
    bandwidth = read_bandwidth()
    engines: dict[str, Any] = {
        "twostroke, shipped file": Ours(shipped),
        "llama.cpp, shipped file": Llama(args.llama, shipped),
    }
    if args.q4:
        engines["llama.cpp, Q4_0"] = Llama(args.llama, args.q4)
    if args.q4_pure:
        engines["twostroke, Q4_0 pure"] = Ours(args.q4_pure)
        engines["llama.cpp, Q4_0 pure"] = Llama(args.llama, args.q4_pure)
    engines["twostroke, shipped file, KV int8"] = Ours(shipped, kv_dtype="int8")
    found: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in engines}
    for number in range(args.rounds):
        for measure in args.measures:
            for name, engine in engines.items():
                if "KV" in name and "context" not in measure:
                    continue
                found[name][measure].append(MEASURES[measure](engine))
                gc.collect()
        print(f"round {number + 1} of {args.rounds} done", flush=True)
    medians = {name: {m: median(values) for m, values in rows.items()} for name, rows in found.items()}
    table(medians, args.measures)
    result = {
        "machine": describe(),
        "command": "python -m benchmarks.cpu",
        "threads": THREADS,
        "rounds": args.rounds,
        "read_bandwidth_gb_s": bandwidth,
        "decode_1_floor_tokens_per_s": floors(bandwidth, engines),
        "tokens_per_s": medians,
        "ratios": ratios(medians, args.measures),
    }
    path = HERE / "results" / f"cpu-{result['machine']['machine']}.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


def floors(bandwidth: float, engines: dict[str, Any]) -> dict[str, float]:
    """Tokens/s if a step did nothing but read the weights once."""
    return {
        name: bandwidth * 1e9 / engine.llm.engine.core.runner.model.weight_bytes()
        for name, engine in engines.items()
        if isinstance(engine, Ours) and "KV" not in name
    }


def ratios(medians: dict[str, dict[str, float]], measures: list[str]) -> dict[str, float]:
    """Ours on the shipped file over the same file, and over the best of all peers; 4 bits throughout likewise."""
    found = {}
    for measure in measures:
        peers = {name: rows[measure] for name, rows in medians.items() if name.startswith("llama") and measure in rows}
        ours = medians["twostroke, shipped file"][measure]
        found[f"{measure}: shipped over the same file"] = ours / peers["llama.cpp, shipped file"]
        found[f"{measure}: shipped over the best peer"] = ours / max(peers.values())
        if "twostroke, Q4_0 pure" in medians:
            found[f"{measure}: 4 bits over the best peer"] = medians["twostroke, Q4_0 pure"][measure] / max(
                peers.values()
            )
    return found


def table(medians: dict[str, dict[str, float]], measures: list[str]) -> None:
    width = max(map(len, medians))
    print(" " * width, *(f"{measure:>22}" for measure in measures))
    for name, rows in medians.items():
        print(f"{name:<{width}}", *(f"{rows[m]:22.1f}" if m in rows else " " * 22 for m in measures))


if __name__ == "__main__":
    main()
