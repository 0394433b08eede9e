"""The server on a GPU from its first second: bursts with an empty cache of compiled kernels, and with a full one.

    python -m benchmarks.gpu_served [--model MODEL | --shape 8b] [--vocabulary N] [--scale S] [-s NAME=VALUE]

The server is a process, its clients another one. Right after "ready" all loads are sent, one burst after the other, and
then all of them again with new prompts. What the first round takes longer than the second was made while people waited:
kernels compiled, graphs captured, the library's plans. Gaps and TTFT are seen from the clients' side. The longest step
with a stream in it is from the log of steps. `--shape` writes a folder with random weights and serves that.
`--scale` makes prompts and numbers of requests smaller, for small machines. The result is written after every server,
and the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.machine import save
from benchmarks.random_folder import SHAPES, write_folder
from benchmarks.raw_client import RawClient
from twostroke.bench.record import RequestRecord
from twostroke.cost.simulation.trace import Arrival, PromptPart
from twostroke.weights.catalog import DEFAULT, cache_folder

READY_SECONDS = 120
TAIL = 3000  # characters of the server's log that a failure shows
MAX_GAP = 0.05  # the setting's default


class Load(NamedTuple):
    requests: int
    prompt: int
    new: int
    shared: int = 0  # tokens of the prompt that all of them begin with
    shortest: int = 0  # lengths are drawn out from here to `prompt`
    more: tuple[dict[str, Any], ...] = ()  # fields of the requests, which take them in turns


SAMPLED = {"temperature": 0.8, "top_p": 0.9, "top_k": 40}
SCORED = {"logprobs": 5}
PENALIZED = {"temperature": 0.7, "frequency_penalty": 0.3, "repetition_penalty": 1.1}
GRAMMAR = {"structured_outputs": {"regex": "[a-z ]{200,400}"}, "ignore_eos": False}
LOADS: dict[str, Load] = {
    "256 × 512": Load(256, 512, 128),
    "1 × 8,000": Load(1, 8000, 32),
    "32 × 4,096 shared": Load(32, 4120, 64, shared=4096),
    "16 of 16 to 6,000": Load(16, 6000, 64, shortest=16),
    "64 × 1,024": Load(64, 1024, 128),
    "20 sampled": Load(20, 64, 64, more=(SAMPLED,)),
    "64 with log probabilities": Load(64, 64, 64, more=(SCORED,)),
    "64 with penalties": Load(64, 64, 64, more=(PENALIZED,)),
    "16 with a grammar": Load(16, 64, 64, more=(GRAMMAR,)),
    "60 of all kinds": Load(60, 1024, 128, shortest=16, more=({}, SAMPLED, SCORED, PENALIZED, GRAMMAR)),
    "1 × 32,000": Load(1, 32_000, 32),
}


def arrivals(name: str, turn: int, scale: float) -> list[Arrival]:
    """The prompts of another turn are new."""
    load, number = LOADS[name], list(LOADS).index(name)
    count = max(1, round(load.requests * scale)) if load.requests > 1 else 1
    found = []
    for one in range(count):
        length = load.prompt
        if load.shortest:
            length = load.shortest + (load.prompt - load.shortest) * one // max(1, count - 1)
        length, same = max(16, round(length * scale)), round(load.shared * scale)
        own = PromptPart(1_000_000 + 100_000 * turn + 1000 * number + one, max(1, length - same))
        parts = (PromptPart(1000 * turn + number, same), own) if same else (own,)
        found.append(Arrival(0.0, parts, max(4, round(load.new * scale))))
    return found


def ask(url: str, vocabulary: int, name: str, load: list[Arrival]) -> list[RequestRecord]:
    return RawClient(url, vocabulary, *LOADS[name].more).open_loop(load)


@contextmanager
def served(words: list[str], home: str) -> Iterator[tuple[str, float]]:
    """The server's address, and the seconds from its start until it was ready. Its log is shown if anything fails."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "TRITON_CACHE_DIR": home}
    command = [sys.executable, "-m", "twostroke", "serve", *words, "--port", str(port), "--max-queue", "2000"]
    with tempfile.TemporaryFile() as log:
        began = time.perf_counter()
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        url = f"http://127.0.0.1:{port}"
        try:
            wait_until_ready(url, process)
            yield url, time.perf_counter() - began
        except Exception:
            show_end(log)
            raise
        finally:
            process.terminate()
            process.wait(60)
        show_end(log, 600)


def show_end(log: Any, characters: int = TAIL) -> None:
    log.seek(0)
    print("the server's log ends with:\n" + log.read().decode(errors="replace")[-characters:], flush=True)


