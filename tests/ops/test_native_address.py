"""The native kernels under the sanitizers of addresses and of undefined behaviour."""

from __future__ import annotations

import pytest

from tests.ops.native_driver import expected, run, special


@pytest.mark.system
def test_addresses(tmp_path_factory: pytest.TempPathFactory) -> None:
    program = special(tmp_path_factory, "address")
    assert run(program, "quick").lines == expected(tmp_path_factory)
