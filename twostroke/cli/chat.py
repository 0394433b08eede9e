"""The command `chat`: one question, or a conversation."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from twostroke.cli.options import MaxTokens, ModelOption, Seed, SettingsOption, Temperature, make_params, parse_settings
from twostroke.cli.terminal import errors, open_llm, phase_table
from twostroke.errors import InputError
from twostroke.metrics.timeline import Timeline
from twostroke.sampling import SamplingParams
from twostroke.weights.catalog import DEFAULT

if TYPE_CHECKING:
    from twostroke.engine.llm import LLM

HELP = """/help    this list
/stats   where the time of the last answer went, and the engine's totals
/reset   forget the conversation
/exit    leave (so does Ctrl-D)
Ctrl-C stops the answer being written."""


def chat(
    text: Annotated[str | None, typer.Argument(help="One question. Without it: an interactive chat.")] = None,
    model: ModelOption = DEFAULT,
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    max_tokens: MaxTokens = 1024,
    temperature: Temperature = None,
    seed: Seed = None,
    stats: Annotated[bool, typer.Option(help="Print where the time went.")] = False,
    option: SettingsOption = None,
) -> None:
    """Ask a question, or talk: the answer streams as it is written."""
    params = make_params(max_tokens, temperature, seed)
    if text is not None and not text.strip():
        raise InputError("the question is empty: write one, or leave it out for an interactive chat.")
    session = Chat(open_llm(model, parse_settings(option)), params, system, stats)
    if text is None:
        session.loop()
    else:
        session.answer(text)


class Chat:
    """A conversation with history. Ctrl-C interrupts one answer and keeps the rest."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None, stats: bool = False):
        self.llm = llm
        self.stats = stats  # whether the phases of each answer are printed
        self.params = params
        self.opening = [{"role": "system", "content": system}] if system else []
        self.history: list[dict[str, str]] = []
        self.last: Timeline | None = None

    def answer(self, text: str) -> str:
        """Stream the answer to stdout; text from before Ctrl-C stays in the conversation."""
        self.history.append({"role": "user", "content": text})
        written, thought, timeline = "", False, None
        stream = self._open_stream()
        try:
            for event in stream:
                if event.reasoning:
                    errors.print(event.reasoning, end="", style="dim", markup=False, highlight=False, soft_wrap=True)
                    thought = True
                if event.text and thought and not written:
                    errors.print("\n")
                written += event.text
                sys.stdout.write(event.text)
                sys.stdout.flush()
                timeline = event.timeline  # comes with the last one
        except KeyboardInterrupt:
            stream.close()
            errors.print("\n[dim]stopped[/dim]")
        sys.stdout.write("\n")
        self.history.append({"role": "assistant", "content": written})
        self.last = timeline or self.last
        if self.stats and timeline is not None:
            errors.print(phase_table(timeline))
        return written

    def _open_stream(self) -> Any:
        """Drops the oldest turns when the conversation has outgrown the context."""
        while True:
            try:
                return self.llm.stream([*self.opening, *self.history], self.params)
            except InputError:
                if len(self.history) < 3:
                    self.history.pop()
                    raise
                del self.history[:2]
                errors.print("[dim]the conversation has outgrown the context: its oldest turn is forgotten[/dim]")

    def loop(self) -> None:
        typed = sys.stdin.isatty()  # else each line is a message: no prompt is shown
        if typed:
            errors.print("[dim]Type a message. /help lists the commands.[/dim]")
        while True:
            try:
                text = input("> " if typed else "").strip()
            except EOFError:
                return
            except KeyboardInterrupt:
                errors.print("\n[dim]/exit or Ctrl-D leaves[/dim]")
                continue
            if text == "/exit":
                return
            if text:
                self._turn(text)

    def _turn(self, text: str) -> None:
        if text == "/help":
            errors.print(HELP)
        elif text == "/reset":
            self.history.clear()
            errors.print("[dim]forgotten[/dim]")
        elif text == "/stats":
            self._show_stats()
        elif text.startswith("/"):
            errors.print(f"unknown command {escape(text.split()[0])}: /help lists them")
        else:
            try:
                self.answer(text)
            except InputError as error:
                errors.print(f"[red]{escape(str(error))}[/red]")

    def _show_stats(self) -> None:
        if self.last is None:
            errors.print("no answer yet")
        else:
            errors.print(phase_table(self.last))
        errors.print(", ".join(f"{name} {value:,}" for name, value in self.llm.stats().items()))
