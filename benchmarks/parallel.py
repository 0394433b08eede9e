"""Ranks that share each layer's work (parallel=2) beside one process with as many threads.

    python -m benchmarks.parallel

Streams of 32 tokens and prompts of 256 tokens, the best of three; weights in int8, as two ranks cannot divide the
blocks of the file.
"""

from __future__ import annotations

import time
from typing import Any

from benchmarks.machine import save
from twostroke import LLM, SamplingParams

MODEL = "qwen2.5-coder-0.5b"
TOKENS, PROMPT = 32, 256
SHAPES: dict[str, dict[str, Any]] = {
    "1 process, 1 thread": {"threads": 1},
    "1 process, 2 threads": {"threads": 2},
    "2 ranks, 1 thread each": {"threads": 1, "parallel": 2},
}


def best_seconds(llm: LLM, prompt: int, tokens: int) -> float:
    params, found = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True), []
    for turn in range(3):
        began = time.perf_counter()
        llm.generate([[1000 + 500 * turn + place for place in range(prompt)]], params)  # a prompt that is not cached
        found.append(time.perf_counter() - began)
    return min(found)


def main() -> None:
    result: dict[str, Any] = {"model": MODEL, "shapes": {}}
    for name, settings in SHAPES.items():
        with LLM(MODEL, seed=1, max_model_len=1024, quantize="int8", speculate="off", **settings) as llm:
            first = best_seconds(llm, PROMPT, 1)
            stream = (best_seconds(llm, 16, TOKENS + 1) - best_seconds(llm, 16, 1)) / TOKENS
        result["shapes"][name] = {"prompt_tokens_per_s": round(PROMPT / first, 1), "token_ms": round(1e3 * stream, 1)}
        print(f"{name:24} {PROMPT / first:7.0f} tokens/s of a prompt, {1e3 * stream:6.1f} ms for a token of a stream")
    save("parallel", "parallel", result)


if __name__ == "__main__":
    main()
