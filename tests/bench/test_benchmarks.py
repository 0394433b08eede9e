"""Every benchmark can be started: what it imports from this project is there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
IMPORT_ALL = """
import importlib, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(f"benchmarks.{name}")
    except ModuleNotFoundError as error:
        if error.name.split(".")[0] in ("twostroke", "benchmarks"):
            raise
        print(name, "needs", error.name)  # a peer that is not installed
"""


def test_all_are_imported() -> None:
    names = sorted(path.stem for path in BENCHMARKS.glob("*.py") if path.stem != "__init__")
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, *names], cwd=BENCHMARKS.parent, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
