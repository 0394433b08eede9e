"""The server on a GPU from its first second: bursts with an empty cache of compiled kernels, and with a full one.

    python -m benchmarks.gpu_served [--model MODEL] [--vocabulary N] [--scale S] [-s NAME=VALUE]

The server is a process, its clients another one. Right after "ready" each load is sent twice. What the first time takes
longer than the second was made while people waited: kernels compiled, graphs captured, the library's plans. Gaps and
TTFT are seen from the clients' side. `--scale` makes prompts and numbers of requests smaller, for small machines. The
last line is JSON.
"""

from __future__ import annotations

import argparse
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
from typing import Any

from benchmarks.machine import save
from benchmarks.raw_client import RawClient
from twostroke.bench.record import Record
from twostroke.cost.simulation.trace import Arrival, Part
from twostroke.weights.catalog import DEFAULT, cache_folder

READY_SECONDS = 300
LOADS: dict[str, tuple[int, int, int, int]] = {  # requests, tokens of a prompt, of it shared, new tokens
    "256 × 512": (256, 512, 0, 128),
    "1 × 8,000": (1, 8000, 0, 32),
    "32 × 4,096 shared": (32, 4120, 4096, 64),
    "16 of 16 to 6,000": (16, 6000, 0, 64),
    "64 × 1,024": (64, 1024, 0, 128),
}


def arrivals(name: str, turn: int, scale: float) -> list[Arrival]:
    """The prompts of another turn are new. "16 to" draws the lengths out over the range."""
    count, prompt, shared, new = LOADS[name]
    count = max(1, round(count * scale)) if count > 1 else 1
    found = []
    for number in range(count):
        length = prompt if "to" not in name else 16 + (prompt - 16) * number // max(1, count - 1)
        length, same = max(16, round(length * scale)), round(shared * scale)
        own = Part(1_000_000 + 10_000 * turn + 1000 * len(name) + number, max(1, length - same))
        parts = (Part(len(name) + turn, same), own) if same else (own,)
        found.append(Arrival(0.0, parts, max(4, round(new * scale))))
    return found


def ask(url: str, vocabulary: int, load: list[Arrival]) -> list[Record]:
    return RawClient(url, vocabulary).open_loop(load)


@contextmanager
def served(words: list[str], home: str) -> Iterator[tuple[str, float]]:
    """The server's address, and the seconds from its start until it was ready."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "TRITON_CACHE_DIR": home}
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "twostroke", "serve", *words, "--port", str(port), "--max-queue", "2000"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment,
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_ready(url, process)
        yield url, time.perf_counter() - began
    finally:
        process.terminate()
        process.wait(60)


def wait_until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    for _ in range(20 * READY_SECONDS):
        try:
            urllib.request.urlopen(url + "/health/ready", timeout=1).close()
            return
        except (urllib.error.URLError, OSError):
            if process.poll() is not None:
                raise RuntimeError("the server did not start: run `twostroke serve` by hand to see why") from None
            time.sleep(0.05)
    raise RuntimeError(f"the server was not ready after {READY_SECONDS} s")


def seen(records: list[Record]) -> dict[str, Any]:
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


def measure(words: list[str], home: str, vocabulary: int, scale: float) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with served(words, home) as (url, ready), ProcessPoolExecutor(1, get_context("spawn")) as clients:
        print(f"ready after {ready:.1f} s", flush=True)
        found["ready_s"] = round(ready, 2)
        for name in LOADS:
            turns = [
                seen(clients.submit(ask, url, vocabulary, arrivals(name, turn, scale)).result()) for turn in (0, 1)
            ]
            found[name] = {"first": turns[0], "second": turns[1]}
            print(f"{name:20s} first {turns[0]}  second {turns[1]}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT)
    parser.add_argument("--vocabulary", type=int, default=49_152)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("-s", dest="settings", action="append", default=[], metavar="NAME=VALUE")
    args = parser.parse_args()
    words = [args.model, *(word for setting in args.settings for word in ("-s", setting))]
    result: dict[str, Any] = {"model": args.model, "settings": args.settings, "scale": args.scale}
    cache_folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as home:
        for name in ("empty cache", "full cache"):
            print(name, flush=True)
            result[name] = measure(words, home, args.vocabulary, args.scale)
    save("gpu-served", "gpu_served", result, args.json)


if __name__ == "__main__":
    main()
