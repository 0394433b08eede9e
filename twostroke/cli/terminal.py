"""What people see in a terminal: progress bars, the table of phases, the interactive chat."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from twostroke.errors import InputError
from twostroke.metrics.timeline import Timeline
from twostroke.sampling import SamplingParams

if TYPE_CHECKING:
    from twostroke.engine.llm import LLM

errors = Console(stderr=True, highlight=False)

HELP = """/help    this list
/stats   where the time of the last answer went, and the engine's totals
/reset   forget the conversation
/exit    leave (so does Ctrl-D)
Ctrl-C stops the answer being written."""


@contextlib.contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr that appears with the first report of (done, total) bytes and goes away at the end."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as progress:
        task = None

        def report(done: int, total: int) -> None:
            nonlocal task
            if task is None:
                task = progress.add_task(title, total=total)
            progress.update(task, completed=done, total=total)

        yield report


def open_llm(model: str, settings: dict[str, Any]) -> LLM:
    from twostroke import LLM

    with progress_bar(f"fetching {model}") as fetching, progress_bar(f"loading {model}") as loading:
        return LLM(model, download_progress=fetching, load_progress=loading, **settings)


def phase_table(timeline: Timeline) -> Table:
    """Where the time of one answer went, by stroke."""
    table = Table(title="where the time went", title_justify="left", header_style="bold")
    for name in ("phase", "seconds", "tokens", "tokens/s", "note"):
        table.add_column(name, justify="left" if name in ("phase", "note") else "right")
    computed = timeline.prompt_tokens - timeline.cached_tokens
    table.add_row("queue", f"{timeline.queue:.3f}", "", "", "waiting to be scheduled")
    table.add_row(
        "prefill", f"{timeline.prefill:.3f}", str(computed), rate(computed, timeline.prefill),
        f"reads the prompt; {timeline.cached_tokens} more tokens were cached, {timeline.chunks} chunks",
    )  # fmt: skip
    written = max(0, timeline.output_tokens - 1)
    table.add_row(
        "decode", f"{timeline.decode:.3f}", str(written), rate(written, timeline.decode),
        "writes the answer after its first token",
    )  # fmt: skip
    table.add_row("TTFT", seconds(timeline.ttft), "", "", "time to the first token = queue + prefill")
    table.add_row("TPOT", seconds(timeline.tpot), "", "", "time per output token after the first")
    table.add_row("E2E", f"{timeline.e2e:.3f}", "", "", f"{timeline.preemptions} preemptions")
    return table


def rate(tokens: int, duration: float) -> str:
    return f"{tokens / duration:.1f}" if duration > 0 and tokens else "–"


def seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


class Chat:
    """A conversation with history. One turn can be interrupted without losing the rest."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None, stats: bool = False):
        self.llm = llm
        self.stats = stats  # whether each answer is followed by where its time went
        self.params = params
        self.opening = [{"role": "system", "content": system}] if system else []
        self.history: list[dict[str, str]] = []
        self.last: Timeline | None = None

    def answer(self, text: str) -> str:
        """Stream the answer to stdout; what was written before Ctrl-C stays in the conversation."""
        self.history.append({"role": "user", "content": text})
        written, timeline = "", None
        stream = self._open_stream()
        try:
            for event in stream:
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
        errors.print("[dim]Type a message. /help lists the commands.[/dim]")
        while True:
            try:
                text = input("> ").strip()
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
