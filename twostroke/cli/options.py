"""Options that several commands share, and engine settings as they are typed: NAME=VALUE."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer

from twostroke.config import Config, make_config
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


def unused_in_plan(trace: bool, search: bool, calibrate: bool) -> dict[str, str]:
    """Options of `plan` that change nothing beside these, and why."""
    found: dict[str, str] = {}
    if trace:
        found["workload"] = "says nothing beside --trace"
    if calibrate:
        found["hardware"] = "says nothing beside --calibrate, which measures this machine"
    if search:
        found |= dict.fromkeys(("hardware", "gpus", "precision"), "says nothing beside --search, which tries them all")
    return found


def unused_in_diagnosis(source: str, trace: bool) -> dict[str, str]:
    """Options of `diagnose` that change nothing where the diagnosis comes from this, and why."""
    load = ("trace", "workload", "requests", "rate", "scale")
    if source == "ledger":
        everything = (*load, "url", "result", "model", "hardware", "precision", "api_key", "ttft", "tpot", "apply")
        return dict.fromkeys((*everything, "option"), "says nothing beside --ledger, which only shows what came before")
    found = {"workload": "says nothing beside --trace"} if trace else {}
    if source == "url":
        return found | {"result": "says nothing beside --url: give one of them"}
    found["api_key"] = "is for a server: give --url"
    if source == "result":
        found |= dict.fromkeys(load, "says nothing beside --result, which holds its own load")
        found["apply"] = "needs something that runs: leave --result out"
    elif source == "apply":
        found |= dict.fromkeys(("hardware", "precision"), "says nothing beside --apply, which runs the model here")
    elif trace:
        found["rate"] = "says nothing beside --trace, which is replayed as it was recorded"
    return found


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


def parse_settings(options: list[str] | None) -> dict[str, Any]:
    """NAME=VALUE pairs as keywords of `LLM`, each value read as the type of its setting."""
    settings: dict[str, Any] = {}
    types = get_type_hints(Config)
    for option in options or ():
        name, sign, value = option.partition("=")
        name = name.strip().replace("-", "_")
        if not sign:
            raise ConfigError(f"--set {option}: write NAME=VALUE, for example kv_dtype=int8.")
        if name not in types:
            make_config(**{name: value})  # says which setting is nearest
        settings[name] = parse_value(name, value.strip(), types[name])
    return settings


def parse_value(name: str, value: str, kind: Any) -> Any:
    kinds = get_args(kind) or (kind,)
    if bool in kinds:
        if value.lower() not in ("true", "false"):
            raise ConfigError(f"{name} must be true or false, got {value!r}.")
        return value.lower() == "true"
    for number in (int, float):
        if number in kinds:
            try:
                return number(value)
            except ValueError:
                wanted = "a whole number, as digits" if number is int else "a number"
                raise ConfigError(f"{name} must be {wanted}, got {value!r}.") from None
    return value
