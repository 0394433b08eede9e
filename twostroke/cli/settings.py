"""Engine settings as they are typed: NAME=VALUE."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, get_args, get_type_hints

from twostroke.errors import ConfigError

UNRECKONED = {
    "device": "--hardware says where it runs",
    "threads": "a machine is reckoned with as it was calibrated; `twostroke plan MODEL --calibrate` takes it",
    "exact": "what it costs is not part of the cost model",
    "seed": "times do not depend on it",
}


def parse_settings(options: list[str] | None) -> dict[str, Any]:
    """NAME=VALUE pairs as keywords of `LLM`, each value read as the type of its setting."""
    from twostroke.config import Config, make_config

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


def refuse_unreckoned(settings: Iterable[str]) -> None:
    """Where no engine runs, an engine's setting on which no reckoning depends is an error."""
    for name in settings:
        if name in UNRECKONED:
            raise ConfigError(f"--set {name} says nothing here: {UNRECKONED[name]}.")
