"""Predicted beside measured, for every lever that was ever pulled: the model's error is public."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Entry:
    when: str  # ISO date and time
    machine: str
    model: str
    load: str
    lever: str
    metric: str
    before: float
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Of the prediction, relative to what was measured."""
        return self.predicted / self.measured - 1 if self.measured else float("inf")


def append(path: Path, entry: Entry) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(asdict(entry)) + "\n")


def read(path: Path) -> list[Entry]:
    """All entries, oldest first; a line that is none is left out."""
    entries = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            entries.append(Entry(**json.loads(line)))
        except (ValueError, TypeError):
            continue
    return entries
