"""The command `models`: the catalog."""

from __future__ import annotations

import typer

from twostroke.weights.catalog import cache_folder, catalog, installed


def models() -> None:
    """The catalog: names, sizes, licences, and what is on disk."""
    entries = catalog()
    wide = max(len(entry.name) for entry in entries)
    for entry in entries:
        size, there = f"{entry.bytes / 1e6:,.0f} MB", "on disk" if installed(entry.name) else "not fetched"
        typer.echo(f"{entry.name:{wide}}  {size:>8}  {there:11}  {entry.licence}")
        typer.echo(f"    {entry.description}")
    typer.echo(f"\nKept in {cache_folder()} (set TWOSTROKE_HOME to move it).")
    typer.echo("Any folder, .gguf file or hub id works too.")
