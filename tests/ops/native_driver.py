"""What the tests of the native kernels' driver share: a C++ program that holds them to plain loops.

It prints a checksum of every result, so the bits can be compared between builds and architectures.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
from functools import cache
from pathlib import Path

import pytest

from twostroke.ops.cpu.build import NATIVE, BuildError, build, find_compiler

SANITIZED = ("-O0", "-g", "-DTS_SLOW", "-fno-sanitize-recover=all")  # more of -O takes minutes to compile


def driver(folder: Path, compiler: str | None = None, extra: tuple[str, ...] = ()) -> Path:
    return build(folder / "selftest", compiler, extra, sources=[NATIVE / "selftest.cpp"], shared=False)


def run(*command: str | Path) -> list[str]:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=3600, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.endswith("ok\n")
    return done.stdout.splitlines()


def built_once(
    name: str, factory: pytest.TempPathFactory, compiler: str | None = None, extra: tuple[str, ...] = ()
) -> Path:
    """The same as driver(), for all processes of this run of the tests: the first one that asks compiles."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / f"native_{name}"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        program = folder / "selftest"
        return program if program.exists() else driver(folder, compiler, extra)


def plain(factory: pytest.TempPathFactory) -> Path:
    """The driver as the library is built here."""
    try:
        find_compiler()
    except BuildError:
        pytest.skip("no C++ compiler")
    return built_once("plain", factory)


def expected(factory: pytest.TempPathFactory) -> list[str]:
    """What the plain build prints here, on one and on several threads."""
    return printed(plain(factory))


@cache
def printed(program: Path) -> list[str]:
    return run(program)
