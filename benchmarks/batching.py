"""What each lever of the scheduler buys, on the default model and a real trace's lengths.

    python -m benchmarks.batching                 # everything, three interleaved rounds, JSON and plot under results/
    python -m benchmarks.batching --rounds 1 --requests 16

Every comparison is made within one run, the variants taking turns; medians over the rounds are reported. The engine
pads nothing anywhere; transformers gets the wide batch cap and left-pads, as its own `generate` requires.

Static and continuous batching meet at two caps. What static batching wastes is the reading of the weights for rows that
are no longer there, so it shows where reading sets the pace: on two cores up to about four streams. With more, each row
costs its own arithmetic, and an empty row costs nothing in either mode, for nothing is padded. Answers have the trace's
lengths; prompts are cut short, since reading them costs both modes the same and would hide what is compared.

How much continuous batching gives in tokens/s therefore depends on the workload, and on two x86 cores it is little.
Medians of three rounds, continuous over static, all that were tried. With kernels whose cost grew faster with rows: cap
16, prompts / 8, answers / 2: 1.03; cap 4, prompts / 16: 1.18 (cap 16: 1.08); cap 4, prompts / 32: 1.21 (cap 16: 0.96),
single rounds 1.31, 0.98 and 1.24. The committed run, the last workload again with today's kernels: 1.19 (cap 16: 1.15),
single rounds 1.18, 1.22 and 1.41. Read these as "about 1.2 with four streams, a little less with sixteen".
"""

from __future__ import annotations

import argparse
import csv
import gc
import json
import random
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.machine import describe
from benchmarks.peers import transformers_llama
from twostroke import LLM, SamplingParams
from twostroke.ops.interface import BLOCK
from twostroke.weights.catalog import DEFAULT, fetch

HERE = Path(__file__).parent
VOCAB = 49_000  # ids below the special tokens of the default model


