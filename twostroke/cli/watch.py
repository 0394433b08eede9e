"""A live line in the terminal while a load is measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from twostroke.bench.client import Target, measure
from twostroke.bench.record import RequestRecord, Run
from twostroke.bench.workload import Load
from twostroke.cli.terminal import errors
from twostroke.cost.units import seconds
from twostroke.hardware import machine_name


@contextmanager
def watching(load: Load) -> Iterator[Callable[[RequestRecord], None]]:
    """Shows how many requests have ended, their tokens and their failures."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as progress:
        task = progress.add_task(load.name, total=len(load.arrivals))
        tokens = failed = 0

        def show(record: RequestRecord) -> None:
            nonlocal tokens, failed
            tokens += record.output
            failed += record.error is not None
            first = f", last TTFT {seconds(record.ttft)}" if record.ttft is not None else ""
            text = f"{load.name}: {tokens:,} tokens{first}" + (f", {failed} failed" if failed else "")
            progress.update(task, advance=1, description=text)

        yield show


def over_http(target: Target, load: Load) -> Run:
    with watching(load) as show:
        return measure(target, load, machine_name(), show)
