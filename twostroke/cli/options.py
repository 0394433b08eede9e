"""Options that several commands have, and their checks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from twostroke.cli.terminal import console
from twostroke.config import SETTINGS, find_setting
from twostroke.errors import ConfigError
from twostroke.sampling import SamplingParams

if TYPE_CHECKING:
    from twostroke.cost.simulation.served import Targets

SLOWEST, FASTEST = 1e-6, 1e9  # requests a second
LENGTHS = 100.0  # largest factor by which a scale below 1 makes requests longer


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


def lengths_of(prompt: int | None, output: int | None) -> tuple[int, int] | None:
    """--prompt and --output, of which one needs the other."""
    if (prompt is None) != (output is None):
        given, other = ("--prompt", "--output") if output is None else ("--output", "--prompt")
        raise ConfigError(f"{given} needs {other} too: the tokens of a prompt and those of an answer.")
    return None if prompt is None or output is None else (prompt, output)


def can_be_written(path: Path | None) -> Path | None:
    """Checked before anything is measured."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise typer.BadParameter(f"{path}: name a file in a folder that exists.")
    return path


def make_targets(ttft: float | None, tpot: float | None) -> Targets:
    from twostroke.cost.simulation.served import Targets

    return Targets(ttft or inf, tpot or inf)


def refuse_unused(context: typer.Context, reasons: Mapping[str, str]) -> None:
    """An option without effect is an error. reasons: by parameter, why it has none here."""
    for parameter in context.command.params:
        name, source = parameter.name or "", context.get_parameter_source(parameter.name or "")
        if name in reasons and source is not None and source.name == "COMMANDLINE":
            raise ConfigError(f"{parameter.opts[0]} {reasons[name]}.")


def make_params(max_tokens: int, temperature: float | None, seed: int | None) -> SamplingParams:
    """Without a temperature the model's generation config decides how tokens are chosen."""
    chosen: dict[str, Any] = {} if temperature is None else {"temperature": temperature}
    return SamplingParams(max_tokens=max_tokens, seed=seed, **chosen)


def parse_settings(options: list[str] | None) -> dict[str, Any]:
    """NAME=VALUE pairs as keywords of `LLM`, each value read as the type of its setting."""
    settings: dict[str, Any] = {}
    for option in options or ():
        name, sign, value = option.partition("=")
        if option == "help":
            show_settings()
            raise typer.Exit
        if not sign:
            raise ConfigError(f"--set {option}: write NAME=VALUE, for example kv_dtype=int8; `-s help` lists them.")
        found = find_setting(name.strip().replace("-", "_"))
        settings[found.name] = found.parse(value.strip())
    return settings


def show_settings() -> None:
    from rich.table import Table

    table = Table(header_style="bold")
    for title in ("setting", "values", "default", "live", "what it does"):
        table.add_column(title)
    for one in SETTINGS.values():
        default = one.derived if one.default is None else str(one.default)
        table.add_row(one.name, one.values, default, "yes" if one.live else "", one.help)
    console.print(table)


def refuse_unsimulated(settings: Iterable[str]) -> None:
    """Where no engine runs, a setting that the cost model ignores is an error."""
    for name in settings:
        if SETTINGS[name].unsimulated:
            raise ConfigError(f"--set {name} has no effect here: {SETTINGS[name].unsimulated}.")


ModelOption = Annotated[str, typer.Option("--model", "-m", help="Catalog name, folder, .gguf file or hub id.")]
ModelArgument = Annotated[str, typer.Argument(help="Catalog name, folder, .gguf file or hub id.")]
MaxTokens = Annotated[int, typer.Option(help="Longest answer, in tokens.")]
Temperature = Annotated[
    float | None,
    typer.Option(help="0 always takes the likeliest token; higher is more varied. Default: the model's own."),
]
Seed = Annotated[int | None, typer.Option(help="Makes sampling repeatable.")]
ApiKey = Annotated[str | None, typer.Option(envvar="TWOSTROKE_API_KEY", help="API key of the server.")]
SettingsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        "-s",
        metavar="NAME=VALUE",
        help=f"An engine setting; may be repeated; `-s help` explains them: {', '.join(SETTINGS)}.",
    ),
]
Workload = Annotated[str, typer.Option("--workload", "-w", help="rag, code, chat, batch, agent, edit or questions.")]
Trace = Annotated[
    str | None, typer.Option(help="azure-conv, azure-code, mooncake, or a file in Azure's or Mooncake's format.")
]
Requests = Annotated[int, typer.Option("--requests", "-n", min=1, max=10**6, help="How many requests.")]
PromptOption = Annotated[
    int | None, typer.Option(min=1, help="Tokens of every prompt, instead of a workload's lengths.")
]
OutputOption = Annotated[int | None, typer.Option(min=1, help="Tokens of every answer, with --prompt.")]
Scale = Annotated[float, typer.Option(callback=sane_scale, help="Divides all lengths, for small machines.")]
Ttft = Annotated[float | None, typer.Option(callback=above_zero, help="Target for TTFT, in seconds.")]
Tpot = Annotated[float | None, typer.Option(callback=above_zero, help="Target for TPOT, in seconds.")]
Json = Annotated[Path | None, typer.Option("--json", callback=can_be_written, help="Write the result as JSON.")]
