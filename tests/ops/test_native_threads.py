"""The native kernels under the sanitizer of threads: in a file of its own, so that it runs beside the other one."""

from __future__ import annotations

import pytest

from tests.ops.native_driver import expected, run, special


@pytest.mark.system
def test_threads(tmp_path_factory: pytest.TempPathFactory) -> None:
    program = special(tmp_path_factory, "threads")
    assert run(program, "quick").lines == expected(tmp_path_factory)
