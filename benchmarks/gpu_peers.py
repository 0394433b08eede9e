"""transformers on the same card, in a process of its own: `python -m benchmarks.gpu_peers`.

Random bf16 weights in the shape of Llama-3.1-8B, greedy, no end-of-text. One JSON object per line.
"""

from __future__ import annotations

import json
import logging
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

PROMPT, NEW = 128, 64


def note(name: str, value: float, unit: str) -> None:
    print(json.dumps({"name": name, "value": round(value, 2), "unit": unit}), flush=True)


def make_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=131_072, rope_theta=500_000.0, bos_token_id=None,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        return LlamaForCausalLM(config).eval()


def generate(model: LlamaForCausalLM, rows: int, prompt: int, new: int, **options: object) -> float:
    """Seconds of one call."""
    ids = torch.randint(0, 128_256, (rows, prompt), device="cuda")
    torch.cuda.synchronize()
    began = time.perf_counter()
    model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False, **options
    )
    torch.cuda.synchronize()
    return time.perf_counter() - began


def decode_rate(model: LlamaForCausalLM, warm: int, **options: object) -> float:
    for _ in range(warm):
        generate(model, 1, PROMPT, 8, **options)
    short, long = (min(generate(model, 1, PROMPT, new, **options) for _ in range(2)) for new in (8, 8 + NEW))
    return NEW / (long - short)


def main() -> None:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    model, static = make_model(), {"cache_implementation": "static"}
    note("decode1 eager", decode_rate(model, 1), "tokens/s")
    measure_ttft(model, "eager")
    generate(model, 64, 512, 2)
    note("offline256 eager, static batch of 64", 64 * 128 / generate(model, 64, 512, 128), "tokens/s")
    torch.cuda.empty_cache()
    measure_ttft(model, "static cache", **static)  # it compiles decode steps only
    torch.cuda.empty_cache()
    note("decode1 compiled, static cache", decode_rate(model, 3, **static), "tokens/s")


def measure_ttft(model: LlamaForCausalLM, name: str, **options: object) -> None:
    for length in (512, 2048, 8192, 32768):
        generate(model, 1, length, 1, **options)
        note(f"ttft{length} {name}", 1e3 * min(generate(model, 1, length, 1, **options) for _ in range(2)), "ms")


if __name__ == "__main__":
    main()
