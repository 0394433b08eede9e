"""What serving costs beside the model: the wall time of a step at 16 streams over HTTP, and of the model's part alone.

    python -m benchmarks.server_overhead

The machine's speed drifts by more than the difference, so both are measured in the same engine process within a tenth
of a second: after every three steps that are served to 16 clients, the model's part of the last one is run three more
times without any request, while the server has nothing to do (bare_steps.py). A served step is timed from its start to
the start of the next, so the difference is everything but the model: scheduling, messages between the processes, text,
JSON, HTTP, and the processor time that all of this takes from the model's threads. The clients sleep until their
answers are complete, so that they use no processor time: the kernel buffers the data.

A round is about sixty such turns. Its overhead is the difference of the two means, so that rare events count too; the
result is the median of the rounds with its 95 % confidence interval. A few control rounds follow with a server that
wastes two more milliseconds of a core at each step. Where the measurement does not show enough of them, no result is
claimed. Under five minutes. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import tempfile
from collections.abc import Sequence
from itertools import accumulate, combinations_with_replacement
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from benchmarks.bare_steps import TURNS
from benchmarks.machine import save
from benchmarks.raw_client import RawClient
from benchmarks.serving_servers import SLOTS, VOCAB, started_by
from twostroke.cost.simulation.trace import Arrival, PromptPart
from twostroke.hardware import usable_cores

PROMPT, OUTPUT = 64, 204  # tokens
ROUNDS, CONTROL_ROUNDS = 21, 10
CONTROL_MS = 2.0  # that the server wastes at each step of the control rounds
LIMIT = 0.05
ROOM = 1 << 20  # bytes that the kernel buffers for a client

ENGINE = (
    "import twostroke.remote.process as p; "
    "p.BOOT = p.BOOT.replace('from twostroke', 'import benchmarks.bare_steps as b; b.install(); from twostroke')"
)
WASTE = """
import time, twostroke.remote.async_engine as a
report = a.AsyncEngine.on_report
def wasteful(self, step):
    report(self, step)
    until = time.perf_counter() + {seconds}
    while step.events and time.perf_counter() < until:
        pass
a.AsyncEngine.on_report = wasteful
"""


class Round(NamedTuple):
    """Mean seconds of a step, and processor seconds of the server's process for each step."""

    served: float
    bare: float
    cpu: float

    @property
    def overhead(self) -> float:
        return self.served - self.bare

    @property
    def share(self) -> float:
        return self.overhead / self.served


def streams(turn: int) -> list[Arrival]:
    return [Arrival(0.0, (PromptPart(5_000_000 + turn * SLOTS + i, PROMPT),), OUTPUT) for i in range(SLOTS)]


def ask_and_sleep(url: str, turn: int) -> None:
    """Start all streams at once, read them when they have ended."""
    client = RawClient(url, VOCAB)
    sockets = []
    for row in streams(turn):
        sock = socket.create_connection((client.host, client.port))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, ROOM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, ROOM // 2)  # wakes for half the buffer, or for the end
        sock.sendall(client.request(row))
        sockets.append(sock)
    for sock in sockets:
        data = b""
        while part := sock.recv(ROOM):
            data += part
        sock.close()
        assert f'"completion_tokens":{OUTPUT}'.encode() in data, data[:200]


def cpu_seconds(pid: int) -> float:
    """Of all threads of a process."""
    return sum(int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir()) / 1e9


def take_round(url: str, pid: int, turns: Path, number: int) -> Round:
    turns.write_text("")
    before = cpu_seconds(pid)
    ask_and_sleep(url, number)
    took = cpu_seconds(pid) - before
    return fold([json.loads(line) for line in turns.read_text().splitlines()], took / OUTPUT)


def fold(turns: Sequence[dict[str, list[float]]], cpu: float) -> Round:
    """Means over all turns: each has as many steps of either kind, so both have the same drift."""
    served = [seconds for turn in turns for seconds in turn["served"]]
    bare = [seconds for turn in turns for seconds in turn["bare"]]
    return Round(fmean(served), fmean(bare), cpu)


def take_rounds(count: int, code: str = "") -> list[Round]:
    with tempfile.TemporaryDirectory() as folder:
        turns = Path(folder) / "turns"
        environment = {**os.environ, TURNS: f"{turns}:{SLOTS}"}
        with started_by(ENGINE + code, environment) as (url, process):
            take_round(url, process.pid, turns, 1000)  # warm up
            return [take_round(url, process.pid, turns, number) for number in range(count)]


def measure(rounds: int, control: int) -> dict[str, Any]:
    wasteful = WASTE.format(seconds=CONTROL_MS / 1000)
    return judged(take_rounds(rounds), take_rounds(control, wasteful))


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The centre of symmetrically distributed values with an interval of at least 95 % confidence: median and bounds of
    the means of all pairs (Hodges and Lehmann; Wilcoxon's signed ranks)."""
    means = sorted((a + b) / 2 for a, b in combinations_with_replacement(values, 2))
    ways = [1] + [0] * len(means)  # to give signs to ranks 1..n, by the sum of the positive ones
    for rank in range(1, len(values) + 1):
        ways = [count + (ways[total - rank] if total >= rank else 0) for total, count in enumerate(ways)]
    below = accumulate(count / 2 ** len(values) for count in ways)
    skipped = sum(1 for chance in below if chance <= 0.025)
    least = max(0, skipped - 1)
    return means[least], median(means), means[-1 - least]


def judged(rounds: Sequence[Round], control: Sequence[Round]) -> dict[str, Any]:
    """`within` is null where the interval contains the limit (the machine's speed varied too much), and where the
    overhead rose too little in the control rounds: `control_added_ms` of a core are added / cores of a step, and the
    measurement must show half of that."""
    shares = [one.share for one in rounds]
    low, middle, high = interval(shares)
    overhead = median(one.overhead for one in rounds)
    seen = 1000 * (median(one.overhead for one in control) - overhead)
    sees = seen >= CONTROL_MS / usable_cores() / 2
    return {
        "streams": SLOTS,
        "rounds": len(rounds),
        "model_step_ms": 1000 * median(one.bare for one in rounds),
        "served_step_ms": 1000 * median(one.served for one in rounds),
        "overhead_ms": 1000 * overhead,
        "server_cpu_ms": 1000 * median(one.cpu for one in rounds),
        "overhead_share": middle,
        "overhead_interval": [low, high],
        "overhead_of_each_round": shares,
        "control_added_ms": CONTROL_MS,
        "control_seen_ms": seen,
        "control_overhead_ms_of_each_round": [1000 * one.overhead for one in control],
        "limit": LIMIT,
        "within": True if high <= LIMIT and sees else False if low > LIMIT else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--control-rounds", type=int, default=CONTROL_ROUNDS)
    parser.add_argument("--json", type=Path, help="instead of a file under results/")
    args = parser.parse_args()
    save("server-overhead", "server_overhead", measure(args.rounds, args.control_rounds), args.json)


if __name__ == "__main__":
    main()
