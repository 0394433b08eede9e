"""Decode, prefill and eight streams of a mixture of experts on this CPU, beside native llama.cpp on the same file.

    python -m benchmarks.experts --llama BUILD/bin --scratch FOLDER

The file has OLMoE-1B-7B's shape (16 layers, 64 experts of which a token uses 8) with random codes in Q4_0: 3.9 GB,
written into FOLDER on first use. BUILD is a native build of llama.cpp (see benchmarks/cpu.py). Engines take turns
within each round; medians over the rounds. About 2 minutes for one round on two cores. Results:
benchmarks/results/experts-<machine>.json; the last line is the JSON.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from statistics import median

import gguf
import numpy as np

from benchmarks.cpu_engines import Engine, Llama, Ours
from benchmarks.cpu_random import TYPES, add_vocabulary, random_matrix
from benchmarks.machine import save

HIDDEN, WIDTH, EXPERTS, CHOSEN, LAYERS, HEADS, VOCAB = 2048, 1024, 64, 8, 16, 16, 50_304
KIND = "q4_0"
MEASURES: dict[str, Callable[[Engine], float]] = {
    "decode_1": lambda engine: engine.decode(1, 32, 48, repeats=2),
    "prefill_512": lambda engine: engine.prefill(512, repeats=2),
    "decode_8": lambda engine: engine.decode(8, 32, 24),
}
LIMITS = {"decode_1": 1.3, "prefill_512": 1.3, "decode_8": 1.5}  # least ratios: twostroke over llama.cpp


def write_mixture(path: Path) -> Path:
    """Written once, reused after. One layer's experts are in memory at a time."""
    if path.exists():
        return path
    rng = np.random.default_rng(0)
    partial = path.with_suffix(".partial")
    writer = gguf.GGUFWriter(str(partial), "olmoe", use_temp_file=True)
    writer.add_context_length(4096)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(CHOSEN)
    writer.add_vocab_size(VOCAB)
    add_vocabulary(writer, VOCAB)

    def matrix(name: str, rows: int, columns: int, count: int = 1) -> None:
        data = random_matrix(KIND, count * rows, columns, rng)
        shape = data if count == 1 else data.reshape(count, rows, -1)
        writer.add_tensor(f"{name}.weight", shape, raw_dtype=TYPES[KIND])

    def floats(name: str, data: np.ndarray) -> None:
        writer.add_tensor(f"{name}.weight", data.astype(np.float32))

    matrix("token_embd", VOCAB, HIDDEN)
    matrix("output", VOCAB, HIDDEN)
    floats("output_norm", np.ones(HIDDEN))
    for layer in range(LAYERS):
        stem = f"blk.{layer}."
        for norm in ("attn_norm", "attn_q_norm", "attn_k_norm", "ffn_norm"):
            floats(stem + norm, np.ones(HIDDEN))
        for projection in ("attn_q", "attn_k", "attn_v", "attn_output"):
            matrix(stem + projection, HIDDEN, HIDDEN)
        floats(f"{stem}ffn_gate_inp", rng.standard_normal((EXPERTS, HIDDEN)) * HIDDEN**-0.5)
        matrix(f"{stem}ffn_gate_exps", WIDTH, HIDDEN, EXPERTS)
        matrix(f"{stem}ffn_up_exps", WIDTH, HIDDEN, EXPERTS)
        matrix(f"{stem}ffn_down_exps", HIDDEN, WIDTH, EXPERTS)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(path)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama", type=Path, required=True, help="folder with llama-bench and llama-batched-bench")
    parser.add_argument("--scratch", type=Path, required=True, help="folder for the random file")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--measures", nargs="+", choices=list(MEASURES), default=list(MEASURES))
    parser.add_argument("--no-result", action="store_true", help="print figures, write no result file")
    args = parser.parse_args()
    path = write_mixture(args.scratch / f"olmoe-1b-7b-random-{KIND}.gguf")
    engines: dict[str, Engine] = {"twostroke": Ours(path, max_model_len=1024), "llama.cpp": Llama(args.llama, path)}
    found: dict[str, dict[str, list[float]]] = {name: {engine: [] for engine in engines} for name in args.measures}
    for _ in range(args.rounds):
        for name in args.measures:
            for engine, runner in engines.items():
                found[name][engine].append(MEASURES[name](runner))
                print(f"{name:12} {engine:10} {found[name][engine][-1]:8.2f} tokens/s", flush=True)
    medians = {name: {engine: median(values) for engine, values in rows.items()} for name, rows in found.items()}
    ratios = {name: rows["twostroke"] / rows["llama.cpp"] for name, rows in medians.items()}
    for name, ratio in ratios.items():
        print(f"{name:12} {ratio:.2f} x, at least {LIMITS[name]} wanted{'' if ratio >= LIMITS[name] else ': missed'}")
    if not args.no_result:
        command = f"experts --llama BUILD/bin --scratch FOLDER --rounds {args.rounds}"
        save("experts", command, {"tokens_per_s": medians, "ratio": ratios, "limits": LIMITS, "rounds": found})


if __name__ == "__main__":
    main()
