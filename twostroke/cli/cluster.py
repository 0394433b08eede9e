"""The command `cluster`: several workers on Ray behind one server."""

from __future__ import annotations

from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from twostroke.cli import options
from twostroke.cli.cluster_auto import Traffic, check_auto, planned
from twostroke.cli.options import ModelArgument, SettingsOption, parse_settings
from twostroke.cli.server_options import Given, run_server, say, server_options, takes_server_options
from twostroke.errors import ConfigError
from twostroke.record import replace
from twostroke.weights.catalog import DEFAULT

if TYPE_CHECKING:
    from twostroke.cluster.deployment import DeploymentPlan

PoolSettings = Annotated[
    list[str] | None, typer.Option(metavar="NAME=VALUE", help="A setting of this pool, beside --set; may be repeated.")
]


@takes_server_options
def cluster_options(
    model: ModelArgument = DEFAULT,
    prefill: Annotated[int, typer.Option(help="Workers that compute prompts.", min=0, max=10_000)] = 0,
    decode: Annotated[int, typer.Option(help="Workers that write answers.", min=0, max=10_000)] = 0,
    workers: Annotated[int, typer.Option(help="Workers that do both, instead of two pools.", min=0, max=10_000)] = 0,
    prefill_set: PoolSettings = None,
    decode_set: PoolSettings = None,
    route: Annotated[
        str, typer.Option(help="cost: the least expected time; apart: prefill workers compute every prompt.")
    ] = "cost",
    address: Annotated[
        str | None, typer.Option(help="Address of a Ray cluster. Default: the one on this machine, else a new one.")
    ] = None,
    transport: Annotated[
        str,
        typer.Option(help="How KV blocks travel: auto (NIXL if installed, shared memory or TCP), tcp or nixl."),
    ] = "auto",
    share_cores: Annotated[bool, typer.Option(help="Workers may share cores: slower, for trying it out.")] = False,
    auto: Annotated[
        bool,
        typer.Option("--auto", help="Simulate the traffic to divide --workers: one pool, or prefill and decode pools."),
    ] = False,
    workload: Annotated[str | None, typer.Option(help="Traffic for --auto, as in `bench`. Default: chat.")] = None,
    trace: options.Trace = None,
    rate: Annotated[float | None, typer.Option(help="Requests/s for --auto.", min=0.001, max=1e6)] = None,
    scale: Annotated[float | None, typer.Option(help="For --auto: divides all lengths.", min=0.01, max=1e6)] = None,
    ttft: Annotated[
        float | None,
        typer.Option(callback=options.above_zero, help="Target for TTFT, in seconds: for routes and --auto."),
    ] = None,
    tpot: options.Tpot = None,
    hardware: Annotated[str | None, typer.Option(help="Hardware of a worker, for --auto. Default: 'this'.")] = None,
    option: SettingsOption = None,
    *,
    given: Given,
) -> Any:  # Options of serve/main_base.py: the help is shown without the server
    """Serve a model with several workers on Ray. Pools for prompts and answers, or workers that do both."""
    from twostroke.cluster.deployment import DeploymentPlan, check_shape
    from twostroke.config import make_config

    if route not in ("cost", "apart"):
        raise ConfigError(f"--route: {route!r} is not known; use cost or apart.")
    traffic = Traffic(workload, trace, rate, scale, ttft, tpot, hardware)
    check_auto(auto, workers, traffic)
    if auto:
        if prefill or decode or prefill_set or decode_set:
            raise ConfigError("--auto divides --workers N by itself: leave --prefill and --decode out.")
        found = planned(model, parse_settings(option), workers, traffic, address is None, route == "apart")
        say(found.sentence)
        if found.best.prefill:
            workers, prefill, decode = 0, *found.best[:2]
        else:
            route = "cost"  # without pools there is nothing apart
    shape = DeploymentPlan(
        workers, prefill, decode, parse_settings(option), parse_settings(prefill_set), parse_settings(decode_set),
        route == "apart", share_cores, address, transport, ttft,
    )  # fmt: skip
    check_shape(shape)
    for role in set(shape.roles().values()):
        make_config(**shape.settings_of(role))
    return in_front_of(shape, model, given)


def in_front_of(shape: DeploymentPlan, model: str, given: Given) -> Any:
    """The options of the server in front of this deployment."""
    from twostroke.cluster.deployment import Deployment
    from twostroke.embed.description import is_embedder_at

    server = server_options(model, dict(shape.settings), given)
    if is_embedder_at(server.path):
        raise ConfigError(f"{model} makes vectors and writes no answers: use `twostroke serve {model}`.")
    where = server.path if Path(model).expanduser().exists() else Path(model)  # a name is fetched on each machine
    return replace(server, client=lambda: Deployment(where, shape, say))


@wraps(cluster_options)
def cluster(**typed: Any) -> None:
    from twostroke.serve.main import run

    run_server(cluster_options(**typed), run)


cluster.__name__ = "cluster"  # of the command
