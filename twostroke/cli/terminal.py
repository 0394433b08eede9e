"""Consoles, progress bars, the table of an answer's phases."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from twostroke.metrics.timeline import Timeline

if TYPE_CHECKING:
    from twostroke.engine.llm import LLM

console = Console(highlight=False)
errors = Console(stderr=True, highlight=False)


@contextlib.contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr, shown from the first report of (done, total) bytes until the end."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as progress:
        task = None

        def report(done: int, total: int) -> None:
            nonlocal task
            if task is None:
                task = progress.add_task(title, total=total)
            progress.update(task, completed=done, total=total)

        yield report


@contextlib.contextmanager
def telling(title: str) -> Iterator[Callable[[str], None]]:
    """What is being done, on stderr: one line that changes on a terminal, a line for each report elsewhere."""
    if not errors.is_terminal:
        yield lambda text: errors.print(f"[dim]{escape(text)}[/dim]", soft_wrap=True)
        return
    with errors.status(title) as status:
        yield lambda text: status.update(escape(text))


def open_llm(model: str, settings: dict[str, Any], ahead: bool = False) -> LLM:
    """ahead: as of LLM; for measurements."""
    from twostroke import LLM

    with progress_bar(f"fetching {model}") as fetching, progress_bar(f"loading {model}") as loading:
        return LLM(model, download_progress=fetching, load_progress=loading, ahead=ahead, **settings)


def phase_table(timeline: Timeline) -> Table:
    """Where the time of one answer went, by stroke."""
    table = Table(title="where the time went", title_justify="left", header_style="bold")
    for name in ("phase", "seconds", "tokens", "tokens/s", "note"):
        table.add_column(name, justify="left" if name in ("phase", "note") else "right")
    computed, chunks = timeline.prompt_tokens - timeline.cached_tokens, timeline.chunks
    table.add_row("queue", f"{timeline.queue:.3f}", "", "", "waiting to be scheduled")
    table.add_row(
        "prefill", f"{timeline.prefill:.3f}", str(computed), rate(computed, timeline.prefill),
        f"reads the prompt in {chunks} chunk{'s' * (chunks != 1)}; {timeline.cached_tokens} more tokens were cached",
    )  # fmt: skip
    written = max(0, timeline.output_tokens - 1)
    table.add_row(
        "decode", f"{timeline.decode:.3f}", str(written), rate(written, timeline.decode),
        "writes the answer after its first token" + drafts_note(timeline),
    )  # fmt: skip
    table.add_row("TTFT", seconds(timeline.ttft), "", "", "time to the first token = queue + prefill")
    table.add_row("TPOT", seconds(timeline.tpot), "", "", "time per output token after the first")
    table.add_row("E2E", f"{timeline.e2e:.3f}", "", "", f"{timeline.preemptions} preemptions")
    return table


def drafts_note(timeline: Timeline) -> str:
    if not timeline.drafted_tokens:
        return ""
    right = f"{timeline.accepted_tokens} of {timeline.drafted_tokens} drafted tokens right"
    return f"; {right}, {timeline.tokens_per_step or 0:.2f} tokens a step"


def rate(tokens: int, duration: float) -> str:
    return f"{tokens / duration:.1f}" if duration > 0 and tokens else "–"


def seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"
