"""The command `plan`: what a deployment would do, before there is one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from twostroke.bench.workload import make_load, trace_load
from twostroke.cli.options import (
    Requests,
    Scale,
    Settings,
    Tpot,
    Trace,
    Ttft,
    Workload,
    parse_settings,
    refuse_unused,
    sane_rate,
    unused_in_plan,
)
from twostroke.cli.terminal import errors, open_llm
from twostroke.config import QUANTIZATIONS, make_config
from twostroke.cost.capacity import (
    GPUS,
    SHARE,
    Need,
    Sizing,
    candidates,
    cheapest,
    check_weights,
    precisions,
    priced,
    size,
)
from twostroke.cost.deploy import Deployment
from twostroke.cost.diagnose import seconds
from twostroke.cost.hardware import DEVICES, Calibration, Device, calibration_path, find_device, load_calibration
from twostroke.cost.models import SHAPES, known_arch
from twostroke.cost.trace import Arrival
from twostroke.errors import ConfigError, ModelError
from twostroke.model.arch import Arch
from twostroke.model.families import arch_from_config
from twostroke.weights.catalog import CATALOG, cache_folder, installed

console = Console(highlight=False)


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
        calibration = calibrated(model)
        device, rates = calibration.device(), calibration.rates
        check_precision(precision, device, gpus)
        return Deployment(
            arch, device, config, precision or "float32", None if precision else stored, rates
        ), calibration
    exact, device = stored if precision is None else None, find_device(hardware)
    check_precision(precision, device, gpus)
    return Deployment(arch, device, config, precision or "bfloat16", exact, gpus=gpus), None


def calibrated(model: str) -> Calibration:
    path = calibration_path(cache_folder(), model)
    if not path.exists():
        raise ConfigError(
            f"--hardware this: {model} was never measured on this machine: run `twostroke plan {model} --calibrate`, "
            f"or name a device: {', '.join(DEVICES)}."
        )
    return load_calibration(path)


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


def plan_command(
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
    refuse_unused(context, unused_in_plan(trace is not None, search, calibrate))
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
    options = [deployment]
    if search:
        options = candidates(deployment.arch, priced(), deployment.config)
        if not options:
            raise ConfigError(f"{model}: no worker of {max(GPUS)} devices of the table holds it, in any precision.")
        deployment = options[0]
    check_weights(deployment)
    check_lengths(deployment, rows)
    show_sizing(size(deployment, prompt, output))
    assert ttft is not None and tpot is not None
    if not search and precision is None and hardware != "this" and deployment.config.quantize is None:
        found = candidates(deployment.arch, [deployment.device], deployment.config, (gpus,))
        options += [one for one in found if one.precision != deployment.precision]
    pools = (True,) if split else (False,) if search else (False, True)
    with errors.status("simulating") as status:
        say = lambda one: status.update(f"simulating {label(one)}")  # noqa: E731
        needs = cheapest(options, rows, rate, ttft, tpot, say, pools)
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
    count = f"{found.deployment.gpus} × " if found.deployment.gpus > 1 else ""
    title = f"{count}{found.deployment.device.title}, {found.deployment.model.precision}: one worker"
    table = Table(title=title, header_style="bold", title_justify="left")
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
