"""The native kernels under the sanitizers of addresses and of undefined behaviour."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ops.native_driver import SANITIZED, driver, expected, run


@pytest.mark.system
def test_addresses(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    program = driver(tmp_path, extra=(*SANITIZED, "-fsanitize=address,undefined"))
    assert run(program, "quick").lines == expected(tmp_path_factory)
