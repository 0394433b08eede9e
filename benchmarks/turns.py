"""Two checkouts of this project in turns on one machine: is the new one as fast as the old one?

    git worktree add ../before COMMIT
    python -m benchmarks.turns ../before               # this CPU, the default model: about four minutes a round
    python -m benchmarks.turns ../before --gpu         # a GPU, the shape of an 8B model: about four minutes a round

Each turn is a new process in one checkout, with that checkout's own benchmarks (`cpu_engines`, `cpu_http`, `overhead`
and `gpu`), so both must have them. Which checkout is first changes from round to round. A ratio above 1 says that the
new one is better: a higher rate, or a shorter time. The median over the rounds counts. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.machine import save

HERE = Path(__file__).parent.parent
LEAST = 0.98  # ratio
Figures = dict[str, float]

ON_A_CPU = """
import json
from benchmarks.cpu_engines import Ours
from benchmarks.cpu_http import served
from benchmarks.overhead import plan_and_commit, start_to_first_token
from twostroke.weights.catalog import DEFAULT, fetch

engine = Ours(fetch(DEFAULT))
found = {
    "decode_1": engine.decode(1, 32, 96, repeats=3),
    "decode_16": engine.decode(16, 32, 64, repeats=2),
    "prefill_512": engine.prefill(512, repeats=3),
    "prefill_2048": engine.prefill(2048, repeats=2),
}
if hasattr(engine.llm, "close"):
    engine.llm.close()
found["served_http_16"] = served("twostroke", None)["output_tokens_per_s"]
found["plan_and_commit_us"] = plan_and_commit()
found["start_to_first_token_s"] = start_to_first_token(7)["start_to_first_token_s"]
print(json.dumps(found))
"""
GPU_PARTS = ("start", "decode1", "ttft", "offline256", "offline64", "gap", "small")
TIMES = ("s", "ms", "us", "ms/step")  # units; all others are rates


def cpu_turn(tree: Path) -> Figures:
    return dict(json.loads(last_line([sys.executable, "-c", ON_A_CPU], tree)))


def gpu_turn(tree: Path) -> Figures:
    """Each row's name ends with its unit."""
    command = [sys.executable, "-m", "benchmarks.gpu", *GPU_PARTS, "--minutes", "20"]
    rows: dict[str, dict[str, Any]] = json.loads(last_line(command, tree))["rows"]
    failed = {name: row["error"] for name, row in rows.items() if "error" in row}
    if failed:
        raise SystemExit(f"{tree}: {failed}")
    return {f"{name}_{row['unit']}": float(row["value"]) for name, row in rows.items()}


def last_line(command: list[str], tree: Path) -> str:
    done = subprocess.run(
        command, cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)}, stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        raise SystemExit(f"a turn in {tree} failed: its message is above")
    return done.stdout.splitlines()[-1]


def ratio(name: str, old: float, new: float) -> float:
    return old / new if name.endswith(tuple(f"_{unit}" for unit in TIMES)) else new / old


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="the other checkout")
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="instead of a file under results/")
    args = parser.parse_args()
    turn, trees = (gpu_turn if args.gpu else cpu_turn), {"before": args.before.resolve(), "now": HERE}
    rounds: dict[str, list[Figures]] = {name: [] for name in trees}
    for number in range(args.rounds):
        for name in list(trees)[:: 1 if number % 2 else -1]:
            rounds[name].append(turn(trees[name]))
            print(f"round {number + 1} of {args.rounds}, {name}: {rounds[name][-1]}", flush=True)
    found: dict[str, dict[str, Any]] = {}
    for row in rounds["now"][0]:
        old, new = ([figures[row] for figures in rounds[name]] for name in trees)
        each = [ratio(row, one, other) for one, other in zip(old, new, strict=True)]
        found[row] = {"before": old, "now": new, "ratios": each, "ratio": median(each), "holds": median(each) >= LEAST}
        print(f"{row:28} {median(old):10.2f} {median(new):10.2f}   {median(each):.3f}", flush=True)
    commits = {name: commit(tree) for name, tree in trees.items()}
    kind = "turns-gpu" if args.gpu else "turns"
    save(kind, "turns" + (" --gpu" if args.gpu else ""), {"commits": commits, "rows": found}, args.json)


def commit(tree: Path) -> str:
    """Empty where the checkout was copied without its history."""
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=tree, capture_output=True, text=True)
    return done.stdout.strip()


if __name__ == "__main__":
    main()
