"""The command `diagnose`: of a running server, a result, a trace, or an engine in this process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from twostroke.cli import options
from twostroke.cli.options import make_targets, parse_settings, refuse_unsimulated, refuse_unused, sane_rate
from twostroke.cli.terminal import console, open_llm
from twostroke.cost.units import seconds
from twostroke.errors import ConfigError, InputError, TwostrokeError
from twostroke.record import replace
from twostroke.weights.catalog import DEFAULT, cache_folder

if TYPE_CHECKING:
    from twostroke.bench.apply import Applied
    from twostroke.bench.client import Target
    from twostroke.bench.ledger import Prediction
    from twostroke.bench.record import Run
    from twostroke.bench.remote import Admin
    from twostroke.bench.workload import Load
    from twostroke.cost.answers.diagnose import Diagnosis
    from twostroke.cost.answers.split import Verdict
    from twostroke.cost.simulation.deployment import Deployment
    from twostroke.cost.simulation.served import Targets

LEDGER = "ledger.jsonl"


@dataclass(frozen=True, slots=True)
class Described:
    """The deployment as the options describe it."""

    model: str | None
    hardware: str
    precision: str | None
    settings: dict[str, Any]

    def deployment(self, model: str, settings: dict[str, Any]) -> Deployment:
        from twostroke.cli.deployment import deployment_for

        return deployment_for(self.model or model, self.hardware, self.precision, 1, settings)[0]


def diagnose(
    context: typer.Context,
    url: Annotated[
        str | None,
        typer.Option(help="A running server. A twostroke server reports what it served; others are measured."),
    ] = None,
    result: Annotated[Path | None, typer.Option(help="A result of `twostroke bench --json`.")] = None,
    trace: options.Trace = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Model that the server runs: name or path.")
    ] = None,
    hardware: Annotated[str, typer.Option(help="Where it runs: a name of the table, or 'this'.")] = "this",
    precision: Annotated[str | None, typer.Option(help="Precision of the weights, if there is no file.")] = None,
    workload: Annotated[
        str | None,
        typer.Option("--workload", "-w", help="As in `bench`. Default: what the server recorded."),
    ] = None,
    requests: options.Requests = 60,
    rate: Annotated[float, typer.Option(callback=sane_rate, help="Requests/s of the workload.")] = 1.0,
    scale: options.Scale = 1.0,
    api_key: options.ApiKey = None,
    ttft: options.Ttft = None,
    tpot: options.Tpot = None,
    apply: Annotated[
        bool,
        typer.Option("--apply", help="Apply the best lever, on a running server or in this process; measure again."),
    ] = False,
    show_ledger: Annotated[bool, typer.Option("--ledger", help="All predictions so far beside the results.")] = False,
    option: options.SettingsOption = None,
) -> None:
    """Which stroke is slow, why, and what would help by how much."""
    source = "ledger" if show_ledger else "url" if url else "result" if result else "apply" if apply else "trace"
    refuse_unused(context, unused(source, trace is not None))
    from twostroke.bench.workload import choose_load

    described, targets = Described(model, hardware, precision, parse_settings(option)), make_targets(ttft, tpot)
    if source == "ledger":
        show_all_predictions()
    elif result is not None:
        of_result(result, described, targets)
    elif source == "trace" and trace is not None:
        of_trace(choose_load(trace, count=requests, scale=scale), described, targets)
    elif source == "trace":
        raise InputError("say what to diagnose: --url, --result, --trace, or --apply for an engine in this process.")
    else:
        load = choose_load(trace, workload or "chat", count=requests, per_second=rate, scale=scale)
        if url is None:
            apply_here(described, load, targets)
        else:
            given = load if apply or workload or trace else None
            of_url(context, url, api_key, described, load, given, apply, targets)


def unused(source: str, trace: bool) -> dict[str, str]:
    """Options without effect for this source of the diagnosis, and why."""
    load = ("trace", "workload", "requests", "rate", "scale")
    if source == "ledger":
        everything = (*load, "url", "result", "model", "hardware", "precision", "api_key", "ttft", "tpot", "apply")
        return dict.fromkeys((*everything, "option"), "has no effect with --ledger, which only shows earlier results")
    found = {"workload": "has no effect with --trace"} if trace else {}
    if source == "url":
        return found | {"result": "has no effect with --url: give one of them"}
    found["api_key"] = "is for a server: give --url"
    if source == "result":
        found |= dict.fromkeys(load, "has no effect with --result, which holds its own load")
        found["apply"] = "needs something that runs: leave --result out"
    elif source == "apply":
        found |= dict.fromkeys(("hardware", "precision"), "has no effect with --apply, which runs the model here")
    elif trace:
        found["rate"] = "has no effect with --trace, which is replayed as it was recorded"
    return found


# ---- what is diagnosed -----------------------------------------------------------------------------------------------


def of_url(
    context: typer.Context,
    url: str,
    key: str | None,
    described: Described,
    load: Load,
    given: Load | None,
    apply: bool,
    targets: Targets,
) -> None:
    """`given`: the load, where the options ask for one."""
    from twostroke.bench.client import Target
    from twostroke.bench.remote import Admin

    target = Target(url, key=key, likely=described.model)
    admin = Admin(target)
    if admin.known:
        reason = "has no effect with a running twostroke, which reports what it runs"
        refuse_unused(context, dict.fromkeys(("model", "hardware", "precision", "option"), reason))
        of_twostroke(admin, target, given, apply, targets)
    elif apply:
        raise ConfigError(f"--apply: {target.base} is not a twostroke server: its settings cannot be changed.")
    else:
        of_other_server(target, load, described, targets)


def of_twostroke(admin: Admin, target: Target, load: Load | None, apply: bool, targets: Targets) -> None:
    """What it recorded, or how it serves a load; with `apply` the best lever is pulled and the load measured again."""
    from twostroke.bench.remote import apply_live, diagnose_load, diagnose_recorded
    from twostroke.cli.watch import over_http
    from twostroke.cost.model.calibration import calibration_path, load_calibration

    now = admin.totals()
    hits, queries = now.get("vllm:prefix_cache_hits_total", 0.0), now.get("vllm:prefix_cache_queries_total", 0.0)
    console.print(
        f"[dim]since its start: {now.get('vllm:generation_tokens_total', 0):,.0f} tokens written, prefix hits "
        f"{hits / max(1.0, queries):.0%}, {now.get('vllm:num_preemptions_total', 0):,.0f} preemptions[/dim]"
    )
    workers = admin.workers()
    if workers is not None:
        of_cluster(admin, workers, target, load, apply, targets)
        return
    path = calibration_path(cache_folder(), admin.get("/twostroke/settings")["model"])
    here = any(name in target.base for name in ("//127.0.0.1", "//localhost", "//[::1]"))
    rates = load_calibration(path).rates if here and path.exists() else None
    if load is None:
        show_diagnosis(diagnose_recorded(admin, targets, rates))
    elif apply:
        show_applied(apply_live(admin, target, load, over_http, targets, rates))
    else:
        show_diagnosis(diagnose_load(admin, target, load, over_http, targets, rates).diagnosis)


def of_cluster(
    admin: Admin, workers: dict[str, Any], target: Target, load: Load | None, apply: bool, targets: Targets
) -> None:
    """Which stroke is slow on its workers together, and how they should be divided. With `apply` roles are changed,
    and the load is measured again."""
    from twostroke.bench import split
    from twostroke.cli.watch import over_http
    from twostroke.cost.answers.diagnose import diagnose
    from twostroke.cost.answers.split import divide

    if apply:
        assert load is not None, "--apply has a load"
        found = split.apply(admin, target, load, over_http, targets)
        if isinstance(found, split.RolesChanged):
            show_division(found.verdict)
            roles = ", ".join(f"{name} is for {role}" for name, role in found.roles.items())
            measured = f"{found.before:.2f} requests/s within the targets before, {found.after:.2f} after"
            console.print(f"Changed: {roles}. Measured: {measured}.")
        else:
            show_division(found)
            console.print("Nothing was changed.")
        return
    if load is not None:
        over_http(target, load)
    record = split.recorded(admin, workers)
    show_diagnosis(diagnose(record.deployment, record.arrivals, record.served, targets))
    show_division(divide(record.deployment, record.arrivals, targets))


def of_other_server(target: Target, load: Load, described: Described, targets: Targets) -> None:
    """Probe it; rank the levers too where its model and its hardware are known."""
    from statistics import mean

    from twostroke.bench import report
    from twostroke.bench.black_box import probe, verdict
    from twostroke.cli.watch import over_http

    found, run = probe(target), over_http(target, load)
    trouble = None
    try:
        described.deployment(run.model, {})
    except TwostrokeError as error:
        trouble = error
    if trouble is not None:
        prompt = mean(record.prompt for record in run.records)
        console.print(f"[bold]{report.overload(run) or verdict(found, run.summary(), prompt)}[/bold]")
    else:
        of_run(run, described, targets)
    for line in found.sentences:
        console.print(f"  {line}")
    if trouble is not None:
        console.print(report.table(run))
        console.print(f"[dim]No levers can be ranked: {trouble} Give --model and --hardware.[/dim]")


def of_result(path: Path, described: Described, targets: Targets) -> None:
    from twostroke.bench.record import load_runs

    of_run(load_runs(path)[-1], described, targets)


def of_run(run: Run, described: Described, targets: Targets) -> None:
    """Options take precedence over the result's own settings."""
    from twostroke.cost.answers.diagnose import diagnose
    from twostroke.cost.simulation.deployment import config_of, drafts_of

    refuse_unsimulated(described.settings)
    config = config_of(run.settings, described.settings)
    deployment = described.deployment(run.model, {})
    deployment = replace(deployment, config=config, lookup=drafts_of(run.lookup(), deployment.device.kind))
    show_diagnosis(diagnose(deployment, run.arrivals(), run.served(), targets, paced=run.rate is not None))


