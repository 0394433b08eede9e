"""The commands `bench`, `bench compare` and `bench levers`: what can be typed. `run_bench.py` does it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from twostroke.cli.options import (
    FASTEST,
    SLOWEST,
    ApiKey,
    Json,
    Model,
    Requests,
    Scale,
    Settings,
    Tpot,
    Trace,
    Ttft,
    Workload,
    can_be_written,
    refuse_unused,
)
from twostroke.cli.settings import parse_settings
from twostroke.errors import InputError
from twostroke.weights.catalog import DEFAULT

bench_app = typer.Typer(help="Measure a server or an engine under a load.", pretty_exceptions_enable=False)


@bench_app.callback(invoke_without_command=True)
def bench(
    context: typer.Context,
    url: Annotated[str | None, typer.Option(help="An OpenAI-compatible server. Without it: in process.")] = None,
    model: Annotated[str | None, typer.Option("--model", "-m", help="Model in process, or its name there.")] = None,
    workload: Workload = "chat",
    trace: Trace = None,
    arrivals: Annotated[str, typer.Option(help="poisson, burst, constant or closed.")] = "poisson",
    rate: Annotated[str, typer.Option(help="Requests/s; several, as 1,2,4, are measured one after another.")] = "1",
    requests: Requests = 100,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests under way, in a closed loop.")] = 8,
    scale: Scale = 1.0,
    seed: Annotated[int, typer.Option(help="Same seed, same requests.")] = 0,
    longest: Annotated[int | None, typer.Option(min=2, help="Cut a trace's prompts so that all fits.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Use /v1/chat/completions.")] = False,
    vocabulary: Annotated[int | None, typer.Option(min=1, help="Send token ids below this: exact lengths.")] = None,
    api_key: ApiKey = None,
    ttft: Ttft = None,
    tpot: Tpot = None,
    json_out: Json = None,
    html_out: Annotated[
        Path | None, typer.Option("--html", callback=can_be_written, help="Write one page with plots.")
    ] = None,
    option: Settings = None,
) -> None:
    """Ask at a given rate whoever still waits (open loop), and report TTFT, TPOT, ITL and throughput."""
    if context.invoked_subcommand is not None:
        return
    refuse_unused(context, unused(url, trace, arrivals))
    rates = rates_of(rate, trace, context)
    from twostroke.cli import run_bench

    loads = run_bench.make_loads(trace, workload, arrivals, requests, rates, seed, scale, concurrency, longest)
    if url is not None:
        runs = run_bench.over_url(url, model, api_key, chat, vocabulary, loads)
    else:
        runs = run_bench.in_process(model or DEFAULT, parse_settings(option), loads)
    run_bench.show(runs, ttft, tpot, json_out, html_out)


def unused(url: str | None, trace: str | None, arrivals: str) -> dict[str, str]:
    """Options that change nothing beside these, and why."""
    found: dict[str, str] = {}
    if url is None:
        found |= dict.fromkeys(("chat", "vocabulary", "api_key"), "is for a server: give --url too")
    else:
        found["option"] = "is for an engine in this process: start the server with that setting instead"
    if trace is not None:
        found |= dict.fromkeys(("workload", "arrivals", "seed", "concurrency"), "says nothing beside --trace")
    else:
        found["longest"] = "cuts the prompts of a --trace"
        if arrivals == "closed":
            found["rate"] = "says nothing in a closed loop: --concurrency decides how many are under way"
        else:
            found["concurrency"] = "is for --arrivals closed"
    return found


def rates_of(text: str, trace: str | None, context: typer.Context) -> list[float | None]:
    source = context.get_parameter_source("rate")
    if trace is not None and source is not None and source.name == "DEFAULT":
        return [None]
    try:
        found: list[float | None] = [float(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"--rate {text}: write a number, or several as 1,2,4.") from None
    if not all(one is not None and SLOWEST <= one <= FASTEST for one in found):
        raise InputError(f"--rate {text}: each must be above 0: {SLOWEST:g} to {FASTEST:g} requests a second.")
    return found


@bench_app.command()
def compare(before: Path, after: Path) -> None:
    """What moved between two results, with 95 % intervals."""
    from twostroke.cli import run_bench

    run_bench.compare(before, after)


@bench_app.command()
def levers(
    model: Model = DEFAULT,
    rounds: Annotated[int, typer.Option(min=1, help="Times that every variant is measured.")] = 3,
    json_out: Json = None,
    svg_out: Annotated[
        Path | None, typer.Option("--svg", callback=can_be_written, help="Write the table as a plot.")
    ] = None,
    option: Settings = None,
) -> None:
    """Every lever off and on, on this machine and model, beside what textbooks say. A round takes minutes."""
    from twostroke.cli import run_bench

    run_bench.levers(model, rounds, parse_settings(option), json_out, svg_out)
