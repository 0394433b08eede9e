"""What a deployment would do, before there is one: the sizes and times of a worker, and how many a load needs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from twostroke.bench.report import per_second
from twostroke.bench.workload import make_load, trace_load
from twostroke.cli.deployment import calibrate_here, deployment_for
from twostroke.cli.settings import refuse_unreckoned
from twostroke.cli.terminal import errors
from twostroke.cost.capacity import (
    GPUS,
    SHARE,
    Need,
    Sizing,
    candidates,
    cheapest,
    check_weights,
    priced,
    size,
)
from twostroke.cost.deploy import Deployment
from twostroke.cost.diagnose import seconds
from twostroke.cost.trace import Arrival
from twostroke.errors import ConfigError

console = Console(highlight=False)


def load_of(trace: str | None, workload: str, requests: int, scale: float) -> list[Arrival]:
    if trace is not None:
        return trace_load(trace, requests, None, scale).arrivals
    return make_load(workload, "poisson", requests, 1.0, 0, scale).arrivals


def plan(
    model: str,
    hardware: str,
    gpus: int,
    precision: str | None,
    rows: list[Arrival],
    rate: float,
    ttft: float,
    tpot: float,
    split: bool,
    search: bool,
    calibrate: bool,
    settings: dict[str, Any],
) -> None:
    if calibrate:
        calibrate_here(model, settings)
        hardware = "this"
    else:
        refuse_unreckoned(settings)
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
    if not search and precision is None and hardware != "this" and deployment.config.quantize is None:
        found = candidates(deployment.arch, [deployment.device], deployment.config, (gpus,))
        options += [one for one in found if one.precision != deployment.precision]
    pools = (True,) if split else (False,) if search else (False, True)
    with errors.status("simulating") as status:
        say = lambda how, one: status.update(f"simulating {label(one)} {how}")  # noqa: E731
        needs = cheapest(options, rows, rate, ttft, tpot, say, pools)
    if not needs:
        console.print(
            f"No number of these workers meets TTFT ≤ {seconds(ttft)} and TPOT ≤ {seconds(tpot)}: a request alone "
            "misses them. Try --gpus, a narrower --precision, or --search."
        )
        raise typer.Exit(1)
    show_needs(needs, rate, ttft, tpot)


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


def label(deployment: Deployment) -> str:
    count = f"{deployment.gpus} × " if deployment.gpus > 1 else ""
    return f"{count}{deployment.device.name}, {weights(deployment)}"


def weights(deployment: Deployment) -> str:
    if deployment.config.quantize is None and deployment.stored_bytes is not None:
        return "as stored"
    return deployment.config.quantize or deployment.precision


def show_sizing(found: Sizing) -> None:
    count = f"{found.deployment.gpus} × " if found.deployment.gpus > 1 else ""
    console.print(
        f"[bold]{count}{found.deployment.device.title}, weights {weights(found.deployment)}: one worker[/bold]"
    )
    table = Table(header_style="bold")
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
    prices = (
        "this machine counts as one dollar an hour"
        if found.deployment.device.price is None
        else "prices are typical on-demand ones, yours may differ"
    )
    console.print(f"[dim]Times by {source}; {prices}.[/dim]")


def show_needs(needs: list[Need], rate: float, ttft: float, tpot: float) -> None:
    title = f"{per_second(rate)} with TTFT ≤ {seconds(ttft)} and TPOT ≤ {seconds(tpot)} for 95 % of requests"
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