def of_trace(load: Load, described: Described, targets: Targets) -> None:
    """Nothing was measured: the simulator serves the trace."""
    from twostroke.cost.answers.diagnose import diagnose

    refuse_unsimulated(described.settings)
    deployment = described.deployment("llama-3.1-8b", described.settings)
    show_diagnosis(diagnose(deployment, load.arrivals, None, targets))


def apply_here(described: Described, load: Load, targets: Targets) -> None:
    """Pull the best lever on an engine in this process."""
    from twostroke.bench.apply import apply
    from twostroke.bench.inprocess import warm_up
    from twostroke.cli.deployment import calibrate_here, describe
    from twostroke.cost.model.calibration import calibration_path, load_calibration

    model, settings = described.model or DEFAULT, described.settings
    path = calibration_path(cache_folder(), model)
    calibration = load_calibration(path) if path.exists() else calibrate_here(model, settings)
    stored = describe(model, calibration.device().kind).stored
    assert stored is not None

    def reopen(changed: dict[str, Any]) -> Any:
        fresh = open_llm(model, settings | changed, ahead=True)
        warm_up(fresh)
        return fresh

    show_applied(apply(reopen({}), reopen, load, model, calibration, stored, targets))


# ---- how it is shown -------------------------------------------------------------------------------------------------


