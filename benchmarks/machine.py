"""What a result was measured on: written into every JSON, so that numbers are never compared across machines."""

from __future__ import annotations

import platform
import time
from pathlib import Path
from typing import Any

import torch

from twostroke.hardware import usable_cores


def describe() -> dict[str, Any]:
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": platform.machine(),
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    for line in lines:
        if line.startswith(("model name", "CPU part")):
            return line.split(":", 1)[1].strip()
    return platform.processor()
