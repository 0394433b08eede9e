"""The commands `bench`, `bench compare` and `bench levers`: measure a load, compare results, measure every lever."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from twostroke.cli import options
from twostroke.cli.options import (
    FASTEST,
    SLOWEST,
    can_be_written,
    lengths_of,
    make_targets,
    parse_settings,
    refuse_unused,
)
from twostroke.cli.terminal import console, open_llm, progress_bar, telling
from twostroke.cost.units import seconds, times
from twostroke.errors import InputError
from twostroke.weights.catalog import DEFAULT, cache_folder

if TYPE_CHECKING:
    from twostroke.bench.levers import Row
    from twostroke.bench.record import Run
    from twostroke.bench.workload import Load
    from twostroke.cost.model.roofline import Roofline
    from twostroke.cost.simulation.served import Targets
    from twostroke.engine.llm import LLM

WIDE = 120  # columns of a terminal from which on the levers' table has all of its columns
bench_app = typer.Typer(
    help="Measure a server or an engine under a load.", pretty_exceptions_enable=False, rich_markup_mode=None
)


@bench_app.callback(invoke_without_command=True)
def bench(
    context: typer.Context,
    url: Annotated[
        str | None, typer.Option(help="An OpenAI-compatible server. Default: an engine in this process.")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Model to load, or its name on the server.")
    ] = None,
    workload: options.Workload = "chat",
    trace: options.Trace = None,
    prompt: options.PromptOption = None,
    output: options.OutputOption = None,
    arrivals: Annotated[str, typer.Option(help="poisson, burst, constant or closed.")] = "poisson",
    rate: Annotated[str, typer.Option(help="Requests/s; several, as 1,2,4, are measured one after another.")] = "1",
    requests: options.Requests = 100,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests in flight, with --arrivals closed.")] = 8,
    scale: options.Scale = 1.0,
    seed: Annotated[int, typer.Option(help="Same seed, same requests.")] = 0,
    longest: Annotated[
        int | None, typer.Option(min=2, help="Most tokens of a trace's request: its prompt is cut.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Use /v1/chat/completions.")] = False,
    vocabulary: Annotated[
        int | None, typer.Option(min=1, help="Send token ids below this number: prompts of exact lengths.")
    ] = None,
    api_key: options.ApiKey = None,
    ttft: options.Ttft = None,
    tpot: options.Tpot = None,
    json_out: options.Json = None,
    html_out: Annotated[
        Path | None, typer.Option("--html", callback=can_be_written, help="Write one page with plots.")
    ] = None,
    option: options.SettingsOption = None,
) -> None:
    """Send requests at a given rate, whether or not earlier ones have ended, and report TTFT, TPOT and throughput."""
    if context.invoked_subcommand is not None:
        return
    lengths = lengths_of(prompt, output)
    refuse_unused(context, unused(url, trace, arrivals, lengths is not None))
    rates = rates_of(rate, trace, context)
    from twostroke.bench.client import Target
    from twostroke.bench.workload import choose_load, renewed
    from twostroke.cli.watch import over_http

    choose = partial(choose_load, trace, workload, arrivals, requests)
    loads = [
        renewed(choose(one, seed, scale, concurrency, longest, lengths), number) for number, one in enumerate(rates)
    ]
    if url is not None:
        target = Target(url, model, api_key, chat, vocabulary)
        runs = [over_http(target, load) for load in loads]
    else:
        runs = in_process(model or DEFAULT, parse_settings(option), loads)
    show(runs, make_targets(ttft, tpot), json_out, html_out)


def unused(url: str | None, trace: str | None, arrivals: str, lengths: bool = False) -> dict[str, str]:
    """Options without effect beside these, and why."""
    found: dict[str, str] = {}
    if url is None:
        found |= dict.fromkeys(("chat", "vocabulary", "api_key"), "is for a server: give --url too")
    else:
        found["option"] = "is for an engine in this process: start the server with that setting instead"
    if trace is not None:
        names = ("workload", "arrivals", "seed", "concurrency", "prompt", "output")
        found |= dict.fromkeys(names, "has no effect with --trace")
    else:
        if lengths:
            found["workload"] = "has no effect with --prompt and --output"
        found["longest"] = "cuts the prompts of a --trace"
        if arrivals == "closed":
            found["rate"] = "has no effect in a closed loop: --concurrency decides how many are under way"
        else:
            found["concurrency"] = "is for --arrivals closed"
    return found


def rates_of(text: str, trace: str | None, context: typer.Context) -> list[float | None]:
    """None: the trace's own rate."""
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


def in_process(model: str, settings: dict[str, Any], loads: list[Load]) -> list[Run]:
    from twostroke.bench import report
    from twostroke.bench.inprocess import measure, warm_up
    from twostroke.cli.watch import watching
    from twostroke.hardware import machine_name

    llm = open_llm(model, settings, ahead=True)
    warm_up(llm)
    roofline = calibrated_roofline(llm, model)
    runs = []
    for load in loads:
        with watching(load) as seen:
            runs.append(measure(llm, load, model, machine_name(), seen))
        runs[-1].flags = report.check(runs[-1], roofline)
    return runs


def calibrated_roofline(llm: LLM, model: str) -> Roofline | None:
    """The roofline with the rates measured on this machine with this model; None where there is no calibration."""
    from twostroke.cli.deployment import describe
    from twostroke.cost.model.calibration import calibration_path, load_calibration
    from twostroke.cost.model.roofline import Roofline, model_cost

    path = calibration_path(cache_folder(), model)
    if not path.exists():
        return None
    narrow = llm.settings.quantize
    stored = None if narrow else describe(model, llm.settings.device).stored
    cost = model_cost(llm.arch, narrow or "float32", stored, llm.settings.device)
    return Roofline(cost, llm.settings.layout, load_calibration(path).rates)


