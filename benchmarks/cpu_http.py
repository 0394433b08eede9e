"""Output tokens/s over HTTP with 16 requests at once, and the peak memory of the server: twostroke and llama.cpp.

One load generator, the same file, prompts, context and slots for both; every answer has 128 tokens.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.serving_servers import SLOTS, VOCAB, started
from twostroke.bench.client import Target, measure
from twostroke.bench.workload import Load
from twostroke.cost.simulation.trace import Arrival, PromptPart

PROMPT, ANSWER = 96, 128


def served(name: str, llama: Path) -> dict[str, float]:
    arrivals = [Arrival(0.0, (PromptPart(i, PROMPT),), ANSWER) for i in range(SLOTS)]
    with started(name, llama) as (url, process):
        target = Target(url, vocabulary=VOCAB)
        measure(target, Load("warm up", arrivals[:2], closed=2))
        records = measure(target, Load("closed", arrivals, closed=SLOTS)).records
        memory = peak_memory(process.pid)
    failed = [record.error for record in records if record.error is not None]
    if failed:
        raise RuntimeError(f"{name}: {len(failed)} of {len(records)} requests failed, the first with {failed[0]}")
    ends = [record.end for record in records if record.end is not None]
    span = max(ends) - min(record.sent for record in records)
    return {
        "output_tokens_per_s": sum(record.output for record in records) / span,
        "ttft_p50_s": float(np.median([record.ttft for record in records if record.ttft is not None])),
        "peak_memory_mb": memory / 1e6,
    }


def peak_memory(pid: int) -> int:
    """Bytes: peak memory of a process plus that of its children. Shared pages count twice."""
    total = 0
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            total += int(line.split()[1]) * 1024
    for task in Path(f"/proc/{pid}/task").iterdir():
        total += sum(peak_memory(int(child)) for child in (task / "children").read_text().split())
    return total
