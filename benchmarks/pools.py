"""Long prompts beside streams on two cores: one engine, two replicas, and a prefill and a decode worker.

    python -m benchmarks.pools one | mixed | chunked | pools | apart     [--rate R] [--requests N]

    one      one engine with two threads, for comparison
    mixed    two replicas, each prompt in one step
    chunked  two replicas, prompts in chunks between the tokens of streams: the default
    pools    a prefill and a decode worker; the router chooses by the expected time
    apart    the same; the prefill worker computes every prompt

Each deployment has two threads in all, and each worker's engine is pinned to a core of its own. The load is the Azure
conversation trace, its lengths divided by four. The router and this client run on the same cores. One deployment for
each run: the results are kept in one file.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import urllib.request
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.machine import RESULTS, save
from twostroke.bench.client import Target, measure
from twostroke.bench.workload import trace_load

START = [sys.executable, "-c", "from twostroke.cli.main import main; main()"]
MODEL = "smollm2-135m"
WHOLE = ["-s", "chunked_prefill=false", "-s", "max_batch_tokens=2048"]
SHAPES = {
    "one": ["serve", MODEL, "-s", "threads=2"],
    "mixed": ["cluster", MODEL, "--workers", "2", "-s", "threads=1", *WHOLE],
    "chunked": ["cluster", MODEL, "--workers", "2", "-s", "threads=1"],
    "pools": ["cluster", MODEL, "--prefill", "1", "--decode", "1", "-s", "threads=1"],
    "apart": ["cluster", MODEL, "--prefill", "1", "--decode", "1", "--route", "apart", "-s", "threads=1"],
}
TTFT, GAP = 2.0, 0.25  # seconds: a request that keeps both counts as good
LONG = 512  # tokens of a prompt from which on the share of transfers is counted


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


def engines() -> set[int]:
    """Processes of engines on this machine."""
    return {int(path.parent.name) for path in Path("/proc").glob("[0-9]*/cmdline") if b"child_main" in content(path)}


def content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it has ended
        return b""


def pin(pids: set[int]) -> None:
    """Each engine to a core of its own, with all its threads."""
    for pid, core in zip(sorted(pids), sorted(os.sched_getaffinity(0)), strict=True):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), {core})


def at(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0


def run(shape: str, rate: float, requests: int) -> dict[str, Any]:
    others = engines()
    process, url = started(SHAPES[shape])
    try:
        if shape != "one":
            pin(engines() - others)
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
    if transfers is not None:
        long = [one for one in served if one.prompt > LONG and one.timings]
        shares = [one.timings["transfer_s"] / (one.pieces[0] - one.arrival) for one in long if one.timings]
        transfers["share_of_long_ttft"] = median(shares) if shares else None
        transfers["long_prompts"] = len(shares)
    span = max(one.pieces[-1] for one in served) - min(one.arrival for one in records)
    return {
        "rate": rate, "requests": requests, "answered": len(served), "good": good / len(records),
        "goodput": good / span,
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
