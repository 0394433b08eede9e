"""The command `serve`: fetch the model, read the keys, run."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from twostroke.cli.options import ModelArgument, Settings, parse_settings
from twostroke.cli.terminal import progress_bar
from twostroke.errors import ConfigError
from twostroke.weights.catalog import DEFAULT


def serve(
    model: ModelArgument = DEFAULT,
    host: Annotated[str, typer.Option(help="Address to listen on; others than loopback want a key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes any free port.", min=0, max=65535)] = 8000,
    api_key: Annotated[str | None, typer.Option(envvar="TWOSTROKE_API_KEY", help="Key that clients must send.")] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="A file with one key on each line.")] = None,
    max_queue: Annotated[int | None, typer.Option(help="Samples that may wait beyond those that run.", min=0)] = None,
    drain_timeout: Annotated[float, typer.Option(help="Seconds for running requests after SIGTERM.", min=0)] = 30.0,
    option: Settings = None,
    admin_key: Annotated[
        str | None, typer.Option(envvar="TWOSTROKE_ADMIN_KEY", help="Key of the operator: settings, steps, arrivals.")
    ] = None,
    admin_key_file: Annotated[Path | None, typer.Option(help="A file with one admin key on each line.")] = None,
    allowed_host: Annotated[
        list[str] | None, typer.Option(help="A further name under which clients reach this server; * for any.")
    ] = None,
    allow_origin: Annotated[
        list[str] | None, typer.Option(help="A web site whose pages may use this server (CORS); * for any.")
    ] = None,
    closed_objects: Annotated[
        bool, typer.Option(help="JSON objects have only the properties of their schema, unless it says otherwise.")
    ] = False,
) -> None:
    """Serve a model over HTTP: OpenAI's and Anthropic's APIs, metrics, health."""
    from twostroke.config import make_config
    from twostroke.weights.checkpoint import locate

    try:
        from twostroke.serve.main import Options, run
        from twostroke.serve.transport.auth import read_keys
        from twostroke.serve.transport.browsers import checked_names
    except ImportError as error:
        raise ConfigError(
            f"the server needs a package that is not installed ({error.name}): pip install twostroke."
        ) from None
    settings, keys = parse_settings(option), read_keys(api_key, api_key_file)
    admin_keys = read_keys(admin_key, admin_key_file, "--admin-key-file")
    hosts, origins = checked_names(allowed_host or (), allow_origin or ())
    make_config(**settings)  # checked before anything is fetched
    with progress_bar(f"fetching {model}") as fetching:
        path = locate(model, fetching)
    if "draft_model" in settings:
        with progress_bar(f"fetching {settings['draft_model']}") as fetching:
            settings["draft_model"] = str(locate(settings["draft_model"], fetching).resolve())
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    options = Options(
        path.resolve(), model, settings, host, port, tuple(keys), tuple(admin_keys), max_queue=max_queue,
        drain_timeout=drain_timeout, allowed_hosts=hosts, allowed_origins=origins,
        closed_objects=closed_objects,
    )  # fmt: skip
    run(options, say)
    os._exit(0)  # a thread that still compiles a grammar must not delay the end


def say(line: str) -> None:
    """On stderr. The server does not end because its log cannot be written: a full disk, a pipe without a reader."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)
