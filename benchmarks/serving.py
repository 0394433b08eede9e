"""Served over HTTP, open loop, beside llama.cpp's server on the same machine. About nine minutes on two cores.

    python -m benchmarks.serving --llama BUILD/bin --q4-0 MODEL-Q4_0.gguf

llama.cpp serves the same file, and, where `--q4-0` names one, the model in a format for which it has repacked kernels
(`llama-quantize --allow-requantize FILE MODEL-Q4_0.gguf Q4_0`): the shipped file is in one for which it has none.

Lengths and the rhythm of arrivals come from the Azure conversation trace, lengths divided by `--shorter` so that a CPU
keeps up. First all servers are asked for as much as they can give with 16 requests at once. Then requests arrive on
their own, at shares of what the fastest one gave: below, near and past saturation. All get the same requests with token
ids as prompts (exact lengths, nothing shared, nothing seen before), and take turns load by load. Goodput counts the
requests whose first token came within `--ttft` seconds of the moment they were due and whose later ones took at most
`--tpot` each. What our server costs beside the model is measured in server_overhead.py. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import describe
from benchmarks.raw_client import RawClient
from benchmarks.serving_servers import CONTEXT, OURS, REPACKED, SAME, SLOTS, VOCAB, started
from twostroke.bench.record import Record
from twostroke.bench.workload import trace_load
from twostroke.cost.simulation.trace import Arrival, Part

HERE = Path(__file__).parent
COLOURS = {SAME: "#b9b9b9", REPACKED: "#6a6a6a", OURS: "#d9822b"}
SHARES = (0.3, 0.6, 0.9, 1.3)  # of what the fastest server can give
PERCENTILES = (50, 95, 99)


def arrivals(count: int, rate: float | None, shorter: float, turn: int) -> list[Arrival]:
    """The trace's first requests with contents that no other turn has."""
    rows = trace_load("azure-conv", count, rate, shorter, CONTEXT - 8).arrivals
    return [replace(row, parts=(Part(turn * 100_000 + i, row.prompt),)) for i, row in enumerate(rows)]


def percentiles(values: Sequence[float]) -> dict[str, float]:
    return {f"p{p}": float(np.percentile(values, p)) for p in PERCENTILES} if len(values) else {}


def tpot_of(record: Record) -> float | None:
    if record.output < 2 or len(record.pieces) < 2:
        return None
    return (record.pieces[-1] - record.pieces[0]) / (record.output - 1)


def summary(records: Sequence[Record], ttft: float, tpot: float) -> dict[str, Any]:
    good = [r for r in records if r.error is None and r.pieces and r.end is not None]
    if not good:
        return {"requests": len(records), "failed": len(records), "error": records[0].error}
    span = max(r.end or 0.0 for r in good) - min(r.arrival for r in good)
    met = [r for r in good if (r.ttft or 0.0) <= ttft and (tpot_of(r) or 0.0) <= tpot]
    return {
        "requests": len(records),
        "failed": len(records) - len(good),
        "seconds": span,
        "requests_per_s": len(good) / span,
        "output_tokens_per_s": sum(r.output for r in good) / span,
        "goodput_requests_per_s": len(met) / span,
        "within_slo": len(met) / len(records),
        "ttft_s": percentiles([r.ttft for r in good if r.ttft is not None]),
        "tpot_s": percentiles([t for r in good if (t := tpot_of(r)) is not None]),
        "itl_s": percentiles([float(gap) for r in good for gap in np.diff(r.pieces)]),
        "client_late_s": percentiles([r.sent - r.arrival for r in records]),
    }


