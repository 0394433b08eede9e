"""A disk that is full or read-only: a model that is there is served, one that cannot be stored is a clear error, and a
log that cannot be written ends nothing."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.hostile.small_disk import make_read_only, small_disk
from tests.serve.server import PATIENT, ROOT
from tests.weights.test_catalog import WHOLE, index, left_behind, put_parts  # noqa: F401
from twostroke.errors import ModelError
from twostroke.weights import catalog
from twostroke.weights.catalog import fetch, installed

SLOW = pytest.mark.slow  # seconds


@pytest.mark.parametrize("size", [pytest.param(1_000_000, marks=SLOW), 4_000_000])
def test_a_full_disk_is_named_and_leaves_nothing(
    index: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    size: int,
) -> None:
    """Room for less than the download, and for the download but not for what is made of it."""
    put_parts(index)
    with small_disk(tmp_path / "disk", size) as disk:
        monkeypatch.setenv("TWOSTROKE_HOME", str(disk))
        with pytest.raises(ModelError, match=r"(No space left|MiB are free there).*TWOSTROKE_HOME"):
            fetch("tiny")
        assert installed("tiny") is None
        assert not left_behind(disk)


def test_a_disk_without_room_for_the_record(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """The model is used, and nothing is left behind by each start."""
    with small_disk(tmp_path / "disk", len(WHOLE) + 65_536) as disk:
        monkeypatch.setenv("TWOSTROKE_HOME", str(disk))
        (disk / "models").mkdir()
        (disk / "models" / "tiny.gguf").write_bytes(WHOLE)
        fill(disk)
        for _ in range(3):
            assert fetch("tiny") == disk / "models" / "tiny.gguf"
        assert [entry.name for entry in (disk / "models").iterdir()] == ["tiny.gguf"]


def test_a_read_only_disk_without_the_model(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    put_parts(index)
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        make_read_only(disk)
        monkeypatch.setenv("TWOSTROKE_HOME", str(disk))
        with pytest.raises(ModelError, match=r"cannot be stored .*Read-only file system.*TWOSTROKE_HOME"):
            fetch("tiny")


def fill(disk: Path) -> None:
    with (disk / "filler").open("wb", buffering=0) as filler, contextlib.suppress(OSError):
        while True:
            filler.write(bytes(1024))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def serve_and_ask(home: Path, stderr: int) -> int:
    """Starts a server with the default model, asks it once, and ends it; the exit status."""
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "twostroke", "serve", catalog.DEFAULT, "--port", str(port), "-s", "threads=1"],
        cwd=ROOT, env={**os.environ, "TWOSTROKE_HOME": str(home)}, stderr=stderr,
    )  # fmt: skip
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENT) as client:
            deadline = time.monotonic() + PATIENT
            while not is_ready(client):
                assert process.poll() is None and time.monotonic() < deadline, "the server did not start"
                time.sleep(0.05)
            body = {"prompt": "Once upon a time", "max_tokens": 4}
            assert client.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 4
        process.send_signal(signal.SIGTERM)
        return process.wait(PATIENT)
    finally:
        process.kill()
        process.wait()


def is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/health/ready").status_code == 200
    except httpx.TransportError:
        return False


@SLOW
def test_a_server_starts_from_a_read_only_disk(default_model: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", default_model.stat().st_size + (1 << 20)) as disk:
        (disk / "models").mkdir()
        shutil.copyfile(default_model, disk / "models" / default_model.name)
        make_read_only(disk)
        assert serve_and_ask(disk, subprocess.DEVNULL) == 0


@SLOW
def test_a_server_runs_though_its_log_cannot_be_written(default_model: Path) -> None:
    """stderr on a full disk, and into a pipe that is not read any more."""
    home = default_model.parent.parent
    with open("/dev/full", "wb") as full:
        assert serve_and_ask(home, full.fileno()) == 0
    reading, writing = os.pipe()
    os.close(reading)
    try:
        assert serve_and_ask(home, writing) == 0
    finally:
        os.close(writing)
