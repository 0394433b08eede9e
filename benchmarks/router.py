"""The router of a deployment: decisions a second on one core, and memory for the names of blocks.

    python -m benchmarks.router

Prompts of 1,000 tokens share beginnings of 30 blocks in groups, as conversations do. A third of the workers computes
prompts, the others write; or all do both, and every place is taken. Loads are reported anew for one worker before each
decision. Then the prompts of the traces at full length: decisions alone, and all that the router does for a request,
the names of its blocks and of its answer's. Some rows are run with the router's core in Python too.

Each rate is given over the whole time and, as "quiet", for the fastest tenth of slices of 100 decisions: what the core
does while its neighbours leave it alone.
"""

from __future__ import annotations

import gc
import random
import resource
import secrets
import time
from array import array
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.machine import save
from twostroke.bench.workload import shipped_trace
from twostroke.cluster.core import PythonCore, RouterCore
from twostroke.cluster.native_core import CompiledCore
from twostroke.cluster.router import Ask, Link, Role, Router, WorkerLoad
from twostroke.kv.addresses import QuickNames
from twostroke.ops.interface import BLOCK

BLOCKS = 62  # of a prompt
MANY = 863  # of a long one, as in the Mooncake trace
SHARED = 30
GROUPS = 200
SECONDS = 2.0
SLICE = 100  # decisions
CORES: dict[str, type[RouterCore]] = {"native": CompiledCore, "python": PythonCore}
BLOCK_BYTES = 1 << 20


def load(rng: random.Random, full: bool = False) -> WorkerLoad:
    streams = 32 + rng.randrange(8) if full else rng.randrange(8)
    return WorkerLoad(rng.randrange(4000), streams, 32, 1e-4, 0.01, 5.0, 1 << 16)


def rates(slices: list[float]) -> dict[str, int]:
    """A second, from the seconds of slices of SLICE decisions."""
    quiet = sorted(slices)[len(slices) // 10]
    return {"decisions": round(SLICE * len(slices) / sum(slices)), "quiet": round(SLICE / quiet)}


def decisions(workers: int, full: bool = False, core: str = "native") -> dict[str, int]:
    """full: workers do both, and new answers wait for a place."""
    rng = random.Random(1)
    router = Router(BLOCK_BYTES, Link(10e9, 0.002), core=CORES[core]())
    names = [f"worker-{number}" for number in range(workers)]
    roles = [Role.PREFILL if number % 3 == 0 and workers > 1 else Role.DECODE for number in range(workers)]
    roles = [Role.BOTH] * workers if full else roles
    for name, role in zip(names, roles, strict=True):
        router.update(name, role, load(rng, full))
    beginnings = [[secrets.token_bytes(8) for _ in range(SHARED)] for _ in range(GROUPS)]
    asks = [
        Ask(1000, rng.choice(beginnings) + [secrets.token_bytes(8) for _ in range(BLOCKS - SHARED)])
        for _ in range(5000)
    ]
    loads = [load(rng, full) for _ in range(1000)]
    done, slices = 0, list[float]()
    while sum(slices) < SECONDS:
        began = time.process_time()
        for _ in range(SLICE):
            place = done % workers
            router.update(names[place], roles[place], loads[done % 1000])
            router.choose(asks[done % 5000])
            done += 1
        slices.append(time.process_time() - began)
    return rates(slices)


def resident() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def memory(length: int, core: str, blocks: int = 2_000_000) -> float:
    """Bytes for each block of prompts of so many blocks that a hundred workers have."""
    router = Router(BLOCK_BYTES, Link(), core=CORES[core]())
    for number in range(100):
        router.update(f"worker-{number}", Role.BOTH, WorkerLoad())
    before = resident()
    for number in range(blocks // length):
        router.stored(f"worker-{number % 100}", [secrets.token_bytes(8) for _ in range(length)])
    return (resident() - before) / blocks


def in_a_fresh_process(length: int, core: str) -> float:
    """`memory` where none is free from before."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(memory, length, core).result()


def on_trace(trace: str, workers: int, core: str = "native") -> dict[str, Any]:
    """Requests a second: decisions alone, and with the names of blocks and with what is stored at the end."""
    rows = shipped_trace(trace)
    prompts = [row.tokens() for row in rows]
    answers = [[7] * (row.output - 1) for row in rows]
    router = Router(BLOCK_BYTES, Link(10e9, 0.002), Link(10e9, 0.002), CORES[core]())
    roles = [Role.PREFILL if number % 3 == 0 else Role.DECODE for number in range(workers)]
    rng, hasher = random.Random(1), QuickNames("router")
    loads = [load(rng) for _ in range(1000)]
    for number, role in enumerate(roles):
        router.update(f"worker-{number}", role, loads[number % 1000])
    done, slices, began = 0, [0.0], time.process_time()
    while (spent := time.process_time() - began) < 2 * SECONDS:
        place, one = done % workers, done % len(rows)
        names = array("q")
        hasher.number(names, prompts[one], b"", len(prompts[one]) // BLOCK)
        worker, ask = f"worker-{place}", Ask(len(prompts[one]), names[:])
        before = time.process_time()
        router.update(worker, roles[place], loads[done % 1000])
        route = router.choose(ask)
        if done and done % SLICE == 0:
            slices.append(0.0)
        slices[-1] += time.process_time() - before
        assert route is not None
        whole = prompts[one] + answers[one]
        hasher.number(names, whole, b"", len(whole) // BLOCK)
        router.stored(route.decode, names)
        done += 1
    blocks = sum(len(tokens) // BLOCK for tokens in prompts) / len(prompts)
    whole_slices = slices[: done // SLICE]
    found = {"blocks_of_a_prompt": round(blocks), **rates(whole_slices), "requests": round(done / spent)}
    print(f"{trace}, {workers} workers, {core}: {found}", flush=True)
    return found


def main() -> None:
    result: dict[str, Any] = {"prompt_blocks": BLOCKS, "decisions_per_second": {}, "when_full": {}, "python": {}}
    for workers in (1, 3, 12, 30, 120, 1000, 4000, 10_000):
        free, full = decisions(workers), decisions(workers, True)
        result["decisions_per_second"][workers], result["when_full"][workers] = free, full
        print(f"{workers:6} workers: {free['decisions']:8,} decisions/s (quiet {free['quiet']:,}); "
              f"where all places are taken {full['decisions']:8,} (quiet {full['quiet']:,})", flush=True)  # fmt: skip
    for workers in (12, 10_000):
        result["python"][workers] = found = decisions(workers, core="python")
        print(f"{workers:6} workers: in Python {found['decisions']:,} (quiet {found['quiet']:,})", flush=True)
    traces = ("azure-conv", "mooncake")
    result["traces"] = {trace: {workers: on_trace(trace, workers) for workers in (12, 120, 10_000)} for trace in traces}
    result["traces_in_python"] = {trace: {10_000: on_trace(trace, 10_000, "python")} for trace in traces}
    result["bytes_per_block"] = {
        core: {length: round(in_a_fresh_process(length, core), 1) for length in (BLOCKS, MANY)} for core in CORES
    }
    print(f"bytes for each block, by the blocks of a prompt: {result['bytes_per_block']}")
    save("router", "router", result)


if __name__ == "__main__":
    main()
