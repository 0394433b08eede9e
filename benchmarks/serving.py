"""Served over HTTP, open loop, beside llama.cpp's server on the same file and machine.

    python -m benchmarks.serving --llama BUILD/bin

Arrivals and lengths come from the Azure conversation trace (lengths over `--scale`, so that a CPU keeps up), sped up to
each rate; both servers get the same requests, one server at a time, taking turns rate by rate. Token ids are sent, so
prompts have exactly the same length for both. Then both are asked for as much as they can give at 16 requests at once.
Goodput counts requests whose first token came within `--ttft` and whose later ones within `--tpot` seconds each. The
last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import describe
from twostroke.bench.client import Target, measure
from twostroke.bench.record import Record, Run
from twostroke.bench.workload import Load, trace_load
from twostroke.hardware import usable_cores
from twostroke.weights.catalog import DEFAULT, fetch

HERE = Path(__file__).parent
VOCAB = 49_152
SLOTS = 16
PORT = {"twostroke": 18431, "llama.cpp": 18432}


def command(name: str, llama: Path, context: int) -> list[str]:
    port = str(PORT[name])
    if name == "twostroke":
        settings = ("-s", f"max_requests={SLOTS}", "-s", f"max_model_len={context}")
        return [
            sys.executable,
            "-m",
            "twostroke.cli",
            "serve",
            DEFAULT,
            "--port",
            port,
            "--max-queue",
            "1000",
            *settings,
        ]
    return [str(llama / "llama-server"), "-m", str(fetch(DEFAULT)), "--port", port, "-t", str(usable_cores()),
            "-np", str(SLOTS), "-c", str(SLOTS * context), "-fa", "on", "--no-webui"]  # fmt: skip


@contextmanager
def started(name: str, llama: Path, context: int) -> Iterator[tuple[Target, subprocess.Popen[bytes]]]:
    ready = {"twostroke": "/health/ready", "llama.cpp": "/health"}[name]
    url = f"http://127.0.0.1:{PORT[name]}"
    process = subprocess.Popen(command(name, llama, context), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(url + ready, timeout=1)
                break
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)
        yield Target(url, vocabulary=VOCAB), process
    finally:
        process.terminate()
        process.wait(30)


def percentiles(values: list[float]) -> dict[str, float]:
    return {f"p{p}": float(np.percentile(values, p)) for p in (50, 95, 99)} if values else {}


def summary(run: Run, ttft: float, tpot: float) -> dict[str, Any]:
    good = [r for r in run.records if r.error is None and r.pieces]
    ends = [r.end for r in good if r.end is not None]
    span = max(ends) - min(r.sent for r in good)
    met = [r for r in good if (r.ttft or 0) <= ttft and (tpot_of(r) or 0) <= tpot]
    return {
        "requests": len(run.records),
        "failed": len(run.records) - len(good),
        "output_tokens_per_s": sum(r.output for r in good) / span,
        "goodput_requests_per_s": len(met) / span,
        "ttft_s": percentiles([r.ttft for r in good if r.ttft is not None]),
        "tpot_s": percentiles([t for r in good if (t := tpot_of(r)) is not None]),
        "itl_s": percentiles([float(gap) for r in good for gap in np.diff(r.pieces)]),
    }


def tpot_of(record: Record) -> float | None:
    if record.output < 2 or len(record.pieces) < 2:
        return None
    return (record.pieces[-1] - record.pieces[0]) / (record.output - 1)


def loads(args: argparse.Namespace) -> dict[str, Load]:
    found = {
        f"{rate:g}/s": trace_load("azure-conv", args.requests, rate, args.scale, args.context - 8)
        for rate in args.rates
    }
    rows = trace_load("azure-conv", 2 * args.requests, None, args.scale, args.context - 8)
    found[f"{SLOTS} at once"] = Load("closed", rows.arrivals, closed=SLOTS)
    return found


def plot(result: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 4, figsize=(15, 3.6))
    rates = [float(name.removesuffix("/s")) for name in result["loads"] if name.endswith("/s")]
    for axis, (title, pick) in zip(
        axes,
        {
            "TTFT p95, s": lambda s: s["ttft_s"]["p95"],
            "TPOT p95, s": lambda s: s["tpot_s"]["p95"],
            "gap between tokens p99, s": lambda s: s["itl_s"]["p99"],
            "goodput, requests/s": lambda s: s["goodput_requests_per_s"],
        }.items(),
        strict=True,
    ):
        for name, colour in (("llama.cpp", "#8a8a8a"), ("twostroke", "#d9822b")):
            axis.plot(
                rates, [pick(result["loads"][f"{rate:g}/s"][name]) for rate in rates], "o-", color=colour, label=name
            )
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("requests/s offered")
        axis.set_ylim(bottom=0)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama", type=Path, required=True, help="folder of llama.cpp's programs")
    parser.add_argument("--rates", type=float, nargs="*", default=[0.5, 1.0, 2.0, 4.0])
    parser.add_argument("--requests", type=int, default=24, help="for each rate")
    parser.add_argument("--scale", type=float, default=0.25, help="multiplies the trace's lengths")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--ttft", type=float, default=1.0)
    parser.add_argument("--tpot", type=float, default=0.05)
    args = parser.parse_args()
    found: dict[str, dict[str, Any]] = {}
    for label, load in loads(args).items():
        found[label] = {}
        for name in ("llama.cpp", "twostroke"):
            with started(name, args.llama, args.context) as (target, _):
                measure(target, Load("warm up", load.arrivals[:2], closed=1))
                found[label][name] = summary(measure(target, load), args.ttft, args.tpot)
            print(label, name, json.dumps(found[label][name]), flush=True)
    closed = found[f"{SLOTS} at once"]
    result = {
        "machine": describe(),
        "command": "python -m benchmarks.serving",
        "scale": args.scale,
        "requests": args.requests,
        "slo": {"ttft_s": args.ttft, "tpot_s": args.tpot},
        "loads": found,
        "output_tokens_per_s_over_llama_cpp_at_16": closed["twostroke"]["output_tokens_per_s"]
        / closed["llama.cpp"]["output_tokens_per_s"],
    }
    stem = HERE / "results" / f"serving-{result['machine']['machine']}"
    stem.with_suffix(".json").write_text(json.dumps(result, indent=2) + "\n")
    plot(result, stem.with_suffix(".png"))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
