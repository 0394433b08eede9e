"""Predicted and measured values of every lever that was pulled, in one file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Prediction:
    """The predicted effect of one lever, with the measurement after it."""

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
        """Relative to the measurement."""
        return self.predicted / self.measured - 1 if self.measured else float("inf")


def append(path: Path, one: Prediction) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(asdict(one)) + "\n")


def read(path: Path) -> list[Prediction]:
    """All predictions, oldest first; lines that cannot be read are left out."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            found.append(Prediction(**json.loads(line)))
        except (ValueError, TypeError):
            continue
    return found