def show_applied(found: Applied | Diagnosis) -> None:
    from twostroke.bench import ledger
    from twostroke.bench.apply import Applied

    if not isinstance(found, Applied):
        show_diagnosis(found)
        console.print("Nothing was changed." if found.mismatch else "No setting would help: nothing was changed.")
        return
    show_diagnosis(found.diagnosis)
    how = "on the running engine" if found.live else "with a new engine"
    console.print(f"\n[bold]{found.effect.lever.title}[/bold] ({how}):")
    show_predictions([found.prediction])
    ledger.append(cache_folder() / LEDGER, found.prediction)


def show_division(found: Verdict) -> None:
    console.print(f"[bold]{found.sentence}[/bold]")
    table = Table(title=f"divisions of the workers ({found.targets})", header_style="bold", title_justify="left")
    for name in ("workers", "goodput", "within", "TTFT p95", "TPOT p95"):
        table.add_column(name)
    for one in found.tried:
        marks = " (now)" if one is found.now else ""
        s = one.summary
        table.add_row(
            f"{one.title}{marks}", f"{one.goodput:.2f}/s", f"{one.share:.0%}", seconds(s.ttft.p95), seconds(s.tpot.p95)
        )
    console.print(table)


def show_diagnosis(found: Diagnosis) -> None:
    from twostroke.cost.answers.wording import evidence_lines, known_line

    console.print(f"[bold]{found.sentence}[/bold]")
    s = found.measured
    for line in (
        *evidence_lines(found.evidence),
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
    for one in found.effects:
        if one.after.known:
            console.print(f"  {known_line(one.lever.name, one.after)}")
    if found.mismatch is not None:
        return  # no lever was tried
    rest = Table(title="do not help, and why", title_justify="left", show_header=False, box=None, style="dim")
    for rejected in found.rejected:
        rest.add_row(rejected.lever.name, rejected.reason)
    console.print(rest)


def show_all_predictions() -> None:
    from twostroke.bench import ledger

    show_predictions(ledger.read(cache_folder() / LEDGER))


def show_predictions(predictions: list[Prediction]) -> None:
    if not predictions:
        console.print("The ledger is empty: `twostroke diagnose --apply` writes it.")
        return
    table = Table(header_style="bold")
    for name in ("when", "model", "load", "lever", "metric", "before", "predicted", "measured", "error"):
        table.add_column(name, justify="left" if name in ("when", "model", "load", "lever", "metric") else "right")
    for one in predictions:
        values = [f"{v:,.0f}/s" if one.metric == "throughput" else seconds(v) for v in
                  (one.before, one.predicted, one.measured)]  # fmt: skip
        table.add_row(one.when[:16], one.model, one.load, one.lever, one.metric, *values, f"{one.error:+.0%}")
    console.print(table)
