"""The commands `plan` and `diagnose`: what a deployment would do, and what is wrong with the one there is."""

from __future__ import annotations

import json
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
from twostroke.bench.watch import over_http
from twostroke.bench.workload import Load, make_load, trace_load
from twostroke.config import QUANTIZATIONS, make_config
from twostroke.cost.capacity import SHARE, Need, Sizing, candidates, cheapest, precisions, priced, size
from twostroke.cost.deploy import Deployment
from twostroke.cost.diagnose import Diagnosis, Targets, diagnose, seconds
from twostroke.cost.hardware import Calibration, Device, calibration_path, find_device, load_calibration
from twostroke.cost.models import SHAPES, known_arch
from twostroke.cost.probe import verdict_from_outside
from twostroke.cost.trace import Arrival
from twostroke.cost.verdict import evidence_lines
from twostroke.errors import ConfigError, InputError, ModelError, TwostrokeError
from twostroke.hardware import machine_name
from twostroke.model.arch import Arch
from twostroke.model.families import arch_from_config
from twostroke.options import Requests, Scale, Settings, Tpot, Trace, Ttft, Workload, above_zero, parse_settings
from twostroke.terminal import errors, open_llm
from twostroke.weights.catalog import CATALOG, DEFAULT, cache_folder, installed

console = Console(highlight=False)
LEDGER = "ledger.jsonl"


def describe(model: str) -> tuple[Arch, int | None]:
    """Architecture, and the bytes of the weights where there is a file to count them in. Nothing is downloaded for a
    name whose shape is known."""
    from twostroke.weights.checkpoint import locate, open_checkpoint
    from twostroke.weights.describe import checkpoint_bytes, load_arch

    path = Path(model).expanduser()
    if path.name == "config.json" and path.is_file():
        try:
            config = json.loads(path.read_text())
        except ValueError as error:
            raise ModelError(f"{path}: not JSON ({error}): fetch it again.") from None
        return arch_from_config(config, str(path)), None
    shape = known_arch(model)
    if shape is not None and not (model in CATALOG and installed(model)):
        return shape, None
    try:
        checkpoint = open_checkpoint(locate(model))
    except ModelError as error:
        raise ModelError(
            f"{error} For a plan a config.json is enough, or a known shape: {', '.join(SHAPES)}."
        ) from None
    return load_arch(checkpoint), checkpoint_bytes(checkpoint)


def load_of(trace: str | None, workload: str, requests: int, scale: float) -> list[Arrival]:
    if trace is not None:
        return trace_load(trace, requests, None, scale).arrivals
    return make_load(workload, "poisson", requests, 1.0, 0, scale).arrivals


def deployment_for(
    model: str, hardware: str, precision: str | None, gpus: int, settings: dict[str, Any]
) -> tuple[Deployment, Calibration | None]:
    arch, stored = describe(model)
    config = make_config(**settings)
    if gpus > arch.heads:
        raise ConfigError(f"--gpus {gpus}: {model} has {arch.heads} heads to share out, so {arch.heads} at most.")
    if hardware == "this":
        calibration = load_calibration(calibration_path(cache_folder(), model))
        device, rates = calibration.device(), calibration.rates
        check_precision(precision, device, gpus)
        return Deployment(
            arch, device, config, precision or "float32", None if precision else stored, rates
        ), calibration
    exact, device = stored if precision is None else None, find_device(hardware)
    check_precision(precision, device, gpus)
    return Deployment(arch, device, config, precision or "bfloat16", exact, gpus=gpus), None


def check_precision(precision: str | None, device: Device, gpus: int) -> None:
    if precision in QUANTIZATIONS and precision not in precisions(device):
        raise ConfigError(
            f"--precision {precision} is not served on {device.title}: use {' or '.join(precisions(device))} there."
        )
    if gpus > 1 and device.kind == "cpu":
        raise ConfigError(f"--gpus {gpus}: {device.title} is one device; several share a model only on GPUs.")


def check_lengths(deployment: Deployment, rows: list[Arrival]) -> None:
    """Requests that are refused miss every target: too many of them, and no fleet helps."""
    room = deployment.settings.max_model_len
    long = [row.prompt + row.output for row in rows if row.prompt + row.output > room]
    if not long:
        return
    said = f"{len(long)} of {len(rows)} requests are longer than {room:,} tokens (the longest: {max(long):,})"
    if len(long) > (1 - SHARE) * len(rows):
        raise ConfigError(
            f"{said}, which is all that one may have here (max_model_len, or the model's own context): "
            "divide the lengths with --scale, or take another model."
        )
    errors.print(f"[dim]{said}: they count as missed[/dim]")


# ---- plan ------------------------------------------------------------------------------------------------------------


