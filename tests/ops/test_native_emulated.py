"""The native kernels on another architecture, emulated: the same bits as here."""

from __future__ import annotations

import shutil

import pytest

from tests.ops.native_driver import driver, expected, run


@pytest.mark.system
@pytest.mark.parametrize("processor", ["neoverse-n1", "max", "cortex-a57"])
def test_arm(processor: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Cross-compiled and emulated: with dot products, with everything, and without them (plain C++ only)."""
    compiler, emulator = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")
    if not compiler or not emulator:
        pytest.skip("needs aarch64-linux-gnu-g++ and qemu-aarch64 (Debian: g++-aarch64-linux-gnu, qemu-user)")
    folder = tmp_path_factory.getbasetemp() / "arm"
    program = folder / "selftest"
    if not program.exists():
        driver(folder, compiler, ("-static",))
    assert run(emulator, "-cpu", processor, program, "quick") == expected()
