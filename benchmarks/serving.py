"""An open-loop load over HTTP, beside llama.cpp's server on the same machine. About nine minutes on two cores.

    python -m benchmarks.serving --llama BUILD/bin --q4-0 MODEL-Q4_0.gguf

llama.cpp serves the same file and, where `--q4-0` names one, the model in a format for which it has repacked kernels
(`llama-quantize --allow-requantize FILE MODEL-Q4_0.gguf Q4_0`); for the format of the shipped file it has none.

Lengths and times of arrivals come from the Azure conversation trace, lengths divided by `--shorter` for a CPU. First a
closed loop of 16 requests at once gives the throughput of each server. Then an open loop follows at shares of the
highest request rate: below, near and above saturation. All servers get the same requests with token ids as prompts
(exact lengths, nothing shared, nothing cached) and take turns load by load. Goodput counts the requests with the first
token within `--ttft` seconds of the due time and at most `--tpot` seconds for each later token. server_overhead.py
measures what the server costs beside the model. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.machine import save
from benchmarks.raw_client import RawClient
from benchmarks.serving_servers import CONTEXT, OURS, REPACKED, SAME, SLOTS, VOCAB, started
from twostroke.bench.record import RequestRecord
from twostroke.bench.workload import trace_load
from twostroke.cost.simulation.served import Spread, Targets, summarize
from twostroke.cost.simulation.trace import Arrival, PromptPart
from twostroke.record import replace

COLOURS = {SAME: "#b9b9b9", REPACKED: "#6a6a6a", OURS: "#d9822b"}
SHARES = (0.3, 0.6, 0.9, 1.3)  # of the highest request rate of a server


def arrivals(count: int, rate: float | None, shorter: float, turn: int) -> list[Arrival]:
    """The trace's first requests, with texts that no other turn has."""
    rows = trace_load("azure-conv", count, rate, shorter, CONTEXT - 8).arrivals
    return [replace(row, parts=(PromptPart(turn * 100_000 + i, row.prompt),)) for i, row in enumerate(rows)]


def percentiles(spread: Spread) -> dict[str, float]:
    return {name: getattr(spread, name) for name in ("p50", "p95", "p99")}


def summary(records: Sequence[RequestRecord], ttft: float, tpot: float) -> dict[str, Any]:
    served = [record.served() for record in records if record.error is None]
    found = summarize(served)
    if not found.requests:
        return {"requests": len(records), "failed": len(records), "error": records[0].error}
    good = Targets(ttft, tpot).goodput(served)
    return {
        "requests": len(records),
        "failed": len(records) - found.requests,
        "seconds": found.seconds,
        "requests_per_s": found.request_rate,
        "output_tokens_per_s": found.output_rate,
        "goodput_requests_per_s": good,
        "within_slo": good * found.seconds / len(records),
        "ttft_s": percentiles(found.ttft),
        "tpot_s": percentiles(found.tpot),
        "itl_s": percentiles(found.itl),
        "client_late_s": percentiles(Spread.of([record.sent - record.arrival for record in records])),
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
        return lambda found: found.get(name, {}).get(which, math.nan)

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
            axis.set_yscale("log")  # the values differ up to a hundred times
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
    parser.add_argument("--json", type=Path, help="instead of a file under results/; the plot is beside it")
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
        "seconds_at_each_rate": args.seconds,
        "lengths_divided_by": args.shorter,
        "slo": {"ttft_s": args.ttft, "tpot_s": args.tpot},
        **found,
        "output_tokens_per_s_at_16_over": {name: ours / speed for name, speed in speeds.items()},
        "took_s": time.perf_counter() - began,
    }
    command = "serving --llama BUILD/bin" + (" --q4-0 FILE" if args.q4_0 else "")
    plot(result, save("serving", command, result, args.json).with_suffix(".png"))


if __name__ == "__main__":
    main()