def plan_command(
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
    rate: Annotated[float, typer.Option(callback=above_zero, help="Requests/s to be served.")] = 1.0,
    ttft: Ttft = 1.0,
    tpot: Tpot = 0.05,
    split: Annotated[bool, typer.Option("--split", help="Prefill and decode workers of their own.")] = False,
    search: Annotated[bool, typer.Option("--search", help="Try all rentable hardware; the cheapest first.")] = False,
    calibrate: Annotated[bool, typer.Option("--calibrate", help="Measure this machine with this model first.")] = False,
    option: Settings = None,
) -> None:
    """Before owning anything: does it fit, how fast, what does it cost, how many workers does a load need."""
    settings = parse_settings(option)
    if calibrate:
        calibrate_here(model, settings)
        hardware = "this"
    rows = load_of(trace, workload, requests, scale)
    prompt = round(sum(row.prompt for row in rows) / len(rows))
    output = round(sum(row.output for row in rows) / len(rows))
    longest = max(row.prompt + row.output for row in rows)
    deployment, _ = deployment_for(model, hardware, precision, gpus, settings)
    if deployment.config.max_model_len is None and longest < deployment.arch.max_positions:
        deployment = replace(deployment, config=replace(deployment.config, max_model_len=longest + 1))
    check_lengths(deployment, rows)
    show_sizing(size(deployment, prompt, output))
    assert ttft is not None and tpot is not None
    options = [deployment]
    if search:
        options = candidates(deployment.arch, priced(), deployment.config)
    elif precision is None and hardware != "this" and deployment.config.quantize is None:
        found = candidates(deployment.arch, [deployment.device], deployment.config, (gpus,))
        options += [one for one in found if one.precision != deployment.precision]
    say = lambda one: errors.print(f"[dim]{label(one)}[/dim]")  # noqa: E731
    pools = (True,) if split else (False,) if search else (False, True)
    needs = cheapest(options, rows, rate, ttft, tpot, say if search else None, pools)
    if not needs:
        console.print(
            f"No number of these workers meets TTFT ≤ {seconds(ttft)} and TPOT ≤ {seconds(tpot)}: a request alone "
            "misses them. Try --gpus, a narrower --precision, or --search."
        )
        raise typer.Exit(1)
    show_needs(needs, rate, ttft, tpot)


def calibrate_here(model: str, settings: dict[str, Any]) -> Calibration:
    from twostroke.bench.calibrate import calibrate

    llm = open_llm(model, settings)
    _, stored = describe(model)
    assert stored is not None, "an engine that runs has a checkpoint"
    with console.status("calibrating") as status:
        found = calibrate(llm, model, stored, progress=lambda text: status.update(f"calibrating: {text}"))
    path = calibration_path(cache_folder(), model)
    found.save(path)
    rates = found.rates
    errors.print(
        f"[dim]weights are read at {rates.bandwidth / 1e9:,.1f} GB/s, products run at {rates.compute / 1e9:,.0f} "
        f"GFLOP/s, a step costs {seconds(rates.step_seconds)} beside them[/dim]"
    )
    errors.print(
        f"[dim]{found.steps} steps, predicted within {found.errors['median']:.0%} (median) and "
        f"{found.errors['p95']:.0%} (p95); kept in {path}[/dim]"
    )
    return found


def label(deployment: Deployment) -> str:
    count = f"{deployment.gpus} × " if deployment.gpus > 1 else ""
    return f"{count}{deployment.device.name}, {deployment.config.quantize or deployment.precision}"


def show_sizing(found: Sizing) -> None:
    table = Table(title=f"{found.deployment.device.title}: one worker", header_style="bold", title_justify="left")
    for name in ("", "prefill", "decode"):
        table.add_column(name, justify="right" if name else "left")
    p, d = found.prefill, found.decode
    table.add_row("alone", f"TTFT {seconds(p.seconds)}", f"TPOT {seconds(d.seconds)}")
    table.add_row(f"batch of {found.batch}", f"TTFT ≥ {seconds(p.batch_seconds)}", f"TPOT {seconds(d.batch_seconds)}")
    table.add_row("FLOP per byte", f"{p.intensity:,.0f}", f"{d.intensity:,.1f}")
    table.add_row(f"bound by (ridge {found.ridge:,.0f})", p.bound, d.bound)
    table.add_row("tokens/s", f"{p.tokens_rate:,.0f}", f"{d.tokens_rate:,.0f}")
    table.add_row("$ per million tokens", f"{p.dollars_per_million:,.3f}", f"{d.dollars_per_million:,.3f}")
    console.print(table)
    console.print(
        f"{found.parameters:,} parameters, weights {found.weight_bytes:,} bytes · "
        f"KV {found.kv_bytes_per_token:,} bytes a token, {found.kv_bytes:,} bytes in all · "
        f"{found.largest_batch:,} requests of {found.prompt} + {found.output} tokens fit at once"
    )
    source = found.deployment.roofline().rates.source
    console.print(f"[dim]Times by {source}; prices are typical on-demand ones, yours may differ.[/dim]")


def show_needs(needs: list[Need], rate: float, ttft: float, tpot: float) -> None:
    title = f"{rate:,.10g} requests/s with TTFT ≤ {seconds(ttft)} and TPOT ≤ {seconds(tpot)} for 95 % of requests"
    table = Table(title=title, header_style="bold", title_justify="left")
    for name in ("worker", "workers", "$/hour", "$/M tokens out", "TTFT p95", "TPOT p95", "busy"):
        table.add_column(name, justify="left" if name == "worker" else "right")
    for need in needs[:12]:
        s = need.outcome.summary
        count = f"{need.prefill} prefill + {need.workers} decode" if need.prefill else str(need.workers)
        money = [f"{value:,.2f}" for value in (need.dollars_per_hour, need.dollars_per_million)]
        times = [seconds(s.ttft.p95), seconds(s.tpot.p95)]
        table.add_row(label(need.deployment), count, *money, *times, f"{need.outcome.utilisation:.0%}")
    console.print(table)


# ---- diagnose --------------------------------------------------------------------------------------------------------


def diagnose_command(
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
    rate: Annotated[float, typer.Option(callback=above_zero, help="Requests/s of the workload.")] = 1.0,
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
    targets, settings = Targets(ttft, tpot), parse_settings(option)
    if show_ledger:
        show_entries(ledger.read(cache_folder() / LEDGER))
        return
    if apply and result is not None:
        raise ConfigError("--apply needs something that runs: leave --result out.")
    load = (
        trace_load(trace, requests, rate, scale)
        if trace
        else make_load(workload or "chat", "poisson", requests, rate, 0, scale)
    )
    target = None if url is None else Target(url, key=api_key, likely=model)
    if target is not None and (admin := Admin(target)).known:
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
