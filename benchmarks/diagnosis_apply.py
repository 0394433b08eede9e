"""Servers with one fault each, diagnosed and corrected while they run: predicted and measured values.

    python -m benchmarks.diagnosis_apply              # about five minutes on two cores; JSON under results/

The machine is calibrated first. For every fault `twostroke serve` is started with it, a load is measured over HTTP, the
diagnosis names a lever, the lever is pulled through POST /twostroke/settings, and the same load with other text is
measured again. The right lever is known from the fault. Two servers have drafts off: for one that repeats a file prompt
lookup is the right lever, and for one that answers open questions the diagnosis must say why it is none.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from benchmarks.machine import save
from twostroke import LLM
from twostroke.bench.apply import Applied
from twostroke.bench.calibrate import calibrate
from twostroke.bench.client import Target, measure
from twostroke.bench.remote import Admin, apply_live
from twostroke.bench.workload import Load, make_load
from twostroke.cost.model.rates import Rates
from twostroke.cost.simulation.served import Targets
from twostroke.cost.simulation.trace import Arrival, Contents, PromptPart
from twostroke.weights.catalog import DEFAULT
from twostroke.weights.checkpoint import locate, open_checkpoint
from twostroke.weights.describe import checkpoint_bytes

PORT = 8199
TARGET = 0.20  # of |predicted − measured| / measured


@dataclass(frozen=True)
class Fault:
    name: str
    load: Callable[[], Load]
    levers: tuple[str, ...]  # any of these is right; empty: any but prompt lookup
    started: tuple[str, ...] = ()  # settings of the start
    changed: dict[str, Any] = field(default_factory=dict)  # settings changed before the load


def at_once(count: int, prompts: tuple[int, int], answers: tuple[int, int]) -> Load:
    rng, contents = random.Random(1), Contents()
    rows = [Arrival(0.0, (contents.own(rng.randint(*prompts)),), rng.randint(*answers)) for _ in range(count)]
    return Load("all at once", rows)


def poisson(count: int, per_second: float, prompts: tuple[int, int], answers: tuple[int, int]) -> Load:
    rng, contents, at, rows = random.Random(3), Contents(), 0.0, []
    for _ in range(count):
        rows.append(Arrival(at, (contents.own(rng.randint(*prompts)),), rng.randint(*answers)))
        at += rng.expovariate(per_second)
    return Load("poisson", rows)


def one_by_one(count: int, shared: int, own: tuple[int, int], every: float) -> Load:
    rng, contents = random.Random(2), Contents()
    rows = []
    for number in range(count):
        parts = (contents.own(rng.randint(*own)),)
        rows.append(Arrival(every * number, (PromptPart(7, shared), *parts) if shared else parts, 8))
    return Load("one by one", rows)


LOOKUP = "prompt-lookup"
FAULTS = (
    Fault("static batching", lambda: poisson(36, 2.5, (30, 80), (10, 200)), ("continuous-batching",),
         ("batching=static",)),
    Fault("batch cap of 1", lambda: at_once(20, (30, 80), (40, 80)), ("batch-cap",), changed={"max_requests": 1}),
    Fault("prefix cache off", lambda: one_by_one(20, 360, (20, 60), 1.0), ("prefix-cache",), ("prefix_cache=false",)),
    Fault("tiny token budget", lambda: one_by_one(10, 0, (120, 200), 1.5), ("token-budget",),
         ("max_requests=1", "max_batch_tokens=1")),
    Fault("drafts off, a file repeated", lambda: make_load("edit", "constant", 24, 0.5), (LOOKUP,), ("speculate=off",)),
    Fault("drafts off, open questions", lambda: make_load("questions", "constant", 8, 0.5), (), ("speculate=off",)),
)  # fmt: skip


def run_fault(fault: Fault, model: str, rates: Rates) -> dict[str, Any]:
    settings = [part for one in fault.started for part in ("-s", one)]
    command = [sys.executable, "-m", "twostroke", "serve", model, "--port", str(PORT), *settings]
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        target = Target(f"http://127.0.0.1:{PORT}")
        wait_until_ready(target)
        admin = Admin(target)
        if fault.changed:
            admin.change(fault.changed)
        found = apply_live(admin, target, fault.load(), measure, Targets(), rates)
    finally:
        server.terminate()
        server.wait(20)
    diagnosis = found.diagnosis if isinstance(found, Applied) else found
    document: dict[str, Any] = {"case": fault.name, "expected": fault.levers, "sentence": diagnosis.sentence}
    reasons = {one.lever.name: one.reason for one in diagnosis.rejected}
    document["why_no_lookup"] = reasons.get(LOOKUP)
    if isinstance(found, Applied):
        one = found.prediction
        document |= {"lever": one.lever, "metric": one.metric, "before": one.before, "measured": one.measured,
                     "predicted": one.predicted, "error": one.error, "right": is_right(fault, one.lever),
                     "within": abs(one.error) <= TARGET}  # fmt: skip
    print(json.dumps(document), flush=True)
    return document


def is_right(fault: Fault, lever: str) -> bool:
    return lever in fault.levers if fault.levers else lever != LOOKUP


def rates_here(model: str, seconds: float = 30.0) -> Rates:
    """Measured in this process."""
    llm = LLM(model, speculate="off")
    return calibrate(llm, model, checkpoint_bytes(open_checkpoint(locate(model))), seconds).rates


def wait_until_ready(target: Target, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"{target.base}/health/ready").status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    raise SystemExit("the server did not become ready")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT)
    parser.add_argument("--case", action="append", help="only these, by name")
    args = parser.parse_args(arguments)
    chosen = [fault for fault in FAULTS if not args.case or fault.name in args.case]
    rates = rates_here(args.model)
    rows = [run_fault(fault, args.model, rates) for fault in chosen]
    if not args.case:
        save("diagnosis-apply", "diagnosis_apply", {"model": args.model, "target": TARGET, "cases": rows})


if __name__ == "__main__":
    main()
