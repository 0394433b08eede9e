"""What the tests of the native kernels' driver share: a C++ program that holds them to plain loops.

It prints a checksum of every result, so the bits can be compared between builds and architectures.
"""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from twostroke.ops.cpu.build import NATIVE, BuildError, build, find_compiler


def driver(folder: Path, compiler: str | None = None, extra: tuple[str, ...] = ()) -> Path:
    return build(folder / "selftest", compiler, extra, sources=[NATIVE / "selftest.cpp"], shared=False)


def run(*command: str | Path) -> list[str]:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=3600, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.endswith("ok\n")
    return done.stdout.splitlines()


@cache
def expected() -> list[str]:
    """What the plain build prints here, on one and on several threads."""
    try:
        find_compiler()
    except BuildError:
        pytest.skip("no C++ compiler")
    with TemporaryDirectory() as folder:
        return run(driver(Path(folder)))
