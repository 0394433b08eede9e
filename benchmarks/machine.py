"""The machine of a result, and the file that a result is written to. Figures are never compared across machines."""

from __future__ import annotations

import json
import platform
import time
from pathlib import Path
from typing import Any

import torch

from twostroke.hardware import machine_name, usable_cores

RESULTS = Path(__file__).parent / "results"


def describe() -> dict[str, Any]:
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": platform.machine(),
        "cpu": machine_name(),
        "cores": usable_cores(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def save(name: str, command: str, figures: dict[str, Any], path: Path | None = None) -> Path:
    """Writes `results/NAME-MACHINE.json`, or `path`, and prints the result in one line; returns the path."""
    result = {"machine": describe(), "command": f"python -m benchmarks.{command}", **figures}
    path = path or RESULTS / f"{name}-{platform.machine()}.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))
    return path
