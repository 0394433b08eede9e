"""Embeddings beside sentence-transformers, transformers and onnxruntime on the same weights, in turns.

    python -m benchmarks.embeddings --onnx FOLDER [--python OTHER_PYTHON]

FOLDER holds model.onnx and tokenizer.json of all-MiniLM-L6-v2 in float32. OTHER_PYTHON is an interpreter that has
onnxruntime and sentence-transformers, if this one has not. Every engine runs in a process of its own on as many threads
as there are cores; they take turns, so that all of them meet the same moments of a busy machine. Threads of an engine
may spin after its turn and take a core from the next one: so the processes of the others are stopped (SIGSTOP). The
first batch of a turn is not counted: it meets cold caches and threads that sleep.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

MODEL = "all-minilm-l6-v2"
ENGINES = ("twostroke", "onnxruntime", "sentence-transformers", "transformers")
SIZES = {1: 40, 32: 8}  # texts of a batch: rounds
REPEATS = 3  # of a batch in each round
TEXTS = Path(__file__).parent / "data" / "wikitext2_excerpt.txt"


# ---- one engine, in its own process ---------------------------------------------------------------------------------


def make(engine: str, model: str, onnx: str) -> Any:
    if engine == "twostroke":
        from twostroke.embed.embedder import Embedder

        return Embedder.open(Path(model)).embed
    if engine == "onnxruntime":
        return onnx_model(onnx)
    if engine == "sentence-transformers":
        from sentence_transformers import SentenceTransformer

        made = SentenceTransformer(model, device="cpu")
        return lambda texts: made.encode(texts, batch_size=len(texts), show_progress_bar=False)
    return plain_transformers(model)


def onnx_model(folder: str) -> Any:
    import numpy as np
    import onnxruntime
    import tokenizers

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = len(os.sched_getaffinity(0))
    session = onnxruntime.InferenceSession(f"{folder}/model.onnx", options)
    encoder = tokenizers.Tokenizer.from_file(f"{folder}/tokenizer.json")
    encoder.no_truncation()
    encoder.enable_padding()
    names = [one.name for one in session.get_inputs()]

    def embed(texts: list[str]) -> Any:
        batch = encoder.encode_batch(texts)
        ids = np.array([one.ids for one in batch])
        mask = np.array([one.attention_mask for one in batch])
        given = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
        hidden = session.run(None, {name: given[name] for name in names})[0]
        mean = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
        return mean / np.linalg.norm(mean, axis=1, keepdims=True)

    return embed


def plain_transformers(model: str) -> Any:
    import torch
    from transformers import AutoModel, AutoTokenizer

    made, encoder = AutoModel.from_pretrained(model).eval(), AutoTokenizer.from_pretrained(model)

    def embed(texts: list[str]) -> Any:
        with torch.inference_mode():
            batch = encoder(texts, padding=True, return_tensors="pt")
            hidden, mask = made(**batch).last_hidden_state, batch["attention_mask"][..., None]
            return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1)).numpy()

    return embed


def serve(engine: str, model: str, onnx: str) -> None:
    """Reads texts as a line of JSON, then numbers of texts; writes seconds."""
    texts = json.loads(sys.stdin.readline())
    embed = make(engine, model, onnx)
    vector = embed(texts[:1])[0]
    print(json.dumps([float(value) for value in vector]), flush=True)
    for line in sys.stdin:
        count, seconds = int(line), []
        embed(texts[:count])
        for _ in range(REPEATS):
            began = time.perf_counter()
            embed(texts[:count])
            seconds.append(time.perf_counter() - began)
        print(json.dumps(seconds), flush=True)


# ---- the race -------------------------------------------------------------------------------------------------------


class Racer:
    def __init__(self, engine: str, python: str, model: str, onnx: str, texts: list[str]):
        command = [python, "-m", "benchmarks.embeddings", "--serve", engine, "--model", model, "--onnx", onnx]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.vector: list[float] = json.loads(self.ask(json.dumps(texts)))
        self.process.send_signal(signal.SIGSTOP)

    def ask(self, line: str) -> str:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError("it did not start")
        return answer

    def run(self, count: int) -> list[float]:
        self.process.send_signal(signal.SIGCONT)
        found: list[float] = json.loads(self.ask(str(count)))
        self.process.send_signal(signal.SIGSTOP)
        return found

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def sentences(count: int) -> list[str]:
    found = [line.strip() for line in TEXTS.read_text().replace(" . ", " .\n").splitlines()]
    return [line for line in found if 40 < len(line) < 90][:count]


def race(racers: dict[str, Racer]) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for count, rounds in SIZES.items():
        seconds: dict[str, list[float]] = {name: [] for name in racers}
        for _ in range(rounds):
            for name, racer in racers.items():
                seconds[name] += racer.run(count)
        best = {name: min(times) for name, times in seconds.items()}
        middle = {name: statistics.median(times) for name, times in seconds.items()}
        peers = [name for name in racers if name != "twostroke"]
        results[str(count)] = {
            "min_ms": {name: 1e3 * value for name, value in best.items()},
            "median_ms": {name: 1e3 * value for name, value in middle.items()},
            "times_the_best_peer_min": min(best[name] for name in peers) / best["twostroke"] if peers else None,
            "times_the_best_peer_median": min(middle[name] for name in peers) / middle["twostroke"] if peers else None,
        }
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--onnx", default="", help="folder with model.onnx and tokenizer.json")
    parser.add_argument("--python", default=sys.executable, help="an interpreter that has the other engines")
    parser.add_argument("--model", default="")
    parser.add_argument("--serve", choices=ENGINES)
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.serve:
        serve(given.serve, given.model, given.onnx)
        return
    from benchmarks.machine import save  # here: the other engines' interpreters need not have what it imports
    from twostroke.weights.catalog import fetch

    model, texts = str(fetch(MODEL)), sentences(max(SIZES))
    racers, missing = {}, {}
    for engine in given.engines.split(","):
        if engine == "onnxruntime" and not given.onnx:
            continue
        python = sys.executable if engine in ("twostroke", "transformers") else given.python
        try:
            racers[engine] = Racer(engine, python, model, given.onnx, texts)
        except (RuntimeError, ValueError) as error:
            missing[engine] = str(error)
    batches = race(racers)
    for racer in racers.values():
        racer.end()
    own = racers["twostroke"].vector
    cosines = {name: sum(a * b for a, b in zip(own, racer.vector, strict=True)) for name, racer in racers.items()}
    figures = {
        "model": MODEL, "texts": "sentences of 40 to 90 characters", "batches": batches,
        "cosine_with_twostroke": cosines, "missing": missing,
    }  # fmt: skip
    save("embeddings", "embeddings --onnx FOLDER --python PYTHON", figures, given.out)


if __name__ == "__main__":
    main()
