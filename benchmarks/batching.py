"""Continuous against static batching, and chunked against whole prompts, with the default model and a real trace.

    python -m benchmarks.batching                 # three interleaved rounds, JSON and plot under results/
    python -m benchmarks.batching --rounds 1 --requests 16

All variants are compared within one run; medians over the rounds are reported. The engine does not pad. transformers
gets the wide batch cap and left-pads, as its `generate` requires. (`twostroke bench levers` measures the other levers.)

Static and continuous batching are compared at two caps. Static batching wastes the reading of the weights for requests
that have ended, so the difference shows where reading the weights sets the time: on two cores up to about four streams.
With more streams each row costs its own arithmetic, and an ended request costs nothing in either mode, because nothing
is padded. Answers have the trace's lengths. Prompts are shortened: they cost both modes the same and would hide the
difference.

So the gain in tokens/s depends on the workload, and on two x86 cores it is small. The machine's speed drifts by more
than that (single rounds of one mode after the other gave 0.97 to 1.41), so both modes take turns of a quarter of a
second, each on its own clock. Committed: cap 4 1.25 (three rounds, 1.24 to 1.25), cap 16 1.10 (1.10 to 1.13). Other
workloads, two rounds each: cap 4 with prompts / 16 1.23 and 1.25, with prompts / 8 1.18 and 1.18; cap 8 1.12 and 1.15.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.cpu_engines import greedy, prompt
from benchmarks.machine import save
from benchmarks.peers import transformers_llama
from twostroke import LLM
from twostroke.bench.workload import shipped_trace
from twostroke.ops.interface import BLOCK
from twostroke.weights.catalog import DEFAULT, fetch

TURN = 0.25  # seconds
Sizes = list[tuple[int, int]]  # (prompt, answer) of each request, in tokens


def trace_sizes(count: int, prompt_scale: int, answer_scale: int) -> Sizes:
    """From the Azure conversation trace, divided so that a CPU finishes in minutes."""
    rows = shipped_trace("azure-conv", count)
    return [(max(1, row.prompt // prompt_scale), max(2, row.output // answer_scale)) for row in rows]


# ---- continuous against static batching ----


class Stopwatch:
    """A clock that runs only during the turns of one engine."""

    def __init__(self) -> None:
        self.counted, self.since = 0.0, time.perf_counter()
        self.runs = False

    def __call__(self) -> float:
        return self.counted + (time.perf_counter() - self.since if self.runs else 0.0)

    def start(self) -> None:
        self.since, self.runs = time.perf_counter(), True

    def stop(self) -> None:
        self.counted, self.runs = self(), False


class Serving:
    """One engine that gets all requests at once and serves them during its turns."""

    def __init__(self, sizes: Sizes, cap: int, mode: str):
        llm = LLM(DEFAULT, max_requests=cap, batching=mode, prefix_cache=False, speculate="off")
        self.clock = llm.engine.core.clock = Stopwatch()
        self.clock.start()
        self.streams = deque(llm.stream(prompt(p, i), greedy(n)) for i, (p, n) in enumerate(sizes))
        self.clock.stop()
        self.tokens, self.ttft = 0, []  # type: ignore[var-annotated]

    def take_turn(self, seconds: float) -> None:
        """Read from the oldest stream for about so long: its engine steps for all of them."""
        self.clock.start()
        end = self.clock() + seconds
        while self.streams and self.clock() < end:
            event = next(self.streams[0], None)
            if event is None:
                self.streams.popleft()
                continue
            self.tokens += len(event.token_ids)
            if event.timeline is not None:
                self.ttft.append(event.timeline.ttft)
        self.clock.stop()

    def figures(self) -> dict[str, float]:
        seconds = self.clock()
        return {"output_tokens_per_s": self.tokens / seconds, "ttft_p50_s": median(self.ttft), "seconds": seconds}


def batching(sizes: Sizes, cap: int, suffix: str) -> dict[str, dict[str, float]]:
    both = {mode: Serving(sizes, cap, mode) for mode in ("continuous", "static")}
    while any(serving.streams for serving in both.values()):
        for serving in both.values():
            serving.take_turn(TURN)
    return {mode + suffix: serving.figures() for mode, serving in both.items()}


def reservation(sizes: Sizes) -> dict[str, float]:
    """KV bytes without a token when each request ends: in blocks, and with the whole context reserved."""
    llm = LLM(DEFAULT, max_requests=1, speculate="off")
    per_token = llm.settings.layout.block_bytes // BLOCK
    lengths = [p + n for p, n in sizes]
    return {
        "kv_bytes_per_token": per_token,
        "used_mb": sum(lengths) * per_token / 1e6,
        "paged_waste_mb": sum(-length % BLOCK for length in lengths) * per_token / 1e6,
        "contiguous_waste_mb": sum(llm.settings.max_model_len - length for length in lengths) * per_token / 1e6,
    }


@torch.inference_mode()
def transformers_batching(sizes: Sizes, cap: int, model: Any) -> dict[str, float]:
    start = time.perf_counter()
    for first in range(0, len(sizes), cap):
        batch = sizes[first : first + cap]
        width, longest = max(p for p, _ in batch), max(n for _, n in batch)
        ids = torch.zeros((len(batch), width), dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, (length, _) in enumerate(batch):
            ids[row, width - length :] = torch.tensor(prompt(length, first + row))
            mask[row, width - length :] = 1
        model.generate(
            ids, attention_mask=mask, max_new_tokens=longest, min_new_tokens=longest, do_sample=False, pad_token_id=0,
            eos_token_id=None,
        )  # fmt: skip
    seconds = time.perf_counter() - start
    return {"output_tokens_per_s": sum(n for _, n in sizes) / seconds, "seconds": seconds}


# ---- chunked against whole prompts ----


def chunking(chunked: bool, streams: int, prompts: int) -> dict[str, float]:
    """Gaps of running streams while 2,000-token prompts arrive, and the TTFT of those prompts."""
    llm = LLM(DEFAULT, chunked_prefill=chunked, prefix_cache=False, speculate="off", max_requests=streams + prompts)
    running = [llm.stream(prompt(50, i), greedy(2000)) for i in range(streams)]
    for _ in range(16):  # all streams decode, and the pace has seen a few steps
        for stream in running:
            next(stream)
    ttfts = []
    began = time.perf_counter()
    for i in range(prompts):
        events = list(llm.stream(prompt(2000, 1000 + i), greedy(2)))
        ttfts.append(events[-1].timeline.ttft)
    ended = time.perf_counter()
    gaps = []
    for request in llm.engine.core.scheduler.running.values():
        gaps += list(np.diff([t for t in request.timeline.token_times if began <= t <= ended]))
    for stream in running:
        stream.close()
    return {
        "gap_p50_s": float(np.percentile(gaps, 50)),
        "gap_p99_s": float(np.percentile(gaps, 99)),
        "gap_max_s": float(max(gaps)),
        "prompt_ttft_p50_s": median(ttfts),
        "max_gap_s": llm.settings.max_gap,
    }


# ---- the run ----


def measure(args: argparse.Namespace) -> dict[str, Any]:
    sizes = trace_sizes(args.requests, args.prompt_scale, args.answer_scale)
    model = transformers_llama(fetch(DEFAULT))
    measures: list[Callable[[], dict[str, dict[str, Any]]]] = [
        lambda: batching(sizes, args.cap, ""),
        lambda: batching(sizes, args.wide_cap, "_wide"),
        lambda: {"chunked": chunking(True, 8, 3)},
        lambda: {"unchunked": chunking(False, 8, 3)},
    ]
    peer = sizes[: args.peer_requests]
    rounds: dict[str, list[dict[str, Any]]] = {}
    for number in range(args.rounds):
        last = [lambda: {"transformers": transformers_batching(peer, args.wide_cap, model)}]
        for one in measures + (last if number < args.peer_rounds else []):
            for name, figures in one().items():
                rounds.setdefault(name, []).append(figures)
                print(f"round {number + 1} {name}: {json.dumps(figures)}", flush=True)
            gc.collect()
    medians = {name: {key: median(one[key] for one in found) for key in found[0]} for name, found in rounds.items()}
    return {
        "requests": args.requests,
        "prompt_scale": args.prompt_scale,
        "answer_scale": args.answer_scale,
        "batch_cap": args.cap,
        "wide_batch_cap": args.wide_cap,
        "rounds": args.rounds,
        "medians": medians,
        "ratios": ratios(medians, rounds),
        "reservation": reservation(sizes),
    }


def over_static(rounds: dict[str, list[dict[str, Any]]], suffix: str) -> list[float]:
    """Continuous over static tokens/s in each round, in which they took turns."""
    pairs = zip(rounds["continuous" + suffix], rounds["static" + suffix], strict=True)
    return [one["output_tokens_per_s"] / other["output_tokens_per_s"] for one, other in pairs]


def ratios(m: dict[str, dict[str, float]], rounds: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    each, each_wide = over_static(rounds, ""), over_static(rounds, "_wide")
    return {
        "continuous_over_static_tokens_per_s": median(each),
        "continuous_over_static_tokens_per_s_each_round": each,
        "continuous_over_static_tokens_per_s_wide": median(each_wide),
        "continuous_over_static_tokens_per_s_wide_each_round": each_wide,
        "continuous_over_transformers_tokens_per_s": m["continuous_wide"]["output_tokens_per_s"]
        / m["transformers"]["output_tokens_per_s"],
        "static_over_continuous_ttft": m["static"]["ttft_p50_s"] / m["continuous"]["ttft_p50_s"],
        "unchunked_over_chunked_gap_p99": m["unchunked"]["gap_p99_s"] / m["chunked"]["gap_p99_s"],
        "chunked_gap_p99_within_max_gap": m["chunked"]["gap_p99_s"] <= m["chunked"]["max_gap_s"],
        "chunked_over_unchunked_prompt_ttft": m["chunked"]["prompt_ttft_p50_s"] / m["unchunked"]["prompt_ttft_p50_s"],
    }


def plot(result: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    m, kept = result["medians"], result["reservation"]
    modes = ("transformers", "static_wide", "static", "continuous_wide", "continuous")
    panels = {
        "output tokens/s\n(higher is better)": {name: m[name]["output_tokens_per_s"] for name in modes},
        "p99 gap of streams while\nprompts arrive, s": {
            name: m[name]["gap_p99_s"] for name in ("unchunked", "chunked")
        },
        f"KV memory of {result['requests']} requests, MB": {
            "tokens": kept["used_mb"],
            "waste,_paged": kept["paged_waste_mb"],
            "waste,_contiguous": kept["contiguous_waste_mb"],
        },
    }
    colours = {"transformers": "#b8b8b8", "continuous": "#d9822b", "continuous_wide": "#d9822b", "chunked": "#d9822b"}
    figure, axes = plt.subplots(1, len(panels), figsize=(14, 3.6), width_ratios=(2.2, 1, 1.4))
    for axis, (title, values) in zip(axes, panels.items(), strict=True):
        names = [name.replace("_", "\n") for name in values]
        bars = axis.bar(names, list(values.values()), color=[colours.get(name, "#6b8fb5") for name in values])
        axis.bar_label(bars, [f"{value:,.0f}" if value > 100 else f"{value:.3g}" for value in values.values()])
        axis.set_title(title, fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt-scale", type=int, default=32, help="divides the trace's prompt lengths")
    parser.add_argument("--answer-scale", type=int, default=1, help="divides the trace's answer lengths")
    parser.add_argument("--peer-requests", type=int, default=8, help="requests that transformers gets, in one batch")
    parser.add_argument("--cap", type=int, default=4, help="requests in a batch that is memory-bound")
    parser.add_argument("--wide-cap", type=int, default=16, help="requests in a batch that is compute-bound")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer-rounds", type=int, default=1, help="rounds in which the slow peer takes part")
    args = parser.parse_args()
    result = measure(args)
    plot(result, save("batching", "batching", result).with_suffix(".png"))


if __name__ == "__main__":
    main()