def wait_until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    ends = time.perf_counter() + READY_SECONDS
    while time.perf_counter() < ends:
        try:
            urllib.request.urlopen(url + "/health/ready", timeout=1).close()
            return
        except (urllib.error.URLError, OSError):
            if process.poll() is not None:
                raise RuntimeError(f"the server ended with status {process.returncode} before it was ready") from None
            time.sleep(0.05)
    raise RuntimeError(f"the server was not ready after {READY_SECONDS} s")


def seen(records: list[RequestRecord]) -> dict[str, Any]:
    """What the clients saw of one burst."""
    failed = [record.error for record in records if record.error]
    good = [record for record in records if not record.error]
    gaps = [b - a for record in good for a, b in zip(record.pieces, record.pieces[1:], strict=False)]
    first = [record.ttft for record in good if record.ttft is not None]
    ended = max((record.end or 0.0 for record in good), default=0.0)
    began = min((record.sent for record in good), default=0.0)
    return {
        "worst_gap_ms": round(1e3 * max(gaps, default=0.0), 1),
        "worst_ttft_ms": round(1e3 * max(first, default=0.0), 1),
        "tokens_per_s": round(sum(record.output for record in good) / max(1e-9, ended - began), 1),
        "failed": failed[:3],
    }  # fmt: skip


class ServerSteps:
    """The server's log of its steps, one burst after the other."""

    def __init__(self, url: str):
        self.url, self.last = url + "/twostroke/steps?limit=1024", 0

    def burst(self) -> dict[str, Any]:
        """Of the steps since the last call."""
        with urllib.request.urlopen(f"{self.url}&since={self.last}", timeout=30) as answer:
            document = json.load(answer)
        self.last = document["last"]
        carried = [step["seconds"] for step in document["steps"] if step["decode_tokens"]]
        return {"steps": len(document["steps"]), "longest_step_ms": round(1e3 * max(carried, default=0.0), 1)}


def measure(words: list[str], home: str, vocabulary: int, scale: float, longest: int) -> dict[str, Any]:
    names = [name for name, load in LOADS.items() if load.prompt + load.new <= longest]
    loads: dict[str, Any] = {name: {} for name in names}
    with served(words, home) as (url, ready), ProcessPoolExecutor(1, get_context("spawn")) as clients:
        print(f"ready after {ready:.1f} s", flush=True)
        log = ServerSteps(url)
        for turn, when in enumerate(("first", "second")):
            for name in names:
                burst = clients.submit(ask, url, vocabulary, name, arrivals(name, turn, scale)).result()
                loads[name][when] = {**seen(burst), **log.burst()}
                print(f"{when:7s} {name:26s} {loads[name][when]}", flush=True)
    return {"ready_s": round(ready, 2), "loads": loads, **worst(loads)}


def worst(loads: dict[str, Any]) -> dict[str, Any]:
    """The figures that the first round is judged by."""
    gaps = [load["first"]["worst_gap_ms"] for load in loads.values()]
    later = [load["first"]["worst_ttft_ms"] / max(1e-9, load["second"]["worst_ttft_ms"]) for load in loads.values()]
    return {
        "worst_gap_over_max_gap": round(max(gaps) / 1e3 / MAX_GAP, 2),
        "worst_ttft_over_later": round(max(later), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT)
    parser.add_argument("--shape", choices=SHAPES, help="serve random weights of this shape")
    parser.add_argument("--folder", type=Path, help="where --shape writes, or wrote before")
    parser.add_argument("--vocabulary", type=int, default=49_152)
    parser.add_argument("--longest", type=int, default=8192, help="leave out loads with longer requests")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("-s", dest="settings", action="append", default=[], metavar="NAME=VALUE")
    args = parser.parse_args()
    cache_folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as home:
        model = args.model
        if args.shape:
            folder = args.folder or Path(home) / "model"
            if not (folder / "model.safetensors.index.json").exists():
                from torch.cuda import is_available

                write_folder(folder, args.shape, "cuda" if is_available() else "cpu")
            model, args.vocabulary = str(folder), SHAPES[args.shape]["vocab_size"]
        words = [model, *(word for setting in args.settings for word in ("-s", setting))]
        result: dict[str, Any] = {"model": args.shape or model, "settings": args.settings, "scale": args.scale}
        for name in ("empty cache", "full cache"):
            print(name, flush=True)
            result[name] = measure(words, str(Path(home) / "kernels"), args.vocabulary, args.scale, args.longest)
            save("gpu-served", "gpu_served", result, args.json)


if __name__ == "__main__":
    main()
