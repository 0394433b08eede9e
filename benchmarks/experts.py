"""Mixtures of experts on this CPU, beside native llama.cpp on the same files.

    python -m benchmarks.experts --llama BUILD/bin --scratch FOLDER

Decode, prefill and eight streams of a file with OLMoE-1B-7B's shape, and decode after 4,096 tokens of one with
DeepSeek-V2-Lite's shape, cut to 8 layers (latent attention). Codes are random (benchmarks/expert_files.py): 6.3 GB,
written into FOLDER on first use. BUILD is a native build of llama.cpp (see benchmarks/cpu.py). Engines take turns
within each round; medians over the rounds. About 3 minutes for one round on two cores. Results:
benchmarks/results/experts-<machine>.json; the last line is the JSON.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks.cpu_engines import Engine, Llama, Ours
from benchmarks.expert_files import RandomFile, deepseek_v2_lite, olmoe, written
from benchmarks.machine import save


class Measure(NamedTuple):
    file: Callable[[Path], RandomFile]
    run: Callable[[Engine], float]  # tokens/s
    limit: float  # least ratio: twostroke over llama.cpp


MEASURES = {
    "decode_1": Measure(olmoe, lambda engine: engine.decode(1, 32, 48, repeats=2), 1.3),
    "prefill_512": Measure(olmoe, lambda engine: engine.prefill(512, repeats=2), 1.3),
    "decode_8": Measure(olmoe, lambda engine: engine.decode(8, 32, 24), 1.5),
    "latent_decode_1_at_4096": Measure(deepseek_v2_lite, lambda engine: engine.decode(1, 4096, 48), 1.3),
}


def measure(file: Path, names: list[str], llama: Path, rounds: int) -> dict[str, dict[str, list[float]]]:
    engines: dict[str, Engine] = {"twostroke": Ours(file, max_model_len=4224), "llama.cpp": Llama(llama, file)}
    found: dict[str, dict[str, list[float]]] = {name: {engine: [] for engine in engines} for name in names}
    for _ in range(rounds):
        for name in names:
            for engine, runner in engines.items():
                found[name][engine].append(MEASURES[name].run(runner))
                print(f"{name:24} {engine:10} {found[name][engine][-1]:8.2f} tokens/s", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama", type=Path, required=True, help="folder with llama-bench and llama-batched-bench")
    parser.add_argument("--scratch", type=Path, required=True, help="folder for the random files")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--measures", nargs="+", choices=list(MEASURES), default=list(MEASURES))
    parser.add_argument("--no-result", action="store_true", help="print figures, write no result file")
    args = parser.parse_args()
    found: dict[str, dict[str, list[float]]] = {}
    for make in (olmoe, deepseek_v2_lite):
        names = [name for name in args.measures if MEASURES[name].file is make]
        if names:
            found |= measure(written(args.scratch, make), names, args.llama, args.rounds)
            gc.collect()
    medians = {name: {engine: median(values) for engine, values in rows.items()} for name, rows in found.items()}
    ratios = {name: rows["twostroke"] / rows["llama.cpp"] for name, rows in medians.items()}
    limits = {name: MEASURES[name].limit for name in found}
    for name, ratio in ratios.items():
        print(f"{name:24} {ratio:.2f} x, at least {limits[name]} wanted{'' if ratio >= limits[name] else ': missed'}")
    if not args.no_result:
        command = f"experts --llama BUILD/bin --scratch FOLDER --rounds {args.rounds}"
        save("experts", command, {"tokens_per_s": medians, "ratio": ratios, "limits": limits, "rounds": found})


if __name__ == "__main__":
    main()
