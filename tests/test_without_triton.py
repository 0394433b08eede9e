"""Triton is optional: every test file is collected without it, tests of kernels are skipped by name, the rest runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # collects the suite once more

ROOT = Path(__file__).resolve().parent.parent
MISSING = "raise ModuleNotFoundError(\"No module named 'triton'\", name='triton')\n"


@pytest.fixture
def hidden(tmp_path: Path) -> dict[str, str]:
    """An environment in which `import triton` fails as it does where Triton is not installed."""
    (tmp_path / "triton.py").write_text(MISSING)
    places = [str(tmp_path), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(places)}


def run_pytest(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1800, check=False)


def test_every_file_is_collected(hidden: dict[str, str]) -> None:
    done = run_pytest(hidden, "--collect-only", "-rs", "tests")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "tests/ops/test_triton.py" in done.stdout and "could not import 'triton'" in done.stdout


def test_scheduling_runs(hidden: dict[str, str]) -> None:
    """The random lives run once, in the main suite: they import what the tests beside them import."""
    done = run_pytest(hidden, "tests/schedule", "-k", "not random")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout
