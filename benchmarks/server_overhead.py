"""What serving costs beside the model: the wall time of a step at 16 streams over HTTP, and of the model's part alone.

    python -m benchmarks.server_overhead

The same 16 streams run twice: in process, where only launching and collecting the model's step is timed, and behind the
server with 16 clients, where the time from one step to the next is. The difference is everything else: scheduling, the
way between the processes, text, JSON, HTTP, and the cores that all of it takes from the model's threads. The clients
are told to sleep until their answers are whole, so that they take no part of the machine: the kernel holds what comes.

Machines drift by more than what is measured, so many short rounds take turns, each a pair of medians over the steps in
which all 16 streams advance, a moment apart. The result is the median of the pairs with its 95 % confidence interval
(order statistics: nothing is assumed of how the noise is spread). The last line is JSON.
"""

from __future__ import annotations

import json
import socket
import time
import urllib.request
from collections.abc import Sequence
from itertools import pairwise
from math import comb
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.raw_client import RawClient
from benchmarks.serving_servers import CONTEXT, SLOTS, VOCAB, started
from twostroke import LLM, SamplingParams
from twostroke.bench.prompts import token_ids
from twostroke.cost.trace import Arrival, Part
from twostroke.weights.catalog import DEFAULT

PROMPT, OUTPUT, ROUNDS = 64, 64, 21
LIMIT = 0.05
ROOM = 1 << 20  # bytes that the kernel may hold for a client


def streams(turn: int) -> list[Arrival]:
    return [Arrival(0.0, (Part(5_000_000 + turn * SLOTS + i, PROMPT),), OUTPUT) for i in range(SLOTS)]


def model_steps(llm: LLM, turn: int) -> list[float]:
    """Seconds of the model's part of each step in which all streams advance."""
    runner = llm.engine.core.runner
    launch, collect, times = runner.launch, runner.collect, []
    began = 0.0

    def timed_launch(plan: Any) -> Any:
        nonlocal began
        full = len(plan.works) == SLOTS and all(work.count == 1 for work in plan.works)
        began = time.perf_counter() if full else 0.0
        return launch(plan)

    def timed_collect(handle: Any) -> Any:
        result = collect(handle)
        if began:
            times.append(time.perf_counter() - began)
        return result

    runner.launch, runner.collect = timed_launch, timed_collect
    try:
        prompts = [token_ids(row, VOCAB) for row in streams(turn)]
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True))
    finally:
        runner.launch, runner.collect = launch, collect
    return times


def served_steps(url: str, pid: int, turn: int) -> tuple[list[float], list[float], float]:
    """Seconds from one such step to the next behind the server, those its engine counts for the step itself, and those
    of a core that the server's own process took for each token of an answer."""
    last, before = steps_after(url, 0, 1)["last"], cpu_seconds(pid)
    ask_and_sleep(url, turn)
    took = cpu_seconds(pid) - before
    steps = steps_after(url, last, 8 * OUTPUT)["steps"]
    full = [step for step in steps if step["decode_tokens"] == len(step["lanes"]) == SLOTS]
    walls = [b["time"] - a["time"] for a, b in pairwise(full) if b["number"] == a["number"] + 1]
    return walls, [step["seconds"] for step in full], took / OUTPUT


def ask_and_sleep(url: str, turn: int) -> None:
    """All streams at once, read when they have ended."""
    client = RawClient(url, VOCAB)
    sockets = []
    for row in streams(turn):
        sock = socket.create_connection((client.host, client.port))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, ROOM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, ROOM // 2)  # no waking for less, but for the end
        sock.sendall(client.request(row))
        sockets.append(sock)
    for sock in sockets:
        data = b""
        while part := sock.recv(ROOM):
            data += part
        sock.close()
        assert f'"completion_tokens":{OUTPUT}'.encode() in data, data[:200]


def steps_after(url: str, number: int, limit: int) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}/twostroke/steps?since={number}&limit={limit}", timeout=20) as answer:
        return json.loads(answer.read())


def cpu_seconds(pid: int) -> float:
    """Of a process with all its threads, as Linux counts them."""
    return sum(int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir()) / 1e9


def measure() -> dict[str, Any]:
    model, walls, counted, cpu = [], [], [], []
    with started("twostroke") as (url, process):
        llm = LLM(DEFAULT, max_requests=SLOTS, max_model_len=CONTEXT)
        served_steps(url, process.pid, 1000), model_steps(llm, 1001)  # first times
        for turn in range(ROUNDS):
            for served in ((True, False), (False, True))[turn % 2]:  # neither always comes first
                if not served:
                    model.append(median(model_steps(llm, 2 * turn)))
                    continue
                wall, own, took = served_steps(url, process.pid, 2 * turn + 1)
                cpu.append(took)
                walls.append(median(wall))
                counted.append(median(own))
    return judged(model, counted, walls, cpu)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Of the median, with at least 95 % confidence: how many of n values lie below it is a throw of n coins."""
    n, outside, skipped = len(values), 0.0, 0
    while skipped < (n - 1) // 2 and 2 * (outside + comb(n, skipped) / 2**n) <= 0.05:
        outside += comb(n, skipped) / 2**n
        skipped += 1
    ordered = sorted(values)
    least = max(0, skipped - 1)
    return ordered[least], ordered[n - 1 - least]


def judged(
    model: Sequence[float], counted: Sequence[float], walls: Sequence[float], cpu: Sequence[float]
) -> dict[str, Any]:
    """`within` is null where the interval holds the limit: then the machine was not steady enough to tell.
    `between_steps_share` is of one and the same run and hardly noisy, but knows nothing of cores that the server's
    process takes from the model's threads; `server_cpu_ms` is what it takes of them for a step, requests included."""
    shares = [1 - alone / served for alone, served in zip(model, walls, strict=True)]
    low, high = interval(shares)
    return {
        "streams": SLOTS,
        "rounds": len(shares),
        "model_step_ms": 1000 * median(model),
        "engine_step_ms": 1000 * median(counted),
        "served_step_ms": 1000 * median(walls),
        "between_steps_share": median(1 - own / wall for own, wall in zip(counted, walls, strict=True)),
        "server_cpu_ms": 1000 * median(cpu),
        "overhead_share": median(shares),
        "overhead_interval": [low, high],
        "overhead_of_each_round": shares,
        "limit": LIMIT,
        "within": True if high <= LIMIT else False if low > LIMIT else None,
    }


if __name__ == "__main__":
    print(json.dumps(measure()))
