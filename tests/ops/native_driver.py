"""What the tests of the native kernels' driver share: a C++ program that holds them to plain loops.

It prints a checksum of every result, so the bits can be compared between builds and architectures.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.ops.native_builds import built, compiled, made_once
from twostroke.ops.cpu.build import FLAGS, NATIVE, BuildError, find_compiler
from twostroke.ops.cpu.library import library_path


class Run(NamedTuple):
    lines: list[str]
    best: str  # instruction set


def run(*command: str | Path) -> Run:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=3600, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.endswith("ok\n")
    return Run(done.stdout.splitlines(), done.stderr.partition("best: ")[2].partition("\n")[0])


def folder_of_builds(factory: pytest.TempPathFactory) -> Path:
    """One for all processes of this run of the tests, or the one that was filled before."""
    if "NATIVE_BUILDS" in os.environ:
        return Path(os.environ["NATIVE_BUILDS"])
    base = factory.getbasetemp()
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "native"


def special(factory: pytest.TempPathFactory, name: str) -> Path:
    """One of native_builds.BUILDS."""
    return built(folder_of_builds(factory), name)


def plain(factory: pytest.TempPathFactory) -> Path:
    """The driver with the library as it is built here."""
    try:
        find_compiler()
    except BuildError:
        pytest.skip("no C++ compiler")
    library = library_path()
    make = compiled if library is None or is_older(library) else beside(library)
    return made_once(folder_of_builds(factory) / "plain", make)


def is_older(library: Path) -> bool:
    """Older than a source or the recipe: then it may hold other code."""
    sources = [path for path in NATIVE.rglob("*.[ch]*") if not path.name.startswith("selftest")]
    return library.stat().st_mtime < max(path.stat().st_mtime for path in [*sources, NATIVE.parent / "build.py"])


def beside(library: Path) -> Callable[[Path], Path]:
    """The driver alone is compiled, and calls the library."""

    def link(folder: Path) -> Path:
        program = folder / "selftest"
        sources = [str(NATIVE / name) for name in ("selftest.cpp", "pack.cpp")]
        link_to = [str(library), f"-Wl,-rpath,{library.parent}", "-pthread"]
        subprocess.run([find_compiler(), *FLAGS, "-I", str(NATIVE), *sources, *link_to, "-o", str(program)], check=True)
        return program

    return link


def expected(factory: pytest.TempPathFactory) -> list[str]:
    """What the plain build prints here, on one and on several threads."""
    return printed(plain(factory))


@cache
def printed(program: Path) -> list[str]:
    return run(program).lines
