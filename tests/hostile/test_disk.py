"""A disk that is full or read-only: a model that is there is served, one that cannot be stored is a clear error, and a
log that cannot be written ends nothing."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.hostile.small_disk import make_read_only, small_disk
from tests.serve.server import PATIENT, ROOT, wait_until
from tests.weights.test_catalog import WHOLE, index, left_behind, put_parts  # noqa: F401
from twostroke.errors import ModelError
from twostroke.weights import catalog
from twostroke.weights.catalog import fetch, installed

SLOW = pytest.mark.slow  # seconds
LISTENS = "0A"  # as the system writes the state of a socket


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


def port_of(pid: int) -> int | None:
    """The port on which a process listens, if it does: its log may be lost."""
    sockets = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed since it was listed
            sockets.add(os.readlink(entry))
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        row = line.split()
        if row[3] == LISTENS and f"socket:[{row[9]}]" in sockets:
            return int(row[1].rpartition(":")[2], 16)
    return None


def serve_and_ask(home: Path, stderr: int) -> int:
    """Starts a server with the default model, asks it once, and ends it; the exit status."""
    process = subprocess.Popen(
        [sys.executable, "-m", "twostroke", "serve", catalog.DEFAULT, "--port", "0", "-s", "threads=1"],
        cwd=ROOT, env={**os.environ, "TWOSTROKE_HOME": str(home)}, stderr=stderr,
    )  # fmt: skip
    try:
        wait_until(lambda: process.poll() is not None or port_of(process.pid), "the server does not listen")
        assert process.poll() is None, "the server did not start"
        port = port_of(process.pid)
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
