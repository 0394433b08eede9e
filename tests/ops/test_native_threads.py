"""The native kernels under the sanitizer of threads: in a file of its own, so that it runs beside the other one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ops.native_driver import SANITIZED, driver, expected, run


@pytest.mark.system
def test_threads(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    program = driver(tmp_path, extra=(*SANITIZED, "-fsanitize=thread"))
    assert run(program, "quick").lines == expected(tmp_path_factory)
