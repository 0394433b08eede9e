"""Options that several commands share, and what makes an option wrong."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from pathlib import Path
from typing import Annotated

import typer

from twostroke.errors import ConfigError

SLOWEST, FASTEST = 1e-6, 1e9  # requests a second
LENGTHS = 100.0  # how much longer than they are a scale may make requests


def above_zero(value: float | None) -> float | None:
    if value is not None and not 0 < value < inf:
        raise typer.BadParameter("must be a number above 0.")
    return value


def sane_rate(value: float) -> float:
    if not SLOWEST <= value <= FASTEST:
        raise typer.BadParameter(f"must be above 0: {SLOWEST:g} to {FASTEST:g} requests a second.")
    return value


def sane_scale(value: float) -> float:
    if not 1 / LENGTHS <= value < inf:
        raise typer.BadParameter(f"must be {1 / LENGTHS:g} or more: lengths are divided by it.")
    return value


def can_be_written(path: Path | None) -> Path | None:
    """Said before anything is measured."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise typer.BadParameter(f"{path}: name a file in a folder that exists.")
    return path


def refuse_unused(context: typer.Context, reasons: Mapping[str, str]) -> None:
    """An option that would change nothing is an error. reasons: by parameter, why it does nothing here."""
    for parameter in context.command.params:
        name, source = parameter.name or "", context.get_parameter_source(parameter.name or "")
        if name in reasons and source is not None and source.name == "COMMANDLINE":
            raise ConfigError(f"{parameter.opts[0]} {reasons[name]}.")


Model = Annotated[str, typer.Option("--model", "-m", help="Catalog name, folder, .gguf file or hub id.")]
ModelArgument = Annotated[str, typer.Argument(help="Catalog name, folder, .gguf file or hub id.")]
MaxTokens = Annotated[int, typer.Option(help="Longest answer, in tokens.")]
Temperature = Annotated[float, typer.Option(help="0 always takes the likeliest token; higher is more varied.")]
Seed = Annotated[int | None, typer.Option(help="Makes sampling repeatable.")]
ApiKey = Annotated[str | None, typer.Option(envvar="TWOSTROKE_API_KEY", help="For the server.")]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", "-s", metavar="NAME=VALUE", help="An engine setting, e.g. -s kv_dtype=int8; may be repeated."
    ),
]
Workload = Annotated[str, typer.Option("--workload", "-w", help="rag, code, chat, batch or agent.")]
Trace = Annotated[
    str | None, typer.Option(help="azure-conv, azure-code, mooncake, or a file in Azure's or Mooncake's format.")
]
Requests = Annotated[int, typer.Option("--requests", "-n", min=1, max=10**6, help="How many requests.")]
Scale = Annotated[float, typer.Option(callback=sane_scale, help="Divides all lengths, for small machines.")]
Ttft = Annotated[float | None, typer.Option(callback=above_zero, help="Target for TTFT, in seconds.")]
Tpot = Annotated[float | None, typer.Option(callback=above_zero, help="Target for TPOT, in seconds.")]
Json = Annotated[Path | None, typer.Option("--json", callback=can_be_written, help="Write the result as JSON.")]
