"""The command `diagnose`: what can be typed. `run_diagnose.py` does it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from twostroke.cli.options import ApiKey, Requests, Scale, Settings, Tpot, Trace, Ttft, refuse_unused, sane_rate
from twostroke.cli.settings import parse_settings
from twostroke.errors import ConfigError, InputError


def diagnose(
    context: typer.Context,
    url: Annotated[
        str | None,
        typer.Option(help="A running server. A twostroke tells what it served; any other is probed and measured."),
    ] = None,
    result: Annotated[Path | None, typer.Option(help="A result of `twostroke bench --json`.")] = None,
    trace: Trace = None,
    model: Annotated[str | None, typer.Option("--model", "-m", help="What runs there: shape, path or name.")] = None,
    hardware: Annotated[str, typer.Option(help="Where it runs: a name of the table, or 'this'.")] = "this",
    precision: Annotated[str | None, typer.Option(help="Of the weights, where no file tells.")] = None,
    workload: Annotated[
        str | None,
        typer.Option("--workload", "-w", help="rag, code, chat, batch or agent. Without: what a twostroke recorded."),
    ] = None,
    requests: Requests = 60,
    rate: Annotated[float, typer.Option(callback=sane_rate, help="Requests/s of the workload.")] = 1.0,
    scale: Scale = 1.0,
    api_key: ApiKey = None,
    ttft: Ttft = None,
    tpot: Tpot = None,
    apply: Annotated[
        bool, typer.Option("--apply", help="Pull the best lever, on a running twostroke or in process; measure again.")
    ] = False,
    show_ledger: Annotated[bool, typer.Option("--ledger", help="All predictions so far beside what came.")] = False,
    option: Settings = None,
) -> None:
    """Which stroke is slow, why, and what would help by how much."""
    source = "ledger" if show_ledger else "url" if url else "result" if result else "apply" if apply else "trace"
    refuse_unused(context, unused(source, trace is not None))
    from twostroke.cli import run_diagnose as run

    there, targets = run.There(model, hardware, precision, parse_settings(option)), run.Targets(ttft, tpot)
    if source == "ledger":
        run.show_ledger()
    elif result is not None:
        run.of_result(result, there, targets)
    elif trace is not None and source == "trace":
        run.of_trace(trace, requests, scale, there, targets)
    elif source == "trace":
        raise InputError("say what to diagnose: --url, --result, --trace, or --apply for an engine in process.")
    else:
        load = run.load_of(trace, workload, requests, rate, scale)
        if url is None:
            run.apply_here(there, load, targets)
            return
        target, admin = run.reach(url, api_key, model)
        if admin.known:
            told = "says nothing of a running twostroke, which tells what it runs and how"
            refuse_unused(context, dict.fromkeys(("model", "hardware", "precision", "option"), told))
            run.of_twostroke(admin, target, load if apply or workload or trace else None, apply, targets)
        elif apply:
            raise ConfigError(f"--apply: {target.base} is no twostroke; its settings cannot be changed from here.")
        else:
            run.of_server(target, load, there, targets)


def unused(source: str, trace: bool) -> dict[str, str]:
    """Options that change nothing where the diagnosis comes from this, and why."""
    load = ("trace", "workload", "requests", "rate", "scale")
    if source == "ledger":
        everything = (*load, "url", "result", "model", "hardware", "precision", "api_key", "ttft", "tpot", "apply")
        return dict.fromkeys((*everything, "option"), "says nothing beside --ledger, which only shows what came before")
    found = {"workload": "says nothing beside --trace"} if trace else {}
    if source == "url":
        return found | {"result": "says nothing beside --url: give one of them"}
    found["api_key"] = "is for a server: give --url"
    if source == "result":
        found |= dict.fromkeys(load, "says nothing beside --result, which holds its own load")
        found["apply"] = "needs something that runs: leave --result out"
    elif source == "apply":
        found |= dict.fromkeys(("hardware", "precision"), "says nothing beside --apply, which runs the model here")
    elif trace:
        found["rate"] = "says nothing beside --trace, which is replayed as it was recorded"
    return found
