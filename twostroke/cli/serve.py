"""The command `serve`: fetch the model, read the keys, run."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from twostroke.cli.options import ModelArgument, Settings, parse_settings
from twostroke.cli.terminal import progress_bar
from twostroke.errors import ConfigError
from twostroke.weights.catalog import DEFAULT

if TYPE_CHECKING:
    from twostroke.serve.answer_setup import AnswerOptions

EMBEDDER = "all-minilm-l6-v2"  # of the semantic answer cache


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
    answer_cache: Annotated[
        str, typer.Option(help="Answer from known answers: off, exact (equal requests) or semantic (equal questions).")
    ] = "off",
    answer_cache_url: Annotated[
        str | None, typer.Option(help="redis://HOST:PORT of a store that servers share.")
    ] = None,
    answer_cache_file: Annotated[Path | None, typer.Option(help="File of the embedded store.")] = None,
    answer_cache_error: Annotated[float, typer.Option(help="Share of wrong answers that is allowed.")] = 0.01,
    answer_cache_ttl: Annotated[float | None, typer.Option(help="Seconds that an answer is kept.", min=1)] = None,
    answer_cache_entries: Annotated[int, typer.Option(help="Answers that the embedded store keeps.", min=1)] = 100_000,
    answer_cache_allow: Annotated[
        str, typer.Option(help="Requests to compare by meaning too: tools,temperature,personal,referring,changing.")
    ] = "",
    record_questions: Annotated[
        bool, typer.Option(help="Keep questions in memory, so that diagnose knows which ask the same.")
    ] = False,
) -> None:
    """Serve a model over HTTP: OpenAI's and Anthropic's APIs, metrics, health."""
    from twostroke.config import make_config
    from twostroke.weights.checkpoint import locate

    try:
        from twostroke.serve.answer_setup import AnswerOptions
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
    answers = AnswerOptions(
        checked_tier(answer_cache), answer_cache_url, answer_cache_file, answer_cache_error, answer_cache_ttl,
        answer_cache_entries, tuple(name.strip() for name in answer_cache_allow.split(",") if name.strip()),
        record_questions,
    )  # fmt: skip
    answers.check()
    with progress_bar(f"fetching {model}") as fetching:
        path = locate(model, fetching)
    if "draft_model" in settings:
        with progress_bar(f"fetching {settings['draft_model']}") as fetching:
            settings["draft_model"] = str(locate(settings["draft_model"], fetching).resolve())
    answers = answer_files(answers, model)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    options = Options(
        path.resolve(), model, settings, host, port, tuple(keys), tuple(admin_keys), max_queue=max_queue,
        drain_timeout=drain_timeout, allowed_hosts=hosts, allowed_origins=origins,
        closed_objects=closed_objects, answers=answers,
    )  # fmt: skip
    run(options, say)
    os._exit(0)  # a thread that still compiles a grammar must not delay the end


def checked_tier(given: str) -> Literal["off", "exact", "semantic"]:
    if given not in ("off", "exact", "semantic"):
        raise ConfigError(f"--answer-cache: {given!r} is not known; use off, exact or semantic.")
    return given  # type: ignore[return-value]


def answer_files(answers: AnswerOptions, model: str) -> AnswerOptions:
    """With the file of the embedded store and the folder of the embedder, which is fetched on first use."""
    from twostroke.weights.catalog import cache_folder
    from twostroke.weights.checkpoint import locate

    if answers.tier == "off" and not answers.record:
        return answers
    name = "".join(char if char.isalnum() or char in "-._" else "-" for char in model)[-80:]
    file = answers.file or cache_folder() / "answers" / f"{name}.sqlite"
    embedder = None
    if answers.compares:
        with progress_bar(f"fetching {EMBEDDER}") as fetching:
            embedder = locate(EMBEDDER, fetching)
    return replace(answers, file=file, embedder=embedder)


def say(line: str) -> None:
    """On stderr. The server does not end because its log cannot be written: a full disk, a pipe without a reader."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)
