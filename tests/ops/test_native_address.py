"""The native kernels under sanitizers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ops.native_driver import driver, expected, run

SANITIZED = ("-O0", "-g", "-DTS_SLOW", "-fno-sanitize-recover=all")


@pytest.mark.system
@pytest.mark.parametrize("kind", ["address,undefined", "thread"])
def test_sanitizers(kind: str, tmp_path: Path) -> None:
    assert run(driver(tmp_path, extra=(*SANITIZED, f"-fsanitize={kind}")), "quick") == expected()
