"""What the engine costs beside the model: bookkeeping of a step, and the way from process start to the first token.

python -m benchmarks.overhead
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

from benchmarks.machine import describe
from twostroke.config import make_config, resolve
from twostroke.engine.build import make_scheduler
from twostroke.hardware import this_machine
from twostroke.metrics.timeline import Timeline
from twostroke.sampling import SamplingParams
from twostroke.types import Request, Result
from twostroke.weights.catalog import DEFAULT, fetch
from twostroke.weights.checkpoint import open_checkpoint
from twostroke.weights.load import load_arch

HERE = Path(__file__).parent
LIMITS = {"plan_and_commit_us": 500.0, "start_to_first_token_s": 4.0}
FIRST_TOKEN = f"""
from twostroke import LLM, SamplingParams
next(LLM({DEFAULT!r}).stream("Once upon a time", SamplingParams(max_tokens=2, temperature=0)))
"""


def plan_and_commit(streams: int = 64, steps: int = 400) -> float:
    """Median microseconds of plan + commit with `streams` requests decoding."""
    arch = load_arch(open_checkpoint(fetch(DEFAULT)))
    settings = resolve(make_config(max_requests=streams), arch, this_machine(), 0)
    scheduler = make_scheduler(arch, settings, "overhead")
    for number in range(streams):
        request = Request(number, list(range(number, number + 100)), SamplingParams(max_tokens=None), 0, Timeline(0.0))
        request.limit = settings.max_model_len
        scheduler.add(request)
    times = []
    for step in range(steps + 50):
        start = time.perf_counter()
        plan = scheduler.plan(float(step))
        planned = time.perf_counter()
        result = Result(tuple((7,) if work.samples else () for work in plan.works))
        ran = time.perf_counter()
        scheduler.commit(plan, result, float(step), 0.01)
        if step >= 50:
            assert len(plan.works) == streams
            times.append(planned - start + time.perf_counter() - ran)
    return median(times) * 1e6


def start_to_first_token(rounds: int = 5) -> float:
    """Median seconds of a fresh process that loads the default model from disk and writes its first token."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", FIRST_TOKEN], check=True)
        times.append(time.perf_counter() - start)
    return median(times)


def main() -> None:
    fetch(DEFAULT)
    measured = {"plan_and_commit_us": plan_and_commit(), "start_to_first_token_s": start_to_first_token()}
    result = {"machine": describe(), "command": "python -m benchmarks.overhead", "measured": measured, "limits": LIMITS,
              "within": {name: measured[name] <= limit for name, limit in LIMITS.items()}}  # fmt: skip
    path = HERE / "results" / f"overhead-{result['machine']['machine']}.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
