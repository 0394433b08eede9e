"""What serving costs beside the model: the wall time of a step at 16 streams over HTTP, and of the model's part alone.

    python -m benchmarks.server_overhead

The same 16 streams run twice: in process, where only launching and collecting the model's step is timed, and behind the
server with 16 clients, where the time from one step to the next is. The difference is everything else: scheduling, the
way between the processes, text, JSON, HTTP, and the cores that all of it takes from the model's threads. Several rounds
take turns; medians of steps in which all 16 streams advance. The last line is JSON.
"""

from __future__ import annotations

import json
import time
import urllib.request
from itertools import pairwise
from statistics import median
from typing import Any

from benchmarks.raw_client import RawClient
from benchmarks.serving_servers import CONTEXT, SLOTS, VOCAB, started
from twostroke import LLM, SamplingParams
from twostroke.bench.prompts import token_ids
from twostroke.cost.trace import Arrival, Part
from twostroke.weights.catalog import DEFAULT

PROMPT, OUTPUT, ROUNDS = 100, 160, 3
LIMIT = 0.05


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


def served_steps(url: str, turn: int) -> tuple[list[float], list[float]]:
    """Seconds from one such step to the next behind the server, and those its engine counts for the step itself."""
    last = steps_after(url, 0)["last"]
    records = RawClient(url, VOCAB).closed_loop(streams(turn), SLOTS)
    assert all(record.error is None and record.output == OUTPUT for record in records), records[0].error
    steps = steps_after(url, last)["steps"]
    full = [step for step in steps if step["decode_tokens"] == len(step["lanes"]) == SLOTS]
    walls = [b["time"] - a["time"] for a, b in pairwise(full) if b["number"] == a["number"] + 1]
    return walls, [step["seconds"] for step in full]


def steps_after(url: str, number: int) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}/twostroke/steps?since={number}&limit=1024", timeout=20) as answer:
        return json.loads(answer.read())


def measure() -> dict[str, Any]:
    model, walls, counted = [], [], []
    with started("twostroke") as (url, _):
        llm = LLM(DEFAULT, max_requests=SLOTS, max_model_len=CONTEXT)
        served_steps(url, 100), model_steps(llm, 101)  # first times
        for turn in range(ROUNDS):
            model.append(median(model_steps(llm, 2 * turn)))
            wall, own = served_steps(url, 2 * turn + 1)
            walls.append(median(wall))
            counted.append(median(own))
    return judged(model, counted, walls)


def judged(model: list[float], counted: list[float], walls: list[float]) -> dict[str, Any]:
    """A model that takes longer alone than when it is served, or rounds that differ by more than the limit, say that
    the machine was not steady enough to tell: then `within` is null. `between_steps_share` is of one and the same run
    and hardly noisy, but knows nothing of cores that the server's process takes from the model's threads."""
    share = 1 - median(model) / median(walls)
    spread = max((max(rounds) - min(rounds)) / median(rounds) for rounds in (model, walls))
    return {
        "streams": SLOTS,
        "model_step_ms": [1000 * value for value in model],
        "engine_step_ms": [1000 * value for value in counted],
        "served_step_ms": [1000 * value for value in walls],
        "between_steps_share": 1 - median(counted) / median(walls),
        "overhead_share": share,
        "spread_of_rounds": spread,
        "limit": LIMIT,
        "within": share <= LIMIT if share >= 0 and spread <= LIMIT else None,
    }


if __name__ == "__main__":
    print(json.dumps(measure()))
