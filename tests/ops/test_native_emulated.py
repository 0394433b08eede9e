"""The native kernels on another architecture, emulated: the same bits as here."""

from __future__ import annotations

import shutil

import pytest

from tests.ops.native_builds import ARM
from tests.ops.native_driver import expected, plain, run, special
from twostroke.ops.cpu.build import find_compiler, machine_of


@pytest.mark.system
@pytest.mark.parametrize(("processor", "best"), [("neoverse-n1", "neon"), ("max", "i8mm"), ("cortex-a57", "portable")])
def test_arm(processor: str, best: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Cross-compiled and emulated: with dot products, with everything, and without them (plain C++ only). Each
    processor runs the best kernels that it has; all others are the best of another processor here. On such a machine
    the plain build is the same code, and is not compiled again."""
    compiler, emulator = shutil.which(ARM), shutil.which("qemu-aarch64")
    if not compiler or not emulator:
        pytest.skip(f"needs {ARM} and qemu-aarch64 (Debian: g++-aarch64-linux-gnu, qemu-user)")
    right = expected(tmp_path_factory)
    here = machine_of(find_compiler()) == "aarch64"
    program = plain(tmp_path_factory) if here else special(tmp_path_factory, "arm")
    done = run(emulator, "-cpu", processor, program, "best")
    assert done.lines == right and done.best == best
