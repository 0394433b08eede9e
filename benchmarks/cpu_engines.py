"""The engines of benchmarks.cpu behind one interface: tokens/s of decode and of prefill."""

from __future__ import annotations

import json
import random
import subprocess
import time
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import torch

from benchmarks.peers import transformers_llama
from twostroke import LLM, SamplingParams
from twostroke.hardware import usable_cores

VOCAB = 49_000
THREADS = usable_cores()


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


class Engine(Protocol):
    """tokens/s. Every engine has run once before it is measured; the best of `repeats` counts."""

    def decode(self, batch: int, context: int, tokens: int, repeats: int = 1) -> float: ...

    def prefill(self, length: int, repeats: int = 1) -> float: ...


class Ours:
    """twostroke through its Python API, scheduling and sampling included."""

    def __init__(self, path: Path, **settings: Any):
        self.llm = LLM(path, prefix_cache=False, speculate="off", **settings)
        self._decode(1, 64, 8)

    def decode(self, batch: int, context: int, tokens: int, repeats: int = 1) -> float:
        return max(self._decode(batch, context, tokens) for _ in range(repeats))

    def prefill(self, length: int, repeats: int = 1) -> float:
        return max(self._prefill(length) for _ in range(repeats))

    def _decode(self, batch: int, context: int, tokens: int) -> float:
        prompts = [prompt(context, seed) for seed in range(batch)]
        outputs = self.llm.generate(prompts, greedy(tokens))
        last_start = max(out.timeline.token_times[0] for out in outputs)  # from here on all of them decode
        first_end = min(out.timeline.token_times[-1] for out in outputs)
        written = sum(last_start < moment <= first_end for out in outputs for moment in out.timeline.token_times)
        return written / (first_end - last_start)

    def _prefill(self, length: int) -> float:
        return length / self.llm.generate([prompt(length, length)], greedy(1))[0].timeline.prefill


def decode_in_turns(engines: dict[str, Ours], context: int, turns: int = 24, tokens: int = 8) -> dict[str, float]:
    """tokens/s of one stream of each engine, in turns of a few tokens, for differences below the machine's drift. The
    first token of a turn does not count: the caches hold the other engines' data."""
    streams = {
        name: engine.llm.stream(prompt(context, 0), greedy(turns * tokens + 1)) for name, engine in engines.items()
    }
    times: dict[str, list[float]] = {name: [] for name in engines}
    for stream in streams.values():
        next(stream)
    for _ in range(turns):
        for name, stream in streams.items():
            next(stream)
            start = time.perf_counter()
            for _ in range(tokens - 1):
                next(stream)
            times[name].append((time.perf_counter() - start) / (tokens - 1))
    for stream in streams.values():
        stream.close()
    return {name: 1 / median(values) for name, values in times.items()}


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)


class Llama:
    """llama.cpp's own benchmarks. Its threads spin while they wait: when another process takes a core for a moment, its
    speed falls to a tenth."""

    def __init__(self, folder: Path, model: Path, flash: bool = True):
        self.folder, self.model, self.flash = folder, model, flash

    def decode(self, batch: int, context: int, tokens: int, repeats: int = 1) -> float:
        if batch == 1:
            rows = self._bench("-p", 0, "-n", tokens, "-d", context, "-r", repeats)
            return float(max(rows[0]["samples_ts"]))
        room = batch * (context + tokens + 8)
        sizes = ("-npp", context, "-ntg", tokens, "-npl", batch, "-c", room)
        rows = self._run("llama-batched-bench", *sizes, "--output-format", "jsonl")
        return float(rows[0]["speed_tg"])

    def prefill(self, length: int, repeats: int = 1) -> float:
        return float(max(self._bench("-p", length, "-n", 0, "-b", 2048, "-ub", 512, "-r", repeats)[0]["samples_ts"]))

    def _bench(self, *arguments: str | int) -> list[dict[str, Any]]:
        return self._run("llama-bench", *arguments, "-o", "jsonl")

    def _run(self, tool: str, *arguments: str | int) -> list[dict[str, Any]]:
        flash = str(int(self.flash)) if tool == "llama-bench" else ("on" if self.flash else "off")
        fixed = [str(self.folder / tool), "-m", str(self.model), "-t", str(THREADS), "-fa", flash]
        output = subprocess.run([*fixed, *map(str, arguments)], capture_output=True, text=True, check=True).stdout
        return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


class Onnx:
    """ONNX Runtime GenAI in a process of its own, with a Python that has it installed."""

    def __init__(self, python: Path, folder: Path):
        self.fixed = [str(python), str(Path(__file__).with_name("onnx_peer.py")), str(folder), str(THREADS)]

    def decode(self, batch: int, context: int, tokens: int, repeats: int = 1) -> float:
        return self._run(repeats, "decode", batch, context, tokens)

    def prefill(self, length: int, repeats: int = 1) -> float:
        return self._run(repeats, "prefill", length)

    def _run(self, *arguments: str | int) -> float:
        command = [*self.fixed, *map(str, arguments)]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return float(json.loads(output.splitlines()[-1])["tokens_per_s"])


class Transformers:
    """transformers, float32, eager, on the same file's dequantized weights."""

    def __init__(self, path: Path):
        self.model = transformers_llama(path)
        self._decode(1, 64, 4)

    def decode(self, batch: int, context: int, tokens: int, repeats: int = 1) -> float:
        return max(self._decode(batch, context, tokens) for _ in range(repeats))

    def prefill(self, length: int, repeats: int = 1) -> float:
        return max(self._prefill(length) for _ in range(repeats))

    @torch.inference_mode()
    def _decode(self, batch: int, context: int, tokens: int) -> float:
        tokens = min(tokens, 24)
        out = self.model(torch.tensor([prompt(context, seed) for seed in range(batch)]), logits_to_keep=1)
        start = time.perf_counter()
        for _ in range(tokens):
            newest = out.logits[:, -1:].argmax(-1)
            out = self.model(newest, past_key_values=out.past_key_values)
        return batch * tokens / (time.perf_counter() - start)

    @torch.inference_mode()
    def _prefill(self, length: int) -> float:
        tokens = torch.tensor([prompt(length, length)])
        start = time.perf_counter()
        self.model(tokens, logits_to_keep=1)
        return length / (time.perf_counter() - start)
