"""What is wrong with the deployment there is, and what would help: of a server, a result, a trace, an engine here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console
from rich.table import Table

from twostroke.bench import ledger, report
from twostroke.bench.apply import Applied
from twostroke.bench.client import Target
from twostroke.bench.probing import probe
from twostroke.bench.record import Run, load_runs
from twostroke.bench.remote import Admin, apply_live, diagnose_load, diagnose_recorded
from twostroke.bench.workload import Load, make_load, trace_load
from twostroke.cli.deployment import calibrate_here, deployment_for, describe
from twostroke.cli.settings import refuse_unreckoned
from twostroke.cli.terminal import open_llm
from twostroke.cli.watch import over_http
from twostroke.cost.deploy import config_of
from twostroke.cost.diagnose import Diagnosis, Targets, diagnose, seconds
from twostroke.cost.hardware import calibration_path, load_calibration
from twostroke.cost.probe import verdict_from_outside
from twostroke.cost.verdict import evidence_lines
from twostroke.errors import TwostrokeError
from twostroke.weights.catalog import DEFAULT, cache_folder

__all__ = [
    "Targets", "There", "apply_here", "load_of", "of_result", "of_server", "of_trace", "of_twostroke", "reach",
    "show_diagnosis", "show_ledger",
]  # fmt: skip

console = Console(highlight=False)
LEDGER = "ledger.jsonl"


@dataclass(frozen=True, slots=True)
class There:
    """What is said to run where the diagnosis is made of, and on what."""

    model: str | None
    hardware: str
    precision: str | None
    settings: dict[str, Any]


def load_of(trace: str | None, workload: str | None, requests: int, rate: float, scale: float) -> Load:
    if trace is not None:
        return trace_load(trace, requests, rate, scale)
    return make_load(workload or "chat", "poisson", requests, rate, 0, scale)


def reach(url: str, key: str | None, model: str | None) -> tuple[Target, Admin]:
    target = Target(url, key=key, likely=model)
    return target, Admin(target)


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


def of_server(target: Target, load: Load, there: There, targets: Targets) -> None:
    """Probe it from outside; where it is known what runs there and on what, measure a load and rank the levers too."""
    shape, run = probe(target), over_http(target, load)
    trouble = None
    try:
        deployment_for(there.model or run.model, there.hardware, there.precision, 1, {})
    except TwostrokeError as error:
        trouble = error
    if trouble is not None:
        prompt = mean(record.prompt for record in run.records)
        console.print(f"[bold]{verdict_from_outside(shape, run.summary(), prompt)}[/bold]")
    else:
        of_run(run, there, targets)
    for line in shape.sentences:
        console.print(f"  {line}")
    if trouble is not None:
        console.print(report.table(run))
        console.print(f"[dim]No levers can be ranked: {trouble} Give --model and --hardware.[/dim]")


def of_result(path: Path, there: There, targets: Targets) -> None:
    of_run(load_runs(path)[-1], there, targets)


def of_trace(trace: str, requests: int, scale: float, there: There, targets: Targets) -> None:
    """Nothing was measured: the simulator serves it."""
    refuse_unreckoned(there.settings)
    deployment, _ = deployment_for(there.model or "llama-3.1-8b", there.hardware, there.precision, 1, there.settings)
    show_diagnosis(diagnose(deployment, trace_load(trace, requests, None, scale).arrivals, None, targets))


def of_run(run: Run, there: There, targets: Targets) -> None:
    """What is typed comes before what the result says of itself."""
    refuse_unreckoned(there.settings)
    deployment, _ = deployment_for(there.model or run.model, there.hardware, there.precision, 1, {})
    config = config_of(run.settings, there.settings)
    show_diagnosis(diagnose(replace(deployment, config=config), run.arrivals(), run.served(), targets))


def apply_here(there: There, load: Load, targets: Targets) -> None:
    """The lever pulled on an engine in this process."""
    from twostroke.bench.apply import apply
    from twostroke.bench.levers import warm_up

    model, settings = there.model or DEFAULT, there.settings
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


def show_ledger() -> None:
    show_entries(ledger.read(cache_folder() / LEDGER))


def show_entries(entries: list[ledger.Entry]) -> None:
    if not entries:
        console.print("The ledger is empty: `twostroke diagnose --apply` writes it.")
        return
    table = Table(header_style="bold")
    for name in ("when", "model", "load", "lever", "metric", "before", "predicted", "measured", "error"):
        table.add_column(name, justify="left" if name in ("when", "model", "load", "lever", "metric") else "right")
    for one in entries:
        values = [f"{v:,.0f}/s" if one.metric == "throughput" else seconds(v) for v in
                  (one.before, one.predicted, one.measured)]  # fmt: skip
        table.add_row(one.when[:16], one.model, one.load, one.lever, one.metric, *values, f"{one.error:+.0%}")
    console.print(table)
