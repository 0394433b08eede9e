"""Options that several commands share, and engine settings as they are typed: NAME=VALUE."""

from __future__ import annotations

from typing import Annotated, Any, get_args, get_type_hints

import typer

from twostroke.config import Config, make_config
from twostroke.errors import ConfigError

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
Requests = Annotated[int, typer.Option("--requests", "-n", min=1, help="How many requests.")]
Scale = Annotated[float, typer.Option(help="Divides all lengths, for small machines.")]
Ttft = Annotated[float | None, typer.Option(help="Target for TTFT, in seconds.")]
Tpot = Annotated[float | None, typer.Option(help="Target for TPOT, in seconds.")]


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
                raise ConfigError(f"{name} must be a number, got {value!r}.") from None
    return value
