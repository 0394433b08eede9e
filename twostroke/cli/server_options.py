"""Options of the commands that serve a model over HTTP, and how they become the server's."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_type_hints

import typer

from twostroke.cli.terminal import progress_bar
from twostroke.errors import ConfigError, ModelError
from twostroke.record import replace

if TYPE_CHECKING:
    from twostroke.serve.answer_setup import AnswerOptions
    from twostroke.serve.main import Options

T = TypeVar("T")
EMBEDDER = "all-minilm-l6-v2"  # of the semantic answer cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What was typed, beside the model and its settings."""

    host: Annotated[str, typer.Option(help="Address to listen on; set a key if it is not loopback.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(help="0 takes any free port.", min=0, max=65535)] = 8000
    api_key: Annotated[str | None, typer.Option(envvar="TWOSTROKE_API_KEY", help="Key that clients must send.")] = None
    api_key_file: Annotated[Path | None, typer.Option(help="A file with one key on each line.")] = None
    max_queue: Annotated[int | None, typer.Option(help="Samples that may wait in the queue.", min=0)] = None
    drain_timeout: Annotated[float, typer.Option(help="Seconds for running requests after SIGTERM.", min=0)] = 30.0
    admin_key: Annotated[
        str | None,
        typer.Option(envvar="TWOSTROKE_ADMIN_KEY", help="Key of the operator, for the routes under /twostroke/."),
    ] = None
    admin_key_file: Annotated[Path | None, typer.Option(help="A file with one admin key on each line.")] = None
    allowed_host: Annotated[
        list[str] | None, typer.Option(help="Another name of this server; may be repeated; * for any.")
    ] = None
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(help="A site whose pages may use this server (CORS); may be repeated; * for any."),
    ] = None
    closed_objects: Annotated[
        bool, typer.Option(help="Allow only the properties that a JSON schema names, unless it says otherwise.")
    ] = False
    answer_cache: Annotated[
        str, typer.Option(help="Reuse stored answers: off, exact (equal requests) or semantic (equal questions).")
    ] = "off"
    answer_cache_url: Annotated[str | None, typer.Option(help="redis://HOST:PORT of a store that servers share.")] = (
        None
    )
    answer_cache_file: Annotated[Path | None, typer.Option(help="File of the embedded store.")] = None
    answer_cache_error: Annotated[float, typer.Option(help="Share of wrong answers that is allowed.")] = 0.01
    answer_cache_ttl: Annotated[float | None, typer.Option(help="Seconds that an answer is kept.", min=1)] = None
    answer_cache_entries: Annotated[int, typer.Option(help="Answers that the embedded store keeps.", min=1)] = 100_000
    answer_cache_allow: Annotated[
        str, typer.Option(help="Requests to compare by meaning too: tools,temperature,personal,referring,changing.")
    ] = ""
    record_questions: Annotated[
        bool, typer.Option(help="Keep questions in memory, so that `diagnose` can estimate a semantic cache.")
    ] = False


def takes_server_options(command: Callable[..., T]) -> Callable[..., T]:
    """A command whose parameter `given` is shown as the options of `Given`, each with its help and its default."""
    types, names = get_type_hints(Given, include_extras=True), [option.name for option in fields(Given)]
    options = [
        Parameter(option.name, Parameter.KEYWORD_ONLY, default=option.default, annotation=types[option.name])
        for option in fields(Given)
    ]
    own = [
        parameter.replace(kind=Parameter.KEYWORD_ONLY)
        for parameter in signature(command, eval_str=True).parameters.values()
        if parameter.name != "given"
    ]

    @wraps(command)
    def run(**values: Any) -> T:
        return command(given=Given(**{name: values.pop(name) for name in names}), **values)

    parameters = [*own, *options]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return run


def server_options(model: str, settings: dict[str, Any], given: Given) -> Options:
    """Checked before anything is fetched; then the model, a draft model and an embedder are."""
    from twostroke.config import make_config
    from twostroke.weights.checkpoint import locate

    try:
        from twostroke.serve.answer_setup import AnswerOptions
        from twostroke.serve.main import Options
        from twostroke.serve.transport.auth import read_keys
        from twostroke.serve.transport.browsers import checked_names
    except ImportError as error:
        raise ConfigError(
            f"the server needs a package that is not installed ({error.name}): pip install twostroke."
        ) from None
    keys = read_keys(given.api_key, given.api_key_file)
    admin_keys = read_keys(given.admin_key, given.admin_key_file, "--admin-key-file")
    hosts, origins = checked_names(given.allowed_host or (), given.allow_origin or ())
    make_config(**settings)
    answers = AnswerOptions(
        checked_tier(given.answer_cache), given.answer_cache_url, given.answer_cache_file, given.answer_cache_error,
        given.answer_cache_ttl, given.answer_cache_entries,
        tuple(name.strip() for name in given.answer_cache_allow.split(",") if name.strip()), given.record_questions,
    )  # fmt: skip
    answers.check()
    with progress_bar(f"fetching {model}") as fetching:
        path = locate(model, fetching)
    if "draft_model" in settings:
        with progress_bar(f"fetching {settings['draft_model']}") as fetching:
            try:
                settings["draft_model"] = str(locate(settings["draft_model"], fetching).resolve())
            except ModelError as error:
                raise ModelError(f"draft_model: {error}") from None
    answers = answer_files(answers, model)
    return Options(
        path.resolve(), model, settings, given.host, given.port, tuple(keys), tuple(admin_keys),
        max_queue=given.max_queue, drain_timeout=given.drain_timeout, allowed_hosts=hosts, allowed_origins=origins,
        closed_objects=given.closed_objects, answers=answers,
    )  # fmt: skip


def run_server(options: Options, run: Callable[[Options, Callable[[str], None]], None]) -> None:
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    run(options, say)
    os._exit(0)  # a thread that still compiles a grammar must not delay the end


def checked_tier(given: str) -> Literal["off", "exact", "semantic"]:
    if given not in ("off", "exact", "semantic"):
        raise ConfigError(f"--answer-cache: {given!r} is not known; use off, exact or semantic.")
    return given  # type: ignore[return-value]


def answer_files(answers: AnswerOptions, model: str) -> AnswerOptions:
    """The options with the file of the embedded store and the folder of the embedder, which is fetched on first use."""
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
    """Print a line on stderr. The server does not end because its log cannot be written: a full disk, a pipe without a
    reader."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)