def measure(args: argparse.Namespace, urls: dict[str, str]) -> dict[str, Any]:
    clients = {name: RawClient(url, VOCAB) for name, url in urls.items()}
    for name, client in clients.items():
        print(name, "warm:", client.closed_loop(arrivals(4, None, args.shorter, 1), 4)[0].error, flush=True)
    closed = {}
    rows = arrivals(args.closed, None, args.shorter, 2)
    for name, client in clients.items():
        closed[name] = summary(client.closed_loop(rows, SLOTS), args.ttft, args.tpot)
        print(f"{SLOTS} at once", name, json.dumps(closed[name]), flush=True)
    most = max(one.get("requests_per_s", 0.0) for one in closed.values())
    loads: dict[str, Any] = {}
    for turn, share in enumerate(SHARES, 3):
        rate = float(f"{share * most:.2g}")
        rows = arrivals(max(8, round(rate * args.seconds)), rate, args.shorter, turn)
        loads[f"{rate:g}"] = {}
        for name in list(clients)[:: 1 if turn % 2 else -1]:
            found = loads[f"{rate:g}"][name] = summary(clients[name].open_loop(rows), args.ttft, args.tpot)
            print(f"{rate:g}/s", name, json.dumps(found), flush=True)
    return {"closed": closed, "rates": loads}


def plot(result: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    def percentile(name: str, which: str) -> Callable[[dict[str, Any]], float]:
        return lambda found: found.get(name, {}).get(which, math.nan)  # a server that failed has none

    shown = {
        "TTFT p95, s": percentile("ttft_s", "p95"),
        "TPOT p95, s": percentile("tpot_s", "p95"),
        "gap between tokens p99, s": percentile("itl_s", "p99"),
        "goodput, requests/s": lambda found: found.get("goodput_requests_per_s", 0.0),
    }
    figure, axes = plt.subplots(1, len(shown), figsize=(15, 3.6))
    rates = list(result["rates"])
    for axis, (title, pick) in zip(axes, shown.items(), strict=True):
        for name in result["closed"]:
            values = [pick(result["rates"][rate][name]) for rate in rates]
            axis.plot([float(rate) for rate in rates], values, "o-", color=COLOURS[name], label=name)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("requests/s offered")
        if axis is axes[-1]:
            axis.set_ylim(bottom=0)
        else:
            axis.set_yscale("log")  # they lie up to a hundred times apart
        axis.spines[["top", "right"]].set_visible(False)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="lower center", ncols=len(COLOURS), frameon=False)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama", type=Path, required=True, help="folder of llama.cpp's programs")
    parser.add_argument("--q4-0", type=Path, help="the same model in a format that llama.cpp has repacked kernels for")
    parser.add_argument("--seconds", type=float, default=10.0, help="of arrivals at each rate")
    parser.add_argument("--closed", type=int, default=32, help="requests of the measurement at 16 at once")
    parser.add_argument("--shorter", type=float, default=4.0, help="divides the trace's lengths")
    parser.add_argument("--ttft", type=float, default=2.0)
    parser.add_argument("--tpot", type=float, default=0.1)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    args = parser.parse_args()
    began = time.perf_counter()
    with ExitStack() as servers:
        urls = {SAME: servers.enter_context(started(SAME, args.llama))[0]}
        if args.q4_0 is not None:
            urls[REPACKED] = servers.enter_context(started(REPACKED, args.llama, args.q4_0))[0]
        urls[OURS] = servers.enter_context(started(OURS))[0]
        found = measure(args, urls)
    speeds = {name: one.get("output_tokens_per_s", math.nan) for name, one in found["closed"].items()}
    ours = speeds.pop(OURS)
    result = {
        "machine": describe(),
        "command": "python -m benchmarks.serving --llama BUILD/bin" + (" --q4-0 FILE" if args.q4_0 else ""),
        "seconds_at_each_rate": args.seconds,
        "lengths_divided_by": args.shorter,
        "slo": {"ttft_s": args.ttft, "tpot_s": args.tpot},
        **found,
        "output_tokens_per_s_at_16_over": {name: ours / speed for name, speed in speeds.items()},
        "took_s": time.perf_counter() - began,
    }
    stem = args.out / f"serving-{result['machine']['machine']}"
    stem.with_suffix(".json").write_text(json.dumps(result, indent=2) + "\n")
    plot(result, stem.with_suffix(".png"))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
