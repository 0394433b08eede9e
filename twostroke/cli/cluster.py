"""The command `cluster`: several workers on Ray behind one server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from twostroke.cli.options import ModelArgument, Settings, parse_settings
from twostroke.cli.server_options import Given, run_server, say, server_options, takes_server_options
from twostroke.errors import ConfigError
from twostroke.record import replace
from twostroke.weights.catalog import DEFAULT

PoolSettings = Annotated[
    list[str] | None, typer.Option(metavar="NAME=VALUE", help="A setting of this pool, beside --set; may be repeated.")
]


@takes_server_options
def cluster(
    model: ModelArgument = DEFAULT,
    prefill: Annotated[int, typer.Option(help="Workers that compute prompts.", min=0, max=10_000)] = 0,
    decode: Annotated[int, typer.Option(help="Workers that write answers.", min=0, max=10_000)] = 0,
    workers: Annotated[int, typer.Option(help="Workers that do both, instead.", min=0, max=10_000)] = 0,
    prefill_set: PoolSettings = None,
    decode_set: PoolSettings = None,
    route: Annotated[
        str, typer.Option(help="cost: by the expected time; apart: prefill workers compute every prompt.")
    ] = "cost",
    address: Annotated[
        str | None, typer.Option(help="Of a Ray cluster; default: one on this machine, else a new local one.")
    ] = None,
    share_cores: Annotated[
        bool, typer.Option(help="Workers need no cores of their own: slower, for trying it out.")
    ] = False,
    option: Settings = None,
    *,
    given: Given,
) -> None:
    """Serve a model with several workers on Ray. Pools for prompts and answers, or workers that do both."""
    from twostroke.cluster.deployment import Deployment, Shape, check_shape
    from twostroke.config import make_config
    from twostroke.embed.description import is_embedder_at

    if route not in ("cost", "apart"):
        raise ConfigError(f"--route: {route!r} is not known; use cost or apart.")
    shape = Shape(
        workers, prefill, decode, parse_settings(option), parse_settings(prefill_set), parse_settings(decode_set),
        route == "apart", share_cores, address,
    )  # fmt: skip
    check_shape(shape)
    for role in set(shape.roles().values()):
        make_config(**shape.settings_of(role))
    options = server_options(model, dict(shape.settings), given)
    if is_embedder_at(options.path):
        raise ConfigError(f"{model} makes vectors and writes no answers: use `twostroke serve {model}`.")
    where = options.path if Path(model).expanduser().exists() else Path(model)  # a name is fetched on each machine
    from twostroke.serve.main import run

    run_server(replace(options, client=lambda: Deployment(where, shape, say)), run)
