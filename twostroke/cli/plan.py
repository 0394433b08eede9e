"""The command `plan`: what fits on a worker, how fast it is, how many workers a load needs and what they cost."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from twostroke.cli import options
from twostroke.cli.options import make_targets, parse_settings, refuse_unsimulated, refuse_unused, sane_rate
from twostroke.cli.terminal import console, errors
from twostroke.cost.units import per_second, seconds
from twostroke.errors import ConfigError

if TYPE_CHECKING:
    from twostroke.cost.answers.sizing import Sizing
    from twostroke.cost.answers.workers import Need
    from twostroke.cost.simulation.deployment import Deployment
    from twostroke.cost.simulation.served import Targets
    from twostroke.cost.simulation.trace import Arrival


def plan(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(help="A known model (llama-3-8b, …), a config.json, or a model as elsewhere.")
    ],
    hardware: Annotated[str, typer.Option(help="h200, a100, m4-max, …; 'this' after --calibrate.")] = "h200",
    gpus: Annotated[int, typer.Option(min=1, help="Devices that share one copy of the model.")] = 1,
    precision: Annotated[str | None, typer.Option(help="bfloat16, int8, int4, fp8 or float32 weights.")] = None,
    workload: options.Workload = "chat",
    trace: options.Trace = None,
    requests: options.Requests = 300,
    scale: options.Scale = 1.0,
    rate: Annotated[float, typer.Option(callback=sane_rate, help="Requests/s to be served.")] = 1.0,
    ttft: options.Ttft = 1.0,
    tpot: options.Tpot = 0.05,
    split: Annotated[bool, typer.Option("--split", help="Separate workers for prefill and decode.")] = False,
    search: Annotated[bool, typer.Option("--search", help="Try all rentable hardware; the cheapest first.")] = False,
    calibrate: Annotated[bool, typer.Option("--calibrate", help="Measure this machine with this model first.")] = False,
    option: options.Settings = None,
) -> None:
    """Size a deployment before there is one: does it fit, how fast, what does it cost, how many workers."""
    refuse_unused(context, unused(trace is not None, search, calibrate))
    from twostroke.bench.workload import choose_load
    from twostroke.cli.deployment import calibrate_here, deployment_for
    from twostroke.cost.answers.sizing import check_weights, size
    from twostroke.cost.answers.workers import Demand, cheapest
    from twostroke.cost.simulation.trace import mean_lengths

    targets = make_targets(ttft, tpot)
    rows = choose_load(trace, workload, count=requests, scale=scale).arrivals
    settings = parse_settings(option)
    if calibrate:
        calibrate_here(model, settings)
        hardware = "this"
    else:
        refuse_unsimulated(settings)
    deployment = with_room_for(rows, deployment_for(model, hardware, precision, gpus, settings)[0])
    any_precision = precision is None and hardware != "this" and deployment.config.quantize is None
    kinds = kinds_of_workers(deployment, model, search, any_precision)
    check_weights(kinds[0])
    check_lengths(kinds[0], rows)
    prompt, output = mean_lengths(rows)
    show_sizing(size(kinds[0], round(prompt), round(output)))
    pools = (True,) if split else (False,) if search else (False, True)
    with errors.status("simulating") as status:
        say = lambda how, one: status.update(f"simulating {label(one)} {how}")  # noqa: E731
        needs = cheapest(kinds, Demand(rows, rate, targets), say, pools)
    if not needs:
        console.print(
            f"No number of these workers meets {targets}: a request alone "
            "misses them. Try --gpus, a narrower --precision, or --search."
        )
        raise typer.Exit(1)
    show_needs(needs, rate, targets)


def unused(trace: bool, search: bool, calibrate: bool) -> dict[str, str]:
    """Options without effect beside these, and why."""
    found: dict[str, str] = {}
    if trace:
        found["workload"] = "has no effect with --trace"
    if calibrate:
        found["hardware"] = "has no effect with --calibrate, which measures this machine"
    if search:
        found |= dict.fromkeys(("hardware", "gpus", "precision"), "has no effect with --search, which tries them all")
    return found


def with_room_for(rows: list[Arrival], deployment: Deployment) -> Deployment:
    """max_model_len, where it is not given, as long as the longest request."""
    longest = max(row.prompt + row.output for row in rows)
    if deployment.config.max_model_len is not None or longest >= deployment.arch.max_positions:
        return deployment
    return replace(deployment, config=replace(deployment.config, max_model_len=longest + 1))


def kinds_of_workers(deployment: Deployment, model: str, search: bool, any_precision: bool) -> list[Deployment]:
    """What is simulated: the deployment, the same in other precisions, or everything that can be rented."""
    from twostroke.cost.answers.workers import GPUS, candidates, priced

    if search:
        found = candidates(deployment.arch, priced(), deployment.config)
        if not found:
            raise ConfigError(f"{model}: no worker of {max(GPUS)} devices of the table holds it, in any precision.")
        return found
    found = candidates(deployment.arch, [deployment.device], deployment.config, (deployment.gpus,))
    return [deployment, *(one for one in found if any_precision and one.precision != deployment.precision)]


def check_lengths(deployment: Deployment, rows: list[Arrival]) -> None:
    """A refused request misses every target: with too many of them no number of workers helps."""
    from twostroke.cost.answers.workers import SHARE

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
    return f"{devices(deployment)}{deployment.device.name}, {weights(deployment)}"


def devices(deployment: Deployment) -> str:
    return f"{deployment.gpus} × " if deployment.gpus > 1 else ""


def weights(deployment: Deployment) -> str:
    if deployment.config.quantize is None and deployment.stored_bytes is not None:
        return "as stored"
    return deployment.config.quantize or deployment.precision


def show_sizing(found: Sizing) -> None:
    title = f"{devices(found.deployment)}{found.deployment.device.title}, weights {weights(found.deployment)}"
    console.print(f"[bold]{title}: one worker[/bold]")
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


def show_needs(needs: list[Need], rate: float, targets: Targets) -> None:
    title = f"{per_second(rate)} with {targets} for 95 % of requests"
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
