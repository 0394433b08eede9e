"""The command `models`: the catalog."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from twostroke.weights.catalog import cache_folder, catalog, installed


def models() -> None:
    """The catalog: names, sizes, licences, and what is on disk."""
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
