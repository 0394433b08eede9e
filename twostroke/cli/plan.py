"""The command `plan`: what fits on a worker, how fast it is, how many workers a load needs and what they cost."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from twostroke.cli import options
from twostroke.cli.options import (
    lengths_of,
    make_targets,
    parse_settings,
    refuse_unsimulated,
    refuse_unused,
    sane_rate,
)
from twostroke.cli.terminal import console, errors, telling
from twostroke.errors import ConfigError
from twostroke.record import replace

MOST_DIVIDED = 16  # workers: beyond them the plan does not say how they should be divided

if TYPE_CHECKING:
    from twostroke.cost.answers.workers import Demand, Dropped
    from twostroke.cost.simulation.deployment import Deployment
    from twostroke.cost.simulation.trace import Arrival


def plan(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(help="A known model (llama-3-8b, …), a config.json, a folder, .gguf file or hub id.")
    ],
    hardware: Annotated[str, typer.Option(help="h200, a100, m4-max, …; or 'this', once calibrated.")] = "h200",
    gpus: Annotated[int, typer.Option(min=1, help="Devices that share one copy of the model.")] = 1,
    precision: Annotated[str | None, typer.Option(help="bfloat16, float16, float32, fp8, int8, int4 weights.")] = None,
    workload: options.Workload = "chat",
    trace: options.Trace = None,
    prompt: options.PromptOption = None,
    output: options.OutputOption = None,
    requests: Annotated[
        int | None,
        typer.Option(
            "--requests", "-n", min=1, max=10**6,
            help="Fewest requests to simulate; of a trace: its first ones. Without: until the load is steady.",
        ),
    ] = None,
    scale: options.Scale = 1.0,
    rate: Annotated[float, typer.Option(callback=sane_rate, help="Requests/s to be served.")] = 1.0,
    ttft: options.Ttft = 1.0,
    tpot: options.Tpot = 0.05,
    split: Annotated[bool, typer.Option("--split", help="Separate workers for prefill and decode.")] = False,
    search: Annotated[bool, typer.Option("--search", help="Try all rentable hardware; the cheapest first.")] = False,
    calibrate: Annotated[bool, typer.Option("--calibrate", help="Measure this machine with this model first.")] = False,
    draft: Annotated[
        str | None, typer.Option(help="A draft model, or 'lookup': predicts TPOT with speculative decoding.")
    ] = None,
    acceptance: Annotated[
        float, typer.Option(min=0.0, max=0.99, help="Share of drafted tokens that are right, with --draft.")
    ] = 0.7,
    option: options.SettingsOption = None,
) -> None:  # fmt: skip
    """Plan a deployment: whether it fits, its speed, workers and cost."""
    lengths = lengths_of(prompt, output)
    refuse_unused(context, unused(trace is not None, lengths is not None, search, calibrate, draft is not None))
    from twostroke.bench.workload import choose_load
    from twostroke.cli.deployment import calibrate_here, deployment_for
    from twostroke.cost.answers.steady import MOST
    from twostroke.cost.answers.workers import Demand

    count = requests if trace is not None else max(MOST, requests or 0)
    rows = choose_load(trace, workload, count=count, scale=scale, lengths=lengths).arrivals
    settings = parse_settings(option)
    if calibrate:
        calibrate_here(model, settings)
        hardware = "this"
    else:
        refuse_unsimulated(settings)
    deployment = with_room_for(rows, deployment_for(model, hardware, precision, gpus, settings)[0])
    chosen = precision or deployment.config.dtype or deployment.config.quantize
    any_precision = chosen is None and hardware != "this"
    kinds, dropped = kinds_of_workers(deployment, model, search, any_precision)
    check_lengths(kinds[0], rows)
    show_one_worker(kinds[0], rows, draft, acceptance)
    find_workers(kinds, dropped, Demand(rows, rate, make_targets(ttft, tpot), requests or 0), split, search)


def show_one_worker(kind: Deployment, rows: list[Arrival], draft: str | None, acceptance: float) -> None:
    """What fits on it and how fast it is; the gain of drafts, where they are asked for."""
    from twostroke.cli.plan_tables import show_drafts, show_sizing
    from twostroke.cost.answers.sizing import size
    from twostroke.cost.simulation.trace import mean_lengths

    typical, answer = (round(mean) for mean in mean_lengths(rows))
    show_sizing(size(kind, typical, answer))
    if draft is not None:
        show_drafts(kind, draft, acceptance, typical + answer // 2)


def find_workers(kinds: list[Deployment], dropped: list[Dropped], demand: Demand, split: bool, search: bool) -> None:
    """Simulate, and show what serves the load, what does not, and how much more the cheapest would serve."""
    from math import inf

    from twostroke.cli.plan_tables import label, show_needs
    from twostroke.cost.answers.workers import PRICIER, ROUGH, cheapest, highest_rate

    pools = (True,) if split else (False,) if search else (False, True)
    with telling("simulating") as say:
        tell = lambda how, one: say(f"simulating {label(one)} {how}".rstrip())  # noqa: E731
        wanted = demand._replace(close=ROUGH) if search else demand
        found = cheapest(kinds, wanted, tell, pools, PRICIER if search else inf, os.cpu_count() or 1)
        found.dropped.extend(dropped)
        highest = None
        if found.needs and found.needs[0].copies == 1.0:
            best = found.needs[0]
            say(f"looking for the highest rate of {label(best.deployment)}")
            reached = highest_rate(best.deployment, demand.arrivals, demand.targets, demand.per_second, best.trial)
            highest = None if reached is None else reached[0]
    show_needs(found, demand, highest, search)
    first = next(iter(found.needs), None)
    if first is not None and first.copies == 1.0 and 2 <= first.deployment.workers <= MOST_DIVIDED and not search:
        from twostroke.cost.answers.split import divide

        console.print(divide(first.deployment, first.load, demand.targets).sentence)
    if not found.needs:
        console.print(
            f"No number of these workers meets {demand.targets}. Try --gpus, a narrower --precision, or --search."
        )
        raise typer.Exit(1)


def unused(trace: bool, lengths: bool, search: bool, calibrate: bool, draft: bool) -> dict[str, str]:
    """Options without effect beside these, and why."""
    found: dict[str, str] = {}
    if trace:
        found |= dict.fromkeys(("workload", "prompt", "output"), "has no effect with --trace")
    elif lengths:
        found["workload"] = "has no effect with --prompt and --output"
    if calibrate:
        found["hardware"] = "has no effect with --calibrate, which measures this machine"
    if search:
        known = ("hardware", "gpus", "precision", "calibrate")
        found |= dict.fromkeys(known, "has no effect with --search, which tries all rentable hardware")
    if not draft:
        found["acceptance"] = "is for --draft"
    return found


def with_room_for(rows: list[Arrival], deployment: Deployment) -> Deployment:
    """max_model_len, where it is not given, as long as the longest request."""
    longest = max(row.prompt + row.output for row in rows)
    if deployment.config.max_model_len is not None or longest >= deployment.arch.max_positions:
        return deployment
    return replace(deployment, config=replace(deployment.config, max_model_len=longest + 1))


def kinds_of_workers(
    deployment: Deployment, model: str, search: bool, any_precision: bool
) -> tuple[list[Deployment], list[Dropped]]:
    """What is simulated (the deployment, the same in other precisions, or everything that can be rented), and what
    cannot be."""
    from twostroke.config import QUANTIZATIONS_OF
    from twostroke.cost.answers.sizing import check_weights
    from twostroke.cost.answers.workers import GPUS, Dropped, candidates, does_not_fit, precisions, priced
    from twostroke.cost.model.weight_formats import PUBLISHED

    device = deployment.device
    if search:
        published = [deployment.precision] if deployment.precision in PUBLISHED else []
        found = candidates(deployment.arch, priced(), deployment.config, published=published)
        if not found:
            raise ConfigError(f"{model}: no worker of {max(GPUS)} devices of the table holds it, in any precision.")
        return found, []
    kinds, dropped = [deployment], []
    if any_precision:
        others = ["bfloat16", *QUANTIZATIONS_OF[device.kind]]
        kinds += [
            replace(deployment, precision=one, stored_bytes=None) for one in others if one != deployment.precision
        ]
    held = []
    for kind in kinds:
        served = kind is deployment or kind.precision in precisions(device)
        reason = does_not_fit(kind) if served else f"{device.title} has no products in {kind.precision}"
        if reason is None:
            held.append(kind)
        else:
            dropped.append(Dropped(kind, reason))
    if not held:
        check_weights(deployment)
        raise ConfigError(f"{model}: {dropped[0].reason}: use more devices (--gpus) or a narrower --precision.")
    return held, dropped


def check_lengths(deployment: Deployment, rows: list[Arrival]) -> None:
    """A refused request misses every target: with too many of them no number of workers helps."""
    from twostroke.cost.answers.steady import SHARE

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
