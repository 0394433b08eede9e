"""A real server in a process of its own, on a tiny random checkpoint and a loopback port."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[2]
KEY = "test-key-one"  # of the admin
OTHER_KEY = "test-key-two"
HEADERS = {"authorization": f"Bearer {KEY}"}
RUN = "from twostroke.cli.main import main; main()"
PATIENT = 600.0  # seconds for what takes moments: only to end a test that hangs, however slow and busy the machine


class Server:
    """`twostroke serve` (or `cluster`) as a user starts it, with a checkpoint or a name of the catalog. `code` may
    change the package before it runs (patience, limits). admin: which of the keys is the admin's."""

    def __init__(
        self,
        folder: Path | str,
        *arguments: str,
        code: str = "",
        keys: tuple[str, ...] = (KEY, OTHER_KEY),
        admin: str | None = KEY,
        threads: int = 1,
        command: str = "serve",
    ):
        where = folder.parent if isinstance(folder, Path) and folder.is_absolute() else Path(tempfile.gettempdir())
        self.key_file = where / f"keys-{os.getpid()}-{id(self)}"
        self.key_file.write_text("\n".join(keys) + "\n")
        given = ("--api-key-file", str(self.key_file)) if keys else ()
        if keys and admin is not None:
            given += ("--admin-key", admin)
        started = [
            sys.executable,
            "-c",
            code + "\n" + RUN,
            command,
            str(folder),
            "--port",
            "0",
            "-s",
            f"threads={threads}",
        ]
        self.process = subprocess.Popen(
            [*started, *given, *arguments], cwd=ROOT, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        )  # fmt: skip
        self.lines: list[str] = []
        self.model = str(folder)
        self.url = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip())

    def wait(self, seconds: float = PATIENT) -> Server:
        """Until it says where it listens."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for line in self.lines:
                found = re.search(r"on (http://\S+)/v1$", line)
                if found:
                    self.url = found[1]
                    return self
            if self.process.poll() is not None:
                break
            time.sleep(0.02)
        raise AssertionError("the server did not start:\n" + "\n".join(self.lines))

    def client(self, **more: object) -> httpx.Client:
        settings: dict = {"base_url": self.url, "headers": HEADERS, "timeout": PATIENT, "verify": False}
        return httpx.Client(**(settings | more))

    def async_client(self, **more: object) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        settings: dict = {
            "base_url": self.url,
            "headers": HEADERS,
            "timeout": PATIENT,
            "limits": limits,
            "verify": False,
        }
        return httpx.AsyncClient(**(settings | more))

    def health(self) -> dict:
        with self.client() as client:
            return client.get("/health").json()

    def engine_pid(self) -> int:
        """The one child process that runs the engine."""
        for pid in children(self.process.pid):
            if b"remote.child_main" in command_line(pid):
                return pid
        raise AssertionError("there is no engine process")

    def quiet(self) -> dict:
        """Until nothing runs; the health document that says so."""
        found: dict = {}

        def ended() -> bool:
            found.update(self.health())
            return found["in_flight"] == 0

        wait_until(ended, "requests never ended")
        return found

    def assert_no_blocks_held(self) -> None:
        """A request whose client left while it was being read begins, and ends, when nothing else runs any more: a
        block is lost if it does not come back then either."""
        blocks: dict = {}

        def whole() -> bool:
            blocks.update(self.quiet()["blocks"])
            return blocks["free"] + blocks["cached"] == blocks["total"]

        wait_until(whole, "blocks are held although nothing runs")

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def stop(self) -> int:
        """End it and check that nothing of it stays."""
        family = [self.process.pid, *children(self.process.pid)]
        if self.process.poll() is None:
            self.signal()
            try:
                self.process.wait(PATIENT)
            except subprocess.TimeoutExpired:
                self.process.kill()
        code = self.process.wait()
        self._reader.join(PATIENT)
        self.key_file.unlink(missing_ok=True)
        wait_until(lambda: not any(alive(pid) for pid in family), f"orphans of {family}")
        return code


def children(pid: int) -> list[int]:
    found = []
    with contextlib.suppress(OSError):  # the process has ended meanwhile
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):  # a thread has
                found += [int(child) for child in task.read_text().split()]
    return found


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition, what: str, seconds: float = PATIENT) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def events(text: str) -> list[str]:
    """The data of each server-sent event."""
    return [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
