"""The house keeps its shape: style, types, imports that only point down, rooms that a reader can hold."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
COMMANDS = {
    "ruff check": ["ruff", "check", "."],
    "ruff format": ["ruff", "format", "--check", "."],
    "mypy": ["mypy"],
    "import-linter": ["lint-imports"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_tool(name):
    tool, *arguments = COMMANDS[name]
    done = subprocess.run(
        [Path(sys.executable).parent / tool, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_files_stay_readable():
    long = {
        str(path.relative_to(ROOT)): lines
        for path in (ROOT / "twostroke").rglob("*.py")
        if (lines := path.read_text().count("\n")) > 450
    }
    assert not long, "files that no longer hold one idea"
