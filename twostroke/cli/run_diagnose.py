"""The command `diagnose`: what is wrong with the deployment there is, and what would help."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from twostroke.bench import ledger, report
from twostroke.bench.apply import Applied
from twostroke.bench.client import Target
from twostroke.bench.probing import probe
from twostroke.bench.record import Run, load_runs
from twostroke.bench.remote import Admin, apply_live, diagnose_load, diagnose_recorded
from twostroke.bench.workload import Load, make_load, trace_load
from twostroke.cli.options import (
    Requests,
    Scale,
    Settings,
    Tpot,
    Trace,
    Ttft,
    parse_settings,
    refuse_unused,
    sane_rate,
    unused_in_diagnosis,
)
from twostroke.cli.run_plan import calibrate_here, deployment_for, describe
from twostroke.cli.terminal import open_llm
from twostroke.cli.watch import over_http
from twostroke.config import make_config
from twostroke.cost.diagnose import Diagnosis, Targets, diagnose, seconds
from twostroke.cost.hardware import calibration_path, load_calibration
from twostroke.cost.probe import verdict_from_outside
from twostroke.cost.verdict import evidence_lines
from twostroke.errors import ConfigError, InputError, TwostrokeError
from twostroke.hardware import machine_name
from twostroke.weights.catalog import DEFAULT, cache_folder

console = Console(highlight=False)
LEDGER = "ledger.jsonl"


def diagnose_command(
    context: typer.Context,
    url: Annotated[str | None, typer.Option(help="A running server: it is measured under the workload first.")] = None,
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
    api_key: Annotated[str | None, typer.Option(envvar="TWOSTROKE_API_KEY", help="For the server.")] = None,
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
    refuse_unused(context, unused_in_diagnosis(source, trace is not None))
    targets, settings = Targets(ttft, tpot), parse_settings(option)
    if show_ledger:
        show_entries(ledger.read(cache_folder() / LEDGER))
        return
    load = (
        trace_load(trace, requests, rate, scale)
        if trace
        else make_load(workload or "chat", "poisson", requests, rate, 0, scale)
    )
    target = None if url is None else Target(url, key=api_key, likely=model)
    if target is not None and (admin := Admin(target)).known:
        told = "says nothing of a running twostroke, which tells what it runs and how"
        refuse_unused(context, dict.fromkeys(("model", "hardware", "precision", "option"), told))
        of_twostroke(admin, target, load if apply or workload or trace else None, apply, targets)
    elif apply:
        if target is not None:
            raise ConfigError(f"--apply: {target.base} is no twostroke; its settings cannot be changed from here.")
        run_apply(model or DEFAULT, load, settings, targets)
    elif target is not None:
        of_server(target, load, model, hardware, precision, settings, targets)
    elif result is not None:
        run = load_runs(result)[-1]
        of_run(run, model or run.model, hardware, precision, run.settings or settings, targets)
    elif trace is not None:
        deployment, _ = deployment_for(model or "llama-3.1-8b", hardware, precision, 1, settings)
        show_diagnosis(diagnose(deployment, trace_load(trace, requests, None, scale).arrivals, None, targets))
    else:
        raise InputError("say what to diagnose: --url, --result, --trace, or --apply for an engine in process.")


def of_twostroke(admin: Admin, target: Target, load: Load | None, apply: bool, targets: Targets) -> None:
    """A server that tells everything: what it recorded, or how it does under a load of ours, with the lever pulled."""
    now = admin.totals()
    hits, queries = now.get("vllm:prefix_cache_hits_total", 0.0), now.get("vllm:prefix_cache_queries_total", 0.0)
    console.print(
        f"[dim]since its start: {now.get('vllm:generation_tokens_total', 0):,.0f} tokens written, prefix hits "
        f"{hits / max(1.0, queries):.0%}, {now.get('vllm:num_preemptions_total', 0):,.0f} preemptions[/dim]"
    )
    path = calibration_path(cache_folder(), admin.get("/twostroke/settings")["model"])
    here = any(name in target.base for name in ("//127.0.0.1", "//localhost", "//[::1]"))
    rates = load_calibration(path).rates if here and path.exists() else None
    if load is None:
        show_diagnosis(diagnose_recorded(admin, targets, rates))
    elif apply:
        show_applied(apply_live(admin, target, load, over_http, targets, rates))
    else:
        show_diagnosis(diagnose_load(admin, target, load, over_http, targets, rates).diagnosis)


def of_server(
    target: Target,
    load: Load,
    model: str | None,
    hardware: str,
    precision: str | None,
    settings: dict[str, Any],
    targets: Targets,
) -> None:
    """Probe it from outside; where it is known what runs there and on what, measure a load and rank the levers too."""
    shape, run = probe(target), over_http(target, load)
    trouble = None
    try:
        deployment_for(model or run.model, hardware, precision, 1, {})
    except TwostrokeError as error:
        trouble = error
    if trouble is not None:
        prompt = mean(record.prompt for record in run.records)
        console.print(f"[bold]{verdict_from_outside(shape, run.summary(), prompt)}[/bold]")
    else:
        of_run(run, model or run.model, hardware, precision, settings, targets)
    for line in shape.sentences:
        console.print(f"  {line}")
    if trouble is not None:
        console.print(report.table(run))
        console.print(f"[dim]No levers can be ranked: {trouble} Give --model and --hardware.[/dim]")


def of_run(
    run: Run, model: str, hardware: str, precision: str | None, settings: dict[str, Any], targets: Targets
) -> None:
    from twostroke.cost.deploy import config_of

    known = {name: value for name, value in settings.items() if name != "seed"}
    deployment, _ = deployment_for(model, hardware, precision, 1, {})
    config = config_of(known) if "kv_blocks" in known else make_config(**known)
    show_diagnosis(diagnose(replace(deployment, config=config), run.arrivals(), run.served(), targets))


def run_apply(model: str, load: Load, settings: dict[str, Any], targets: Targets) -> None:
    from twostroke.bench.apply import apply
    from twostroke.bench.levers import warm_up

    path = calibration_path(cache_folder(), model)
    calibration = load_calibration(path) if path.exists() else calibrate_here(model, settings)
    _, stored = describe(model)
    assert stored is not None

    def reopen(changed: dict[str, Any]) -> Any:
        fresh = open_llm(model, settings | changed)
        warm_up(fresh)
        return fresh

    show_applied(apply(reopen({}), reopen, load, model, calibration, stored, targets))


def show_applied(found: Applied | Diagnosis) -> None:
    if not isinstance(found, Applied):
        show_diagnosis(found)
        console.print("No setting would help: nothing was changed.")
        return
    show_diagnosis(found.diagnosis)
    how = "on the running engine" if found.live else "with a new engine"
    console.print(f"\n[bold]{found.effect.lever.title}[/bold] ({how}):")
    show_entries([found.entry])
    ledger.append(cache_folder() / LEDGER, found.entry)


def show_diagnosis(found: Diagnosis) -> None:
    console.print(f"[bold]{found.sentence}[/bold]")
    s = found.measured
    for line in (
        *evidence_lines(found),
        f"replay without any lever: TTFT {seconds(found.simulated.ttft.p50)} (measured {seconds(s.ttft.p50)}), "
        f"TPOT {seconds(found.simulated.tpot.p50)} (measured {seconds(s.tpot.p50)})",
    ):
        console.print(f"  {line}")
    table = Table(title="levers, best first (predicted: new over old)", header_style="bold", title_justify="left")
    for name in ("lever", "TTFT", "TPOT", "longest gap", "tokens/s", "cost", "live", "what to do"):
        table.add_column(name, justify="left" if name in ("lever", "what to do") else "right")
    for one in found.effects:
        cells = [f"{value - 1:+.0%}" for value in (one.ttft, one.tpot, one.stall, one.throughput, one.cost)]
        table.add_row(one.lever.name, *cells, "yes" if one.lever.live else "no", one.lever.title)
    if found.effects:
        console.print(table)
    rest = Table(title="do not help, and why", title_justify="left", show_header=False, box=None, style="dim")
    for useless in found.useless:
        rest.add_row(useless.lever.name, useless.reason)
    console.print(rest)


def show_entries(entries: list[ledger.Entry]) -> None:
    if not entries:
        console.print(f"The ledger is empty: `twostroke diagnose --apply` writes it ({machine_name()}).")
        return
    table = Table(header_style="bold")
    for name in ("when", "model", "load", "lever", "metric", "before", "predicted", "measured", "error"):
        table.add_column(name, justify="left" if name in ("when", "model", "load", "lever", "metric") else "right")
    for one in entries:
        values = [f"{v:,.0f}/s" if one.metric == "throughput" else seconds(v) for v in
                  (one.before, one.predicted, one.measured)]  # fmt: skip
        table.add_row(one.when[:16], one.model, one.load, one.lever, one.metric, *values, f"{one.error:+.0%}")
    console.print(table)
