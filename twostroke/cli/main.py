"""The list of commands, and how errors are shown. A command imports what it needs when it runs."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape

from twostroke import __version__
from twostroke.cli.bench import bench_app
from twostroke.cli.cache import cache_app
from twostroke.cli.chat import chat
from twostroke.cli.cluster import cluster
from twostroke.cli.diagnose import diagnose
from twostroke.cli.generate import generate
from twostroke.cli.models import models
from twostroke.cli.plan import plan
from twostroke.cli.serve import serve
from twostroke.cli.terminal import errors
from twostroke.errors import TwostrokeError

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,  # plain help: boxes cut the names of options at 80 columns
    add_completion=False,
    context_settings={"help_option_names": ["--help", "-h"]},
    pretty_exceptions_enable=False,
)


def show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"twostroke {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Load an open model and use it: fast to start (prefill), fast to stream (decode)."""


for command in (chat, generate, serve, cluster, models, plan, diagnose):
    app.command()(command)
app.add_typer(bench_app, name="bench")
app.add_typer(cache_app, name="cache")


def main() -> None:
    """A TwostrokeError is one sentence on stderr, not a traceback."""
    try:
        app()
    except TwostrokeError as error:
        errors.print(f"[red]error:[/red] {escape(str(error))}")
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
