"""Long prompts beside streams on two cores: one engine, two replicas, and a prefill and a decode worker.

    python -m benchmarks.pools one | replicas | pools | apart     [--rate R] [--requests N]

Each deployment has two threads in all. The load is the Azure conversation trace, its lengths divided by four. The
router and this client run on the same cores. One deployment for each run: the results are kept in one file.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
import urllib.request
from itertools import pairwise
from typing import Any

from benchmarks.machine import RESULTS, save
from twostroke.bench.client import Target, measure
from twostroke.bench.workload import trace_load

START = [sys.executable, "-c", "from twostroke.cli.main import main; main()"]
MODEL = "smollm2-135m"
SHAPES = {
    "one": ["serve", MODEL, "-s", "threads=2"],
    "replicas": ["cluster", MODEL, "--workers", "2", "-s", "threads=1"],
    "pools": ["cluster", MODEL, "--prefill", "1", "--decode", "1", "-s", "threads=1"],
    "apart": ["cluster", MODEL, "--prefill", "1", "--decode", "1", "--route", "apart", "-s", "threads=1"],
}
TTFT, GAP = 2.0, 0.25  # seconds: a request that keeps both counts as good


def started(arguments: list[str]) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen(
        [*START, *arguments, "--port", "0", "-s", "speculate=off"], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    for line in process.stderr:
        found = re.search(r"on (http://\S+)/v1$", line)
        if found:
            return process, found[1]
    raise SystemExit("it did not start")


def at(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0


def run(shape: str, rate: float, requests: int) -> dict[str, Any]:
    process, url = started(SHAPES[shape])
    try:
        load = trace_load("azure-conv", requests, rate, 4.0, 1500)
        records = measure(Target(url), load).records
        transfers = None
        if shape in ("pools", "apart"):
            with urllib.request.urlopen(f"{url}/twostroke/workers") as answer:
                transfers = json.load(answer)["transfers"]
    finally:
        process.terminate()
        process.wait(30)
    served = [one for one in records if len(one.pieces) > 1]
    ttft = [one.pieces[0] - one.arrival for one in served]
    gaps = [[later - earlier for earlier, later in pairwise(one.pieces)] for one in served]
    every = [gap for own in gaps for gap in own]
    good = sum(first <= TTFT and max(own) <= GAP for first, own in zip(ttft, gaps, strict=True))
    return {
        "rate": rate, "requests": requests, "answered": len(served), "good": good / len(records),
        "ttft_p50": at(ttft, 0.5), "ttft_p95": at(ttft, 0.95),
        "gap_p50": at(every, 0.5), "gap_p99": at(every, 0.99), "gap_longest": max(every, default=0.0),
        "transfers": transfers,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--rate", type=float, default=0.6)
    parser.add_argument("--requests", type=int, default=30)
    given = parser.parse_args()
    path = RESULTS / f"pools-{platform.machine()}.json"
    kept = json.loads(path.read_text()).get("shapes", {}) if path.exists() else {}
    kept[f"{given.shape} at {given.rate:g}/s"] = run(given.shape, given.rate, given.requests)
    save("pools", "pools SHAPE", {"model": MODEL, "good_is": {"ttft": TTFT, "gap": GAP}, "shapes": kept})


if __name__ == "__main__":
    main()