def trace_lengths(count: int, prompt_scale: int, answer_scale: int) -> list[tuple[int, int]]:
    """(prompt, answer) lengths from the Azure conversation trace, shortened so that a CPU finishes in minutes."""
    with (HERE / "data" / "azure_conv_excerpt.csv").open() as file:
        rows = list(csv.DictReader(file))[:count]
    return [
        (max(1, int(r["ContextTokens"]) // prompt_scale), max(2, int(r["GeneratedTokens"]) // answer_scale))
        for r in rows
    ]


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)


# ---- continuous against static batching ----


def batching(lengths: list[tuple[int, int]], cap: int, mode: str) -> dict[str, float]:
    llm = LLM(DEFAULT, max_requests=cap, batching=mode, prefix_cache=False)
    prompts = [prompt(p, i) for i, (p, _) in enumerate(lengths)]
    start = time.perf_counter()
    outputs = llm.generate(prompts, [greedy(n) for _, n in lengths])
    seconds = time.perf_counter() - start
    ttft = [o.timeline.ttft for o in outputs]
    tokens = sum(len(o.token_ids) for o in outputs)
    return {"output_tokens_per_s": tokens / seconds, "ttft_p50_s": median(ttft), "seconds": seconds}


def reservation(lengths: list[tuple[int, int]]) -> dict[str, float]:
    """KV bytes that hold no token when each request ends: in blocks, and with the context reserved in one piece."""
    llm = LLM(DEFAULT, max_requests=1)
    per_token = llm.settings.layout.block_bytes // BLOCK
    lengths_now = [p + n for p, n in lengths]
    return {
        "kv_bytes_per_token": per_token,
        "used_mb": sum(lengths_now) * per_token / 1e6,
        "paged_waste_mb": sum(-length % BLOCK for length in lengths_now) * per_token / 1e6,
        "contiguous_waste_mb": sum(llm.settings.max_model_len - length for length in lengths_now) * per_token / 1e6,
    }


@torch.inference_mode()
def transformers_batching(lengths: list[tuple[int, int]], cap: int, model: Any) -> dict[str, float]:
    start = time.perf_counter()
    for first in range(0, len(lengths), cap):
        part = lengths[first : first + cap]
        width, longest = max(p for p, _ in part), max(n for _, n in part)
        ids = torch.zeros((len(part), width), dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, (length, _) in enumerate(part):
            ids[row, width - length :] = torch.tensor(prompt(length, first + row))
            mask[row, width - length :] = 1
        model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=longest,
            min_new_tokens=longest,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
    seconds = time.perf_counter() - start
    return {"output_tokens_per_s": sum(n for _, n in lengths) / seconds, "seconds": seconds}


# ---- chunked against whole prompts ----


def chunking(chunked: bool, streams: int, prompts: int) -> dict[str, float]:
    """Gaps of running streams while 2,000-token prompts arrive, and what the prompts pay for it."""
    llm = LLM(DEFAULT, chunked_prefill=chunked, prefix_cache=False, max_requests=streams + prompts)
    running = [llm.stream(prompt(50, i), greedy(2000)) for i in range(streams)]
    for _ in range(16):  # everyone is writing, and the engine has seen a few steps
        for stream in running:
            next(stream)
    ttfts = []
    began = time.perf_counter()
    for i in range(prompts):
        events = list(llm.stream(prompt(2000, 1000 + i), greedy(2)))
        ttfts.append(events[-1].timeline.ttft)
    ended = time.perf_counter()
    requests = list(llm.engine.core.scheduler.running.values())
    gaps = []
    for request in requests:
        times = [t for t in request.timeline.token_times if began <= t <= ended]
        gaps += list(np.diff(times))
    for stream in running:
        stream.close()
    return {
        "gap_p50_s": float(np.percentile(gaps, 50)),
        "gap_p99_s": float(np.percentile(gaps, 99)),
        "gap_max_s": float(max(gaps)),
        "prompt_ttft_p50_s": median(ttfts),
        "max_gap_s": llm.settings.max_gap,
    }


# ---- prefix cache on and off ----


def prefix(cached: bool, requests: int, shared: int, own: int) -> dict[str, float]:
    """Requests one after the other that share a system prompt: the first pays for it in either case."""
    llm = LLM(DEFAULT, prefix_cache=cached)
    system = prompt(shared, 0)
    ttfts = []
    for i in range(requests):
        out = llm.generate([system + prompt(own, 1 + i)], greedy(4))[0]
        ttfts.append(out.timeline.ttft)
    stats = llm.stats()
    return {"ttft_p50_s": median(ttfts[1:]), "hit_rate": stats["cached_tokens"] / stats["prompt_tokens"]}


# ---- KV cache on and off ----


def kv_cache(cached: bool, length: int, tokens: int) -> dict[str, float]:
    """Without the cache every token means reading the whole text again."""
    llm = LLM(DEFAULT, prefix_cache=False)
    ids = prompt(length, 7)
    start = time.perf_counter()
    if cached:
        out = llm.generate([ids], greedy(tokens))[0].token_ids
    else:
        out = []
        for _ in range(tokens):
            out += llm.generate([ids + out], greedy(1))[0].token_ids
    return {"tokens_per_s": tokens / (time.perf_counter() - start), "answer": hash(tuple(out))}


# ---- the run ----


def measure(args: argparse.Namespace) -> dict[str, Any]:
    lengths = trace_lengths(args.requests, args.prompt_scale, args.answer_scale)
    model = transformers_llama(fetch(DEFAULT))
    variants = {
        "continuous": lambda: batching(lengths, args.cap, "continuous"),
        "static": lambda: batching(lengths, args.cap, "static"),
        "continuous_wide": lambda: batching(lengths, args.wide_cap, "continuous"),
        "static_wide": lambda: batching(lengths, args.wide_cap, "static"),
        "chunked": lambda: chunking(True, 8, 3),
        "unchunked": lambda: chunking(False, 8, 3),
        "prefix_cache_on": lambda: prefix(True, 8, 768, 32),
        "prefix_cache_off": lambda: prefix(False, 8, 768, 32),
        "kv_cache_on": lambda: kv_cache(True, 256, 32),
        "kv_cache_off": lambda: kv_cache(False, 256, 32),
        "transformers": lambda: transformers_batching(lengths[: args.peer_requests], args.wide_cap, model),
    }
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in variants}
    for number in range(args.rounds):
        for name, variant in variants.items():
            if name == "transformers" and number >= args.peer_rounds:
                continue
            rounds[name].append(variant())
            gc.collect()
            print(f"round {number + 1} {name}: {json.dumps(rounds[name][-1])}", flush=True)
    medians = {
        name: {key: median(one[key] for one in found) for key in found[0]} for name, found in rounds.items() if found
    }
    return {
        "machine": describe(),
        "command": "python -m benchmarks.batching",
        "requests": args.requests,
        "prompt_scale": args.prompt_scale,
        "answer_scale": args.answer_scale,
        "batch_cap": args.cap,
        "wide_batch_cap": args.wide_cap,
        "rounds": args.rounds,
        "medians": medians,
        "ratios": ratios(medians),
        "reservation": reservation(lengths),
    }


def ratios(m: dict[str, dict[str, float]]) -> dict[str, float | bool]:
    same = m["kv_cache_on"].pop("answer") == m["kv_cache_off"].pop("answer")
    return {
        "continuous_over_static_tokens_per_s": m["continuous"]["output_tokens_per_s"]
        / m["static"]["output_tokens_per_s"],
        "continuous_over_static_tokens_per_s_wide": m["continuous_wide"]["output_tokens_per_s"]
        / m["static_wide"]["output_tokens_per_s"],
        "continuous_over_transformers_tokens_per_s": m["continuous_wide"]["output_tokens_per_s"]
        / m["transformers"]["output_tokens_per_s"],
        "static_over_continuous_ttft": m["static"]["ttft_p50_s"] / m["continuous"]["ttft_p50_s"],
        "unchunked_over_chunked_gap_p99": m["unchunked"]["gap_p99_s"] / m["chunked"]["gap_p99_s"],
        "chunked_gap_p99_within_max_gap": m["chunked"]["gap_p99_s"] <= m["chunked"]["max_gap_s"],
        "chunked_over_unchunked_prompt_ttft": m["chunked"]["prompt_ttft_p50_s"] / m["unchunked"]["prompt_ttft_p50_s"],
        "prefix_off_over_on_ttft": m["prefix_cache_off"]["ttft_p50_s"] / m["prefix_cache_on"]["ttft_p50_s"],
        "kv_cache_on_over_off_tokens_per_s": m["kv_cache_on"]["tokens_per_s"] / m["kv_cache_off"]["tokens_per_s"],
        "kv_cache_off_writes_the_same_tokens": same,
    }


def plot(result: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    m = result["medians"]
    panels = [
        (
            "output tokens/s\n(higher is better)",
            ["transformers", "static_wide", "static", "continuous_wide", "continuous"],
            "output_tokens_per_s",
        ),
        ("p99 gap of streams while\nprompts arrive, s", ["unchunked", "chunked"], "gap_p99_s"),
        ("TTFT with a shared prompt, s", ["prefix_cache_off", "prefix_cache_on"], "ttft_p50_s"),
        ("one stream, tokens/s\n(higher is better)", ["kv_cache_off", "kv_cache_on"], "tokens_per_s"),
    ]
    figure, axes = plt.subplots(1, len(panels) + 1, figsize=(15, 3.6))
    for axis, (title, names, key) in zip(axes, panels, strict=False):
        bars = axis.bar(
            [name.replace("_", "\n") for name in names],
            [m[name][key] for name in names],
            color=["#b8b8b8", "#6b8fb5", "#6b8fb5", "#d9822b", "#d9822b"] if len(names) > 2 else ["#6b8fb5", "#d9822b"],
        )
        axis.bar_label(bars, fmt="%.3g")
        axis.set_title(title, fontsize=10)
    kept = result["reservation"]
    bars = axes[-1].bar(
        ["tokens", "waste,\npaged", "waste,\ncontiguous"],
        [kept["used_mb"], kept["paged_waste_mb"], kept["contiguous_waste_mb"]],
        color="#6b8fb5",
    )
    axes[-1].bar_label(bars, fmt="%.3g")
    axes[-1].set_title("KV memory of 64 requests, MB", fontsize=10)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt-scale", type=int, default=32, help="divides the trace's prompt lengths")
    parser.add_argument("--answer-scale", type=int, default=1, help="divides the trace's answer lengths")
    parser.add_argument("--peer-requests", type=int, default=8, help="requests that transformers gets, in one batch")
    parser.add_argument("--cap", type=int, default=4, help="requests in a batch that memory sets the pace of")
    parser.add_argument("--wide-cap", type=int, default=16, help="requests in a batch that arithmetic sets the pace of")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer-rounds", type=int, default=1, help="rounds in which the slow peer takes part")
    parser.add_argument("--name", default="batching", help="stem of the result files")
    args = parser.parse_args()
    result = measure(args)
    stem = HERE / "results" / f"{args.name}-{result['machine']['machine']}"
    stem.with_suffix(".json").write_text(json.dumps(result, indent=2) + "\n")
    plot(result, stem.with_suffix(".png"))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
