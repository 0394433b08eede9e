"""Ranks that share each layer's work (parallel=2) beside one process with as many threads.

    python -m benchmarks.parallel

All shapes in turns; medians over turns of the rate of a prompt of 128 tokens and of the time between two tokens of a
stream, as its timeline has them. Weights in int8, as two ranks cannot divide the blocks of the file.
"""

from __future__ import annotations

from itertools import pairwise
from statistics import median
from typing import Any
from unittest import mock

from benchmarks.machine import save
from twostroke import LLM, SamplingParams
from twostroke.ranks import group as ranks

MODEL = "qwen2.5-coder-0.5b"
TOKENS, PROMPT, TURNS = 25, 128, 9
SHAPES: dict[str, dict[str, Any]] = {
    "1 process, 1 thread": {"threads": 1},
    "1 process, 2 threads": {"threads": 2},
    "2 ranks, shared memory": {"threads": 1, "parallel": 2},
    "2 ranks, gloo": {"threads": 1, "parallel": 2},
}


def opened(name: str) -> LLM:
    common = {"seed": 1, "max_model_len": 512, "kv_blocks": 64, "quantize": "int8", "speculate": "off"}
    if not name.endswith("gloo"):
        return LLM(MODEL, **common, **SHAPES[name])
    with mock.patch.object(ranks, "shared_memory", return_value=None):
        return LLM(MODEL, **common, **SHAPES[name])


def one_turn(llm: LLM, turn: int) -> tuple[float, list[float]]:
    """Tokens/s of a prompt that is not cached, and the gaps of its answer in seconds."""
    params = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
    prompt = [1000 + 500 * turn + place for place in range(PROMPT)]
    timeline = llm.generate([prompt], params)[0].timeline
    times = timeline.token_times
    return PROMPT / timeline.prefill, [later - sooner for sooner, later in pairwise(times)]


def main() -> None:
    result: dict[str, Any] = {"model": MODEL, "shapes": {}}
    llms = {name: opened(name) for name in SHAPES}
    rates: dict[str, list[float]] = {name: [] for name in SHAPES}
    turns: dict[str, list[float]] = {name: [] for name in SHAPES}  # median gap of each turn, in ms
    for turn in range(TURNS):
        for name, llm in llms.items():
            rate, gaps = one_turn(llm, turn)
            rates[name].append(rate)
            turns[name].append(1e3 * median(gaps))
    for name in SHAPES:
        rate, gap, span = median(rates[name]), median(turns[name]), (min(turns[name]), max(turns[name]))
        result["shapes"][name] = {"prompt_tokens_per_s": round(rate, 1), "token_ms": round(gap, 1), "turns_ms": span}
        print(f"{name:24} {rate:6.0f} tokens/s of a prompt, {gap:6.1f} ms a token ({span[0]:.1f} to {span[1]:.1f})")
    save("parallel", "parallel", result)


if __name__ == "__main__":
    main()