def show(runs: list[Run], targets: Targets, json_out: Path | None, html_out: Path | None) -> None:
    from twostroke.bench import html, report
    from twostroke.bench.record import save, typed

    command = typed(sys.argv[1:])
    for run in runs:
        run.flags = run.flags or report.check(run)
        if run.answered:
            overload = report.overload(run)
            if overload is not None:
                console.print(f"[bold red]{escape(overload)}[/]")
            console.print(report.table(run))
            for line in report.lines(run, targets):
                console.print(line)
        for flag in run.flags:
            console.print(f"[red]![/red] {escape(flag)}")
    if len(runs) > 1 and all(run.answered for run in runs):
        console.print(report.sweep_table(runs, targets))
    if json_out is not None:
        save(runs, json_out, command)
    if html_out is not None:
        html_out.write_text(html.page(runs, command, targets))
    if not any(run.answered for run in runs):
        raise typer.Exit(1)


@bench_app.command()
def compare(before: Path, after: Path) -> None:
    """What moved between two results, with 95 % intervals."""
    from twostroke.bench import report
    from twostroke.bench.compare import changes
    from twostroke.bench.record import load_runs

    old, new = load_runs(before), load_runs(after)
    if len(old) != len(new):
        raise InputError(f"{before} holds {len(old)} loads, {after} {len(new)}: compare results of the same rates.")
    for first, second in zip(old, new, strict=True):
        names = dict.fromkeys(report.title(run) for run in (first, second))
        table = Table(title=escape("  →  ".join(names)), header_style="bold", title_justify="left")
        for name in ("", "before", "after", "change", "95 % interval", ""):
            table.add_column(name, justify="right" if name else "left")
        for change in changes(first, second):
            rate_like = change.better == "higher"
            values = [f"{value:,.1f}" if rate_like else seconds(value) for value in (change.before, change.after)]
            interval = f"{change.low - 1:+.0%} … {change.high - 1:+.0%}"
            table.add_row(change.name, *values, f"{change.ratio - 1:+.0%}", interval, change.verdict)
        console.print(table)


@bench_app.command()
def levers(
    context: typer.Context,
    model: options.ModelOption = DEFAULT,
    rounds: Annotated[int, typer.Option(min=1, help="Times that every variant is measured.")] = 3,
    quick: Annotated[bool, typer.Option("--quick", help="One round of smaller loads: about two minutes.")] = False,
    json_out: options.Json = None,
    svg_out: Annotated[
        Path | None, typer.Option("--svg", callback=can_be_written, help="Write the table as a plot.")
    ] = None,
    option: options.SettingsOption = None,
) -> None:
    """Every lever off and on, on this machine and model. Beside it what textbooks say. A round takes minutes."""
    refuse_unused(context, {"rounds": "has no effect with --quick, which is one round"} if quick else {})
    from twostroke.bench.levers import Round, as_document, run
    from twostroke.bench.plots import effects
    from twostroke.cli.deployment import describe
    from twostroke.hardware import machine_name
    from twostroke.weights.checkpoint import locate

    base = parse_settings(option)
    with progress_bar(f"fetching {model}") as fetching:
        locate(model, fetching)  # `describe` counts the bytes of the file
    rounds = 1 if quick else rounds
    stored, drafts = describe(model).stored, "draft_model" in base
    how = Round(lambda settings: open_llm(model, base | settings, ahead=True), rounds, quick, stored, drafts)
    where, rows = f"{model} on {machine_name()}", []
    try:
        with telling("measuring") as say:
            for row in run(how, say):
                rows.append(row)
                say(f"{row.name}: {shown_effect(row)}")
                if json_out is not None:  # what is measured is kept, whatever happens to the rest
                    json_out.write_text(as_document(machine_name(), model, rounds, rows))
    finally:
        show_levers(f"{where}: on over off", rows)
    if svg_out is not None:
        svg_out.write_text(effects(f"{where}: what each lever does", [(row.name, row.effect) for row in rows]))


def shown_effect(row: Row) -> str:
    if row.trouble is not None:
        return row.trouble
    named = (("TTFT", "ttft"), ("TPOT", "tpot"), ("longest gap", "gap"), ("tokens/s", "throughput"))
    cells = [f"{label} {times(row.effect[key])}" for label, key in named if key in row.effect]
    return ", ".join(cells + ([row.memory] if row.memory != "–" else []))


def show_levers(title: str, rows: list[Row]) -> None:
    """Print the levers. On a narrow terminal the textbooks' words are lines below the table."""
    narrow = console.width < WIDE
    style: dict[str, Any] = {"box": None, "padding": (0, 1, 0, 0)} if narrow else {}
    table = Table(title=title, header_style="bold", title_justify="left", **style)
    table.add_column("lever", overflow="fold")
    table.add_column("stroke", no_wrap=True)
    for name in ("TTFT", "TPOT", "longest gap", "tokens/s", "memory"):
        table.add_column(name, justify="right")
    if not narrow:
        table.add_column("textbook")
    for row in rows:
        effect = row.effect
        cells = [times(effect[k]) if k in effect else "–" for k in ("ttft", "tpot", "gap", "throughput")]
        words = [] if narrow else [note(row)]
        table.add_row(row.name, row.stroke, *cells, row.memory, *words)
    console.print(table)
    for row in rows if narrow else ():
        console.print(f"{escape(row.name)}: {note(row)}")


def note(row: Row) -> str:
    """What textbooks say, or why there is no result."""
    return row.textbook if row.trouble is None else f"[dim]{escape(row.trouble)}[/dim]"
