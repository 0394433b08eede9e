"""What the engine costs beside the model: planning and committing a step, and the start of a process.

python -m benchmarks.overhead
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from statistics import median

from benchmarks.machine import save
from twostroke.config import make_config, resolve
from twostroke.hardware import this_machine
from twostroke.sampling import SamplingParams
from twostroke.schedule.make import make_scheduler
from twostroke.types import Request, RequestState, Result
from twostroke.weights.catalog import DEFAULT, fetch
from twostroke.weights.checkpoint import open_checkpoint
from twostroke.weights.load import load_arch

LIMITS = {"plan_and_commit_us": 500.0, "start_to_first_token_s": 1.5}
FIRST_TOKEN = f"""
import time
from twostroke import LLM, SamplingParams
imported = time.perf_counter()
llm = LLM({DEFAULT!r})
loaded = time.perf_counter()
next(llm.stream("Once upon a time", SamplingParams(max_tokens=2, temperature=0)))
print(loaded - imported, time.perf_counter() - loaded, flush=True)
"""


def plan_and_commit(streams: int = 64, steps: int = 400) -> float:
    """Median microseconds of plan + commit with `streams` requests decoding."""
    arch = load_arch(open_checkpoint(fetch(DEFAULT)))
    settings = resolve(make_config(max_requests=streams), arch, this_machine(), 0)
    scheduler = make_scheduler(arch, settings, "overhead")
    for number in range(streams):
        tokens, params = tuple(range(number, number + 100)), SamplingParams(max_tokens=None)
        scheduler.add(RequestState(Request(number, tokens, params, limit=settings.max_model_len)))
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


def start_to_first_token(rounds: int = 9) -> dict[str, float]:
    """Median seconds from the start of a process with the default model to its first token.

    The file is in the page cache and the bytecode is compiled, as from the second start of an installed package on.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    found: dict[str, list[float]] = {
        "start_to_first_token_s": [],
        "importing_s": [],
        "loading_s": [],
        "first_token_s": [],
    }
    for number in range(rounds + 1):
        start = time.perf_counter()
        with subprocess.Popen(
            [sys.executable, "-c", FIRST_TOKEN], stdout=subprocess.PIPE, text=True, env=environment
        ) as child:
            assert child.stdout is not None
            line = child.stdout.readline()
            seconds = time.perf_counter() - start
        if child.returncode:
            raise RuntimeError("the measured process failed: its message is above")
        loading, token = map(float, line.split())
        if number:
            for values, value in zip(found.values(), (seconds, seconds - loading - token, loading, token), strict=True):
                values.append(value)
    return {name: median(values) for name, values in found.items()}


def main() -> None:
    fetch(DEFAULT)
    measured = {"plan_and_commit_us": plan_and_commit(), **start_to_first_token()}
    within = {name: measured[name] <= limit for name, limit in LIMITS.items()}
    save("overhead", "overhead", {"measured": measured, "limits": LIMITS, "within": within})


if __name__ == "__main__":
    main()
