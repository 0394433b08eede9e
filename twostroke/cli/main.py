"""The command line: chat, generate, serve, models, and bench, plan and diagnose (run_bench.py)."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from twostroke.cli.options import Settings as Option
from twostroke.cli.options import parse_settings
from twostroke.cli.run_bench import register
from twostroke.cli.terminal import Chat, errors, open_llm, phase_table
from twostroke.engine.answer import Output
from twostroke.errors import InputError, TwostrokeError
from twostroke.metrics.timeline import Timeline
from twostroke.sampling import SamplingParams
from twostroke.weights.catalog import DEFAULT, cache_folder, catalog, installed

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Load an open model and use it: fast to start (prefill), fast to stream (decode).",
)

Model = Annotated[str, typer.Option("--model", "-m", help="Catalog name, folder, .gguf file or hub id.")]
MaxTokens = Annotated[int, typer.Option(help="Longest answer, in tokens.")]
Temperature = Annotated[float, typer.Option(help="0 always takes the likeliest token; higher is more varied.")]
Seed = Annotated[int | None, typer.Option(help="Makes sampling repeatable.")]


@app.command()
def chat(
    text: Annotated[str | None, typer.Argument(help="One question. Without it: an interactive chat.")] = None,
    model: Model = DEFAULT,
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    max_tokens: MaxTokens = 1024,
    temperature: Temperature = 0.0,
    seed: Seed = None,
    stats: Annotated[bool, typer.Option(help="Print where the time went.")] = False,
    option: Option = None,
) -> None:
    """Ask a question, or talk: the answer streams as it is written."""
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    if text is not None and not text.strip():
        raise InputError("the question is empty: write one, or leave it out for an interactive chat.")
    session = Chat(open_llm(model, parse_settings(option)), params, system, stats)
    if text is None:
        session.loop()
    else:
        session.answer(text)


@app.command()
def generate(
    model: Annotated[str, typer.Argument(help="Catalog name, folder, .gguf file or hub id.")],
    prompt: Annotated[str, typer.Argument(help="Text to continue; '-' reads it from standard input.")],
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.0,
    seed: Seed = None,
    stats: Annotated[bool, typer.Option("--stats", help="Print where the time went.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")] = False,
    option: Option = None,
) -> None:
    """Continue a text exactly as given, without a chat template."""
    if prompt == "-":
        prompt = sys.stdin.read()
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    llm = open_llm(model, parse_settings(option))
    if as_json:
        output = llm.generate(prompt, params)[0]
        print(json.dumps(as_document(output), ensure_ascii=False, indent=2))
        if stats:
            errors.print(phase_table(output.timeline))
        return
    timeline = None
    for event in llm.stream(prompt, params):
        sys.stdout.write(event.text)
        sys.stdout.flush()
        timeline = event.timeline or timeline
    sys.stdout.write("\n")
    if stats and timeline is not None:
        errors.print(phase_table(timeline))


@app.command()
def serve(
    model: Annotated[str, typer.Argument(help="Catalog name, folder, .gguf file or hub id.")] = DEFAULT,
    host: Annotated[str, typer.Option(help="Address to listen on; others than loopback want a key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes any free port.", min=0, max=65535)] = 8000,
    api_key: Annotated[str | None, typer.Option(envvar="TWOSTROKE_API_KEY", help="What clients must send.")] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="A file with one key on each line.")] = None,
    max_queue: Annotated[int | None, typer.Option(help="Samples that may wait beyond those that run.", min=0)] = None,
    drain_timeout: Annotated[float, typer.Option(help="Seconds for running requests after SIGTERM.", min=0)] = 30.0,
    option: Option = None,
) -> None:
    """Serve a model over HTTP: OpenAI's and Anthropic's APIs, metrics, health."""
    from twostroke.cli.serve import serve as run

    run(model, host, port, api_key, api_key_file, max_queue, drain_timeout, parse_settings(option))


@app.command()
def models() -> None:
    """The catalog: what can be had by name, what is on disk, sizes and licences."""
    table = Table(header_style="bold")
    for name in ("name", "what", "size", "licence", "on disk"):
        table.add_column(name, justify="right" if name == "size" else "left")
    for entry in catalog():
        there = "yes" if installed(entry.name) else "no"
        table.add_row(entry.name, entry.description, f"{entry.bytes / 1e6:,.0f} MB", entry.licence, there)
    console = Console()
    console.print(table)
    console.print(
        f"Kept in {cache_folder()} (set TWOSTROKE_HOME to move it). Any folder, .gguf file or hub id works too."
    )


def as_document(output: Output) -> dict[str, Any]:
    """Everything about one answer as plain JSON values."""
    document = asdict(output)
    for sample, source in zip(document["samples"], output.samples, strict=True):
        sample["timeline"] = timeline_document(source.timeline)
    return document


def timeline_document(timeline: Timeline) -> dict[str, Any]:
    names = (
        "queue",
        "prefill",
        "decode",
        "ttft",
        "tpot",
        "e2e",
        "prompt_tokens",
        "cached_tokens",
        "output_tokens",
        "chunks",
        "preemptions",
        "recomputed_tokens",
        "itl",
    )
    return {name: getattr(timeline, name) for name in names}


register(app)


def main() -> None:
    """Errors of ours are one sentence on stderr, not a traceback."""
    try:
        app()
    except TwostrokeError as error:
        errors.print(f"[red]error:[/red] {escape(str(error))}")
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
