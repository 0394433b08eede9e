"""The native kernels under sanitizers and on the other architecture: a C++ driver holds them to plain loops.

The driver prints a checksum of every result, so the bits can be compared between builds and architectures.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from twostroke.ops.cpu.build import NATIVE, BuildError, build, find_compiler

pytestmark = pytest.mark.system

SANITIZED = ("-O0", "-g", "-DTS_SLOW", "-fno-sanitize-recover=all")


def driver(folder: Path, compiler: str | None = None, extra: tuple[str, ...] = ()) -> Path:
    return build(folder / "selftest", compiler, extra, sources=[NATIVE / "selftest.cpp"], shared=False)


def run(*command: str | Path) -> list[str]:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.endswith("ok\n")
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What the plain build prints here, on one and on several threads."""
    try:
        find_compiler()
    except BuildError:
        pytest.skip("no C++ compiler")
    return run(driver(tmp_path_factory.mktemp("plain")))


@pytest.mark.parametrize("kind", ["address,undefined", "thread"])
def test_sanitizers(kind: str, tmp_path: Path, expected: list[str]) -> None:
    assert run(driver(tmp_path, extra=(*SANITIZED, f"-fsanitize={kind}")), "quick") == expected


@pytest.mark.parametrize("processor", ["neoverse-n1", "max", "cortex-a57"])
def test_arm(processor: str, tmp_path_factory: pytest.TempPathFactory, expected: list[str]) -> None:
    """Cross-compiled and emulated: with dot products, with everything, and without them (plain C++ only)."""
    compiler, emulator = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")
    if not compiler or not emulator:
        pytest.skip("needs aarch64-linux-gnu-g++ and qemu-aarch64 (Debian: g++-aarch64-linux-gnu, qemu-user)")
    folder = tmp_path_factory.getbasetemp() / "arm"
    program = folder / "selftest"
    if not program.exists():
        driver(folder, compiler, ("-static",))
    assert run(emulator, "-cpu", processor, program, "quick") == expected
