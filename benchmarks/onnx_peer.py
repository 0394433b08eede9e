"""One measurement of ONNX Runtime GenAI, in a process and an environment of its own, without twostroke.

    python benchmarks/onnx_peer.py FOLDER THREADS REPEATS decode BATCH CONTEXT TOKENS
    python benchmarks/onnx_peer.py FOLDER THREADS REPEATS prefill LENGTH

FOLDER is what its model builder wrote. Prints the best tokens/s of the repeats and the peak memory in bytes as JSON.
"""

from __future__ import annotations

import json
import random
import resource
import sys
import time

import numpy as np
import onnxruntime_genai as og

VOCAB = 49_000


def prompts(batch: int, length: int) -> np.ndarray:
    rng = random.Random(length)
    return np.array([[rng.randrange(VOCAB) for _ in range(length)] for _ in range(batch)], np.int32)


def start(model: og.Model, batch: int, length: int, room: int) -> og.Generator:
    params = og.GeneratorParams(model)  # equal lengths: no end token is chosen
    params.set_search_options(max_length=length + room, min_length=length + room, batch_size=batch, do_sample=False)
    return og.Generator(model, params)


def measure(model: og.Model, kind: str, *sizes: int) -> float:
    if kind == "prefill":
        (length,) = sizes
        generator = start(model, 1, length, 2)
        tokens = prompts(1, length)
        began = time.perf_counter()
        generator.append_tokens(tokens)
        generator.generate_next_token()
        return length / (time.perf_counter() - began)
    batch, context, count = sizes
    generator = start(model, batch, context, count + 2)
    generator.append_tokens(prompts(batch, context))
    generator.generate_next_token()
    began = time.perf_counter()
    for _ in range(count):
        generator.generate_next_token()
    return batch * count / (time.perf_counter() - began)


def main() -> None:
    folder, threads, repeats, kind, *sizes = sys.argv[1:]
    config = og.Config(folder)
    config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": int(threads)}}}}))
    model = og.Model(config)
    measure(model, "decode", 1, 64, 4)
    speed = max(measure(model, kind, *map(int, sizes)) for _ in range(int(repeats)))
    print(json.dumps({"tokens_per_s": speed, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}))


if __name__ == "__main__":
    main()
