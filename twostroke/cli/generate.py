"""The command `generate`: continue a text."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from twostroke.cli.options import (
    MaxTokens,
    ModelArgument,
    Seed,
    SettingsOption,
    Temperature,
    make_params,
    parse_settings,
)
from twostroke.cli.terminal import errors, open_llm, phase_table
from twostroke.metrics.timeline import Timeline

if TYPE_CHECKING:
    from twostroke.engine.answer import Output


def generate(
    model: ModelArgument,
    prompt: Annotated[str, typer.Argument(help="Text to continue; '-' reads it from standard input.")],
    max_tokens: MaxTokens = 256,
    temperature: Temperature = None,
    seed: Seed = None,
    stats: Annotated[bool, typer.Option("--stats", help="Print where the time went.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")] = False,
    option: SettingsOption = None,
) -> None:
    """Continue a text exactly as given, without a chat template."""
    if prompt == "-":
        prompt = sys.stdin.read()
    params = make_params(max_tokens, temperature, seed)
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


def as_document(output: Output) -> dict[str, Any]:
    """Everything about one answer as plain JSON values."""
    document = {"text": output.text, **asdict(output)}
    for sample, source in zip(document["samples"], output.samples, strict=True):
        del sample["pieces"], sample["thoughts"]  # a text that is continued has no reasoning apart
        sample["text"] = source.text
        sample["timeline"] = timeline_document(source.timeline)
    return document


DRAFTS = ("drafted_tokens", "accepted_tokens", "tokens_per_step")


def timeline_document(timeline: Timeline) -> dict[str, Any]:
    names = "queue prefill decode ttft tpot e2e prompt_tokens cached_tokens output_tokens chunks preemptions"
    return {name: getattr(timeline, name) for name in (*names.split(), *DRAFTS, "recomputed_tokens", "itl")}
