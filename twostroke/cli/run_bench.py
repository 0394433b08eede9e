"""Commands that measure, plan and diagnose: bench, plan, diagnose."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from twostroke.bench import html, plots, report
from twostroke.bench.compare import compare as compare_runs
from twostroke.bench.record import Run, load_runs, save, typed
from twostroke.bench.workload import Load, make_load, renewed, trace_load
from twostroke.cli.options import (
    FASTEST,
    SLOWEST,
    Json,
    Requests,
    Scale,
    Settings,
    Tpot,
    Trace,
    Ttft,
    Workload,
    can_be_written,
    parse_settings,
    refuse_unused,
)
from twostroke.cli.run_diagnose import diagnose_command
from twostroke.cli.run_plan import describe, plan_command
from twostroke.cli.terminal import errors, open_llm
from twostroke.cli.watch import over_http, watching
from twostroke.cost.diagnose import seconds
from twostroke.cost.hardware import calibration_path, load_calibration
from twostroke.cost.roofline import Roofline, model_cost
from twostroke.errors import InputError
from twostroke.hardware import machine_name
from twostroke.weights.catalog import DEFAULT, cache_folder

if TYPE_CHECKING:
    from twostroke.engine.llm import LLM

bench_app = typer.Typer(help="Measure a server or an engine under a load.", pretty_exceptions_enable=False)
console = Console(highlight=False)

Model = Annotated[str, typer.Option("--model", "-m", help="Catalog name, folder, .gguf file or hub id.")]


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
    api_key: Annotated[str | None, typer.Option(envvar="TWOSTROKE_API_KEY", help="For the server.")] = None,
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
    loads = [
        renewed(make_or_read(trace, workload, arrivals, requests, one, seed, scale, concurrency, longest), number)
        for number, one in enumerate(rates_of(rate, trace, context))
    ]
    if url is not None:
        from twostroke.bench.client import Target

        target = Target(url, model, api_key, chat, vocabulary)
        runs = [over_http(target, load) for load in loads]
    else:
        runs = in_process(model or DEFAULT, option, loads)
    show(runs, ttft, tpot, json_out, html_out)


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


def make_or_read(
    trace: str | None,
    workload: str,
    kind: str,
    count: int,
    per_second: float | None,
    seed: int,
    scale: float,
    concurrency: int,
    longest: int | None,
) -> Load:
    if trace is not None:
        return trace_load(trace, count, per_second, scale, longest)
    return make_load(workload, kind, count, per_second or 1.0, seed, scale, concurrency)


def in_process(model: str, option: list[str] | None, loads: list[Load]) -> list[Run]:
    from twostroke.bench.inprocess import measure
    from twostroke.bench.levers import warm_up

    llm = open_llm(model, parse_settings(option))
    warm_up(llm)
    roofline = reached_here(llm, model)
    runs = []
    for load in loads:
        with watching(load) as seen:
            runs.append(measure(llm, load, model, machine_name(), seen))
        runs[-1].flags = report.check(runs[-1], roofline)
    return runs


def reached_here(llm: LLM, model: str) -> Roofline | None:
    """What this machine was measured to reach with this model; None where it was not."""
    path = calibration_path(cache_folder(), model)
    if not path.exists():
        return None
    narrow = llm.settings.quantize
    stored = None if narrow else describe(model)[1]
    cost = model_cost(llm.arch, narrow or "float32", stored, llm.settings.device)
    return Roofline(cost, llm.settings.layout, load_calibration(path).rates)


def show(runs: list[Run], ttft: float | None, tpot: float | None, json_out: Path | None, html_out: Path | None) -> None:
    command = typed(sys.argv[1:])
    if ttft is not None or tpot is not None:
        ttft, tpot = ttft or inf, tpot or inf  # one target alone is one too
    for run in runs:
        run.flags = run.flags or report.check(run)
        if any(record.pieces for record in run.records):
            console.print(report.table(run))
            for line in report.lines(run, ttft, tpot):
                console.print(line)
        for flag in run.flags:
            console.print(f"[red]![/red] {escape(flag)}")
    if len(runs) > 1 and all(any(record.pieces for record in run.records) for run in runs):
        console.print(report.sweep_table(runs, ttft, tpot))
    if json_out is not None:
        save(runs, json_out, command)
    if html_out is not None:
        html_out.write_text(html.page(runs, command, ttft, tpot))
    if not any(record.pieces for run in runs for record in run.records):
        raise typer.Exit(1)


@bench_app.command()
def compare(before: Path, after: Path) -> None:
    """What moved between two results, with 95 % intervals."""
    old, new = load_runs(before), load_runs(after)
    if len(old) != len(new):
        raise InputError(f"{before} holds {len(old)} loads, {after} {len(new)}: compare results of the same rates.")
    for first, second in zip(old, new, strict=True):
        table = Table(
            title=escape(f"{report.title(first)}  →  {report.title(second)}"), header_style="bold", title_justify="left"
        )
        for name in ("", "before", "after", "change", "95 % interval", ""):
            table.add_column(name, justify="right" if name else "left")
        for change in compare_runs(first, second):
            rate_like = change.better == "higher"
            values = [f"{value:,.1f}" if rate_like else seconds(value) for value in (change.before, change.after)]
            interval = f"{change.low - 1:+.0%} … {change.high - 1:+.0%}"
            table.add_row(change.name, *values, f"{change.ratio - 1:+.0%}", interval, change.verdict)
        console.print(table)


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
    """Every lever off and on, on this machine and model, beside what textbooks say."""
    from twostroke.bench.levers import run

    base = parse_settings(option)
    rows = run(
        lambda settings: open_llm(model, base | settings), rounds, lambda name: errors.print(f"[dim]{name}[/dim]")
    )
    table = Table(title=f"{model} on {machine_name()}: on over off", header_style="bold", title_justify="left")
    for name in ("lever", "stroke", "TTFT", "TPOT", "longest gap", "tokens/s", "KV bytes", "textbook"):
        table.add_column(name, justify="left" if name in ("lever", "stroke", "textbook") else "right")
    for row in rows:
        effect = row.effect
        cells = [f"×{effect[k]:.2f}" if k in effect else "–" for k in
                 ("ttft", "tpot", "gap", "throughput", "kv_bytes_per_token")]  # fmt: skip
        table.add_row(
            row.name, row.stroke, *cells, row.textbook if row.trouble is None else f"[dim]{row.trouble}[/dim]"
        )
    console.print(table)
    if json_out is not None:
        document = {"machine": machine_name(), "model": model, "rounds": rounds}
        rows_out = [{**asdict(row), "effect": row.effect} for row in rows]
        json_out.write_text(json.dumps({**document, "rows": rows_out}, indent=1) + "\n")
    if svg_out is not None:
        title = f"{model} on {machine_name()}: what each lever does"
        svg_out.write_text(plots.effects(title, [(row.name, row.effect) for row in rows]))


def register(app: typer.Typer) -> None:
    app.add_typer(bench_app, name="bench")
    app.command("plan")(plan_command)
    app.command("diagnose")(diagnose_command)
