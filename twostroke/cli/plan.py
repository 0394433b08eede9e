"""The command `plan`: what can be typed. `run_plan.py` does it."""

from __future__ import annotations

from typing import Annotated

import typer

from twostroke.cli.options import Requests, Scale, Settings, Tpot, Trace, Ttft, Workload, refuse_unused, sane_rate
from twostroke.cli.settings import parse_settings


def plan(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(help="A known shape (llama-3-8b, …), a config.json, or a model as elsewhere.")
    ],
    hardware: Annotated[str, typer.Option(help="h200, a100, m4-max, …; 'this' after --calibrate.")] = "h200",
    gpus: Annotated[int, typer.Option(min=1, help="Devices that share one copy of the model.")] = 1,
    precision: Annotated[str | None, typer.Option(help="bfloat16, int8, int4, fp8 or float32 weights.")] = None,
    workload: Workload = "chat",
    trace: Trace = None,
    requests: Requests = 300,
    scale: Scale = 1.0,
    rate: Annotated[float, typer.Option(callback=sane_rate, help="Requests/s to be served.")] = 1.0,
    ttft: Ttft = 1.0,
    tpot: Tpot = 0.05,
    split: Annotated[bool, typer.Option("--split", help="Prefill and decode workers of their own.")] = False,
    search: Annotated[bool, typer.Option("--search", help="Try all rentable hardware; the cheapest first.")] = False,
    calibrate: Annotated[bool, typer.Option("--calibrate", help="Measure this machine with this model first.")] = False,
    option: Settings = None,
) -> None:
    """Before owning anything: does it fit, how fast, what does it cost, how many workers does a load need."""
    refuse_unused(context, unused(trace is not None, search, calibrate))
    from twostroke.cli import run_plan

    assert ttft is not None and tpot is not None
    rows = run_plan.load_of(trace, workload, requests, scale)
    settings = parse_settings(option)
    run_plan.plan(model, hardware, gpus, precision, rows, rate, ttft, tpot, split, search, calibrate, settings)


def unused(trace: bool, search: bool, calibrate: bool) -> dict[str, str]:
    """Options that change nothing beside these, and why."""
    found: dict[str, str] = {}
    if trace:
        found["workload"] = "says nothing beside --trace"
    if calibrate:
        found["hardware"] = "says nothing beside --calibrate, which measures this machine"
    if search:
        found |= dict.fromkeys(("hardware", "gpus", "precision"), "says nothing beside --search, which tries them all")
    return found
