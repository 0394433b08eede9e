"""A load measured, results compared, levers measured: what `bench` does, and how it is shown."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from twostroke.bench import html, plots, report
from twostroke.bench.client import Target
from twostroke.bench.compare import compare as compare_runs
from twostroke.bench.record import Run, load_runs, save, typed
from twostroke.bench.workload import Load, make_load, renewed, trace_load
from twostroke.cli.deployment import describe
from twostroke.cli.terminal import errors, open_llm, progress_bar
from twostroke.cli.watch import over_http, watching
from twostroke.cost.diagnose import seconds
from twostroke.cost.hardware import calibration_path, load_calibration
from twostroke.cost.roofline import Roofline, model_cost
from twostroke.errors import InputError
from twostroke.hardware import machine_name
from twostroke.weights.catalog import cache_folder
from twostroke.weights.checkpoint import locate

if TYPE_CHECKING:
    from twostroke.engine.llm import LLM

console = Console(highlight=False)


def make_loads(
    trace: str | None,
    workload: str,
    kind: str,
    count: int,
    rates: list[float | None],
    seed: int,
    scale: float,
    concurrency: int,
    longest: int | None,
) -> list[Load]:
    """One for each rate, each in words of its own."""

    def at(per_second: float | None) -> Load:
        if trace is not None:
            return trace_load(trace, count, per_second, scale, longest)
        return make_load(workload, kind, count, per_second or 1.0, seed, scale, concurrency)

    return [renewed(at(per_second), number) for number, per_second in enumerate(rates)]


def over_url(
    url: str, model: str | None, api_key: str | None, chat: bool, vocabulary: int | None, loads: list[Load]
) -> list[Run]:
    target = Target(url, model, api_key, chat, vocabulary)
    return [over_http(target, load) for load in loads]


def in_process(model: str, settings: dict[str, Any], loads: list[Load]) -> list[Run]:
    from twostroke.bench.inprocess import measure
    from twostroke.bench.levers import warm_up

    llm = open_llm(model, settings)
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


def compare(before: Path, after: Path) -> None:
    """What moved between two results, with 95 % intervals."""
    old, new = load_runs(before), load_runs(after)
    if len(old) != len(new):
        raise InputError(f"{before} holds {len(old)} loads, {after} {len(new)}: compare results of the same rates.")
    for first, second in zip(old, new, strict=True):
        names = dict.fromkeys(report.title(run) for run in (first, second))
        table = Table(title=escape("  →  ".join(names)), header_style="bold", title_justify="left")
        for name in ("", "before", "after", "change", "95 % interval", ""):
            table.add_column(name, justify="right" if name else "left")
        for change in compare_runs(first, second):
            rate_like = change.better == "higher"
            values = [f"{value:,.1f}" if rate_like else seconds(value) for value in (change.before, change.after)]
            interval = f"{change.low - 1:+.0%} … {change.high - 1:+.0%}"
            table.add_row(change.name, *values, f"{change.ratio - 1:+.0%}", interval, change.verdict)
        console.print(table)


def levers(model: str, rounds: int, base: dict[str, Any], json_out: Path | None, svg_out: Path | None) -> None:
    """Every lever off and on, as a table."""
    from twostroke.bench.levers import run, times

    with progress_bar(f"fetching {model}") as fetching:
        locate(model, fetching)  # so that there is a file whose bytes can be counted
    opened, said = lambda settings: open_llm(model, base | settings), lambda text: errors.print(f"[dim]{text}[/dim]")
    rows = run(opened, rounds, said, describe(model)[1])
    table = Table(title=f"{model} on {machine_name()}: on over off", header_style="bold", title_justify="left")
    for name in ("lever", "stroke", "TTFT", "TPOT", "longest gap", "tokens/s", "memory", "textbook"):
        table.add_column(name, justify="left" if name in ("lever", "stroke", "textbook") else "right")
    for row in rows:
        effect = row.effect
        cells = [times(effect[k]) if k in effect else "–" for k in ("ttft", "tpot", "gap", "throughput")]
        said_of = row.textbook if row.trouble is None else f"[dim]{escape(row.trouble)}[/dim]"
        table.add_row(row.name, row.stroke, *cells, row.memory, said_of)
    console.print(table)
    if json_out is not None:
        document = {"machine": machine_name(), "model": model, "rounds": rounds}
        rows_out = [{**asdict(row), "effect": row.effect} for row in rows]
        json_out.write_text(json.dumps({**document, "rows": rows_out}, indent=1) + "\n")
    if svg_out is not None:
        title = f"{model} on {machine_name()}: what each lever does"
        svg_out.write_text(plots.effects(title, [(row.name, row.effect) for row in rows]))
