"""A cached model file that was altered is not loaded, also where its size and its date are those of before."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from twostroke.errors import ModelError
from twostroke.weights import catalog, verified
from twostroke.weights.catalog import CatalogEntry, fetch, installed

BYTES = bytes(range(256)) * 4096


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model of the catalog that was fetched before."""
    sha256 = hashlib.sha256(BYTES).hexdigest()
    entry = CatalogEntry("tiny", "a test", "none", len(BYTES), sha256, (), "", "tiny/model", "tiny.gguf")
    monkeypatch.setitem(catalog.CATALOG, "tiny", entry)
    monkeypatch.setenv("TWOSTROKE_HOME", str(tmp_path))
    path = tmp_path / "models" / "tiny.gguf"
    path.parent.mkdir()
    path.write_bytes(BYTES)
    return path


def count_hashes(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    hashed: list[Path] = []
    real = verified.hash_of
    monkeypatch.setattr(verified, "hash_of", lambda path: hashed.append(path) or real(path))
    return hashed


def test_the_bytes_are_read_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = count_hashes(monkeypatch)
    assert fetch("tiny") == fetch("tiny") == file
    assert hashed == [file]
    time.sleep(0.02)  # the clock of a file system has ticks
    file.write_bytes(BYTES)  # written again: it may be another file
    assert fetch("tiny") == file and fetch("tiny") == file
    assert hashed == [file, file]


@pytest.mark.parametrize("how", ["one byte", "with its old date", "another file in its place"])
def test_an_altered_file_is_refused(file: Path, how: str) -> None:
    fetch("tiny")
    before = file.stat()
    time.sleep(0.02)  # the clock of a file system has ticks
    if how == "another file in its place":
        other = file.with_name("other")
        other.write_bytes(BYTES[::-1])
        os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
        os.replace(other, file)
    else:
        with file.open("r+b") as data:
            data.seek(70_000)
            data.write(b"\xff")
        if how == "with its old date":
            os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert installed("tiny") == file  # its size is right
    for _ in range(2):
        with pytest.raises(ModelError, match=r"was altered since it was fetched.*delete it"):
            fetch("tiny")


@pytest.mark.parametrize("record", ["", "garbage\xff", f"{'0' * 64} 1 2 3 4 5\n"])
def test_a_record_that_says_nothing_is_not_trusted(file: Path, record: str) -> None:
    (file.parent / "tiny.gguf.verified").write_bytes(record.encode("latin-1"))
    assert fetch("tiny") == file
    file.write_bytes(BYTES[::-1])
    with pytest.raises(ModelError, match="altered"):
        fetch("tiny")


def test_a_cache_that_cannot_be_written_is_hashed_each_time(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = count_hashes(monkeypatch)

    def refuse(*args: object, **named: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(verified.tempfile, "mkstemp", refuse)
    assert fetch("tiny") == fetch("tiny") == file
    assert hashed == [file, file]


def test_a_server_does_not_start_with_an_altered_model(default_model: Path, tmp_path: Path) -> None:
    place = tmp_path / "models" / default_model.name
    place.parent.mkdir()
    place.write_bytes(default_model.read_bytes())
    with place.open("r+b") as data:
        data.seek(-1000, os.SEEK_END)
        data.write(b"altered")
    done = subprocess.run(
        [sys.executable, "-m", "twostroke", "serve", catalog.DEFAULT, "--port", "0"],
        env={**os.environ, "TWOSTROKE_HOME": str(tmp_path)}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert "was altered since it was fetched" in " ".join(done.stderr.split())
