"""Where compiled kernels are kept."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("triton")

from twostroke.run.cuda.kernel_cache import VARIABLE, use_kernel_cache


def test_a_folder_for_versions_and_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    use_kernel_cache(tmp_path, "NVIDIA H200")
    found = Path(os.environ[VARIABLE])
    assert found.is_dir() and found.parent == tmp_path / "kernels"
    assert found.name.startswith("NVIDIA-H200-triton-") and "torch" in found.name


def test_what_the_environment_names_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "/elsewhere")
    use_kernel_cache(tmp_path, "NVIDIA H200")
    assert os.environ[VARIABLE] == "/elsewhere" and not list(tmp_path.iterdir())


def test_a_home_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "")
    (tmp_path / "file").write_text("")
    use_kernel_cache(tmp_path / "file", "NVIDIA H200")
    assert not os.environ[VARIABLE]
