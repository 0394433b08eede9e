"""Two checkouts of this project in turns on one machine: is the new one as fast as the old one?

    git worktree add ../before COMMIT
    python -m benchmarks.turns ../before               # this CPU, the default model: about a minute a round
    python -m benchmarks.turns ../before --gpu         # a GPU, the shape of an 8B model: about three minutes a round

Each checkout is measured with its own benchmarks (`cpu_engines`, `cpu_http`, `overhead` and `gpu`), so both must have
them. On a CPU there is one process for each, and they take turns row by row, since a machine that others use too drifts
from minute to minute. On a GPU each turn is a new process. Which checkout is first changes from round to round. A ratio
above 1 says that the new one is better: a higher rate, or a shorter time. The median over the rounds counts. The last
line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.machine import save

HERE = Path(__file__).parent.parent
LEAST = 0.98  # ratio
Figures = dict[str, float]
Trees = dict[str, Path]  # "before" and "now"
Rounds = dict[str, list[Figures]]

ROWS_ON_A_CPU = (
    "decode_1", "decode_16", "prefill_512", "prefill_2048", "served_http_16", "plan_and_commit_us",
    "start_to_first_token_s",
)  # fmt: skip
ON_A_CPU = """
import json, sys
from benchmarks.cpu_engines import Ours
from benchmarks.cpu_http import served
from benchmarks.overhead import plan_and_commit, start_to_first_token
from twostroke.weights.catalog import DEFAULT, fetch

engine = Ours(fetch(DEFAULT))
rows = {
    "decode_1": lambda: engine.decode(1, 32, 96),
    "decode_16": lambda: engine.decode(16, 32, 64),
    "prefill_512": lambda: engine.prefill(512),
    "prefill_2048": lambda: engine.prefill(2048),
    "served_http_16": lambda: served("twostroke", None)["output_tokens_per_s"],
    "plan_and_commit_us": plan_and_commit,
    "start_to_first_token_s": lambda: start_to_first_token(3)["start_to_first_token_s"],
}
for line in sys.stdin:
    print("=" + json.dumps(rows[line.strip()]()), flush=True)
"""
GPU_PARTS = ("start", "decode1", "ttft", "offline256", "offline64", "gap", "small")
TIMES = ("s", "ms", "us", "ms/step")  # units; all others are rates


class OnACpu:
    """A process of one checkout, which measures the row it is asked for."""

    def __init__(self, tree: Path):
        self.tree = tree
        self.process = subprocess.Popen(
            [sys.executable, "-c", ON_A_CPU], cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def measure(self, row: str) -> float:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(row + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("="):
                return float(line[1:])
        raise SystemExit(f"{row} failed in {self.tree}: its message is above")


def cpu_rounds(trees: Trees, count: int, rows: Sequence[str]) -> Rounds:
    children = {name: OnACpu(tree) for name, tree in trees.items()}
    for row in rows:
        for child in children.values():
            child.measure(row)  # what the first time makes
    rounds: Rounds = {name: [{} for _ in range(count)] for name in trees}
    for number in range(count):
        for row in rows:
            for name in turned(trees, number):
                rounds[name][number][row] = children[name].measure(row)
        print(f"round {number + 1} of {count}: {[rounds[name][number] for name in trees]}", flush=True)
    for child in children.values():
        child.process.kill()
    return rounds


def gpu_rounds(trees: Trees, count: int) -> Rounds:
    rounds: Rounds = {name: [] for name in trees}
    for number in range(count):
        for name in turned(trees, number):
            rounds[name].append(gpu_turn(trees[name]))
            print(f"round {number + 1} of {count}, {name}: {rounds[name][-1]}", flush=True)
    return rounds


def turned(trees: Trees, number: int) -> list[str]:
    return list(trees)[:: 1 if number % 2 else -1]


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
    parser.add_argument("--rows", nargs="+", choices=ROWS_ON_A_CPU, help="on a CPU: only these")
    parser.add_argument("--json", type=Path, help="instead of a file under results/")
    args = parser.parse_args()
    if args.gpu and args.rows:
        parser.error("--rows are those on a CPU: leave out --gpu or --rows")
    trees = {"before": args.before.resolve(), "now": HERE}
    rounds = gpu_rounds(trees, args.rounds) if args.gpu else cpu_rounds(trees, args.rounds, args.rows or ROWS_ON_A_CPU)
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
