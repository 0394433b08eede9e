"""Watching a load: a live line in the terminal while it is measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from twostroke.bench.client import Target, measure
from twostroke.bench.record import Record, Run
from twostroke.bench.workload import Load
from twostroke.cli.terminal import errors
from twostroke.cost.diagnose import seconds
from twostroke.hardware import machine_name


@contextmanager
def watching(load: Load) -> Iterator[Callable[[Record], None]]:
    """A live line: how many came back, tokens so far, failures."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as progress:
        task = progress.add_task(load.name, total=len(load.arrivals))
        tokens = failed = 0

        def seen(record: Record) -> None:
            nonlocal tokens, failed
            tokens += record.output
            failed += record.error is not None
            first = f", last TTFT {seconds(record.ttft)}" if record.ttft is not None else ""
            text = f"{load.name}: {tokens:,} tokens{first}" + (f", {failed} failed" if failed else "")
            progress.update(task, advance=1, description=text)

        yield seen


def over_http(target: Target, load: Load) -> Run:
    with watching(load) as seen:
        return measure(target, load, machine_name(), seen)
