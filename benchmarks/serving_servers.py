"""twostroke's server and llama.cpp's, started with the same limits, on the same file or on another."""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from twostroke.hardware import usable_cores
from twostroke.weights.catalog import DEFAULT, fetch

VOCAB = 49_152
SLOTS = 16  # requests that run at once
CONTEXT = 2048  # tokens of one request
OURS, SAME, REPACKED = "twostroke", "llama.cpp", "llama.cpp on Q4_0"
PORT = {OURS: 18431, SAME: 18432, REPACKED: 18433}
Running = tuple[str, "subprocess.Popen[bytes]"]  # the address of a server that is ready, and its process
READY = {OURS: "/health/ready", SAME: "/health", REPACKED: "/health"}


def our_arguments() -> list[str]:
    room = ["-s", f"max_requests={SLOTS}", "-s", f"max_model_len={CONTEXT}"]
    return ["serve", DEFAULT, "--port", str(PORT[OURS]), "--max-queue", "1000", *room]


def command(name: str, llama: Path | None, file: Path | None) -> list[str]:
    if name == OURS:
        return [sys.executable, "-m", "twostroke", *our_arguments()]
    assert llama is not None, "where llama.cpp's programs lie"
    return [str(llama / "llama-server"), "-m", str(file or fetch(DEFAULT)), "--port", str(PORT[name]), "-t",
            str(usable_cores()), "-np", str(SLOTS), "-c", str(SLOTS * CONTEXT), "-fa", "on", "--no-webui"]  # fmt: skip


def started(name: str, llama: Path | None = None, file: Path | None = None) -> AbstractContextManager[Running]:
    """file: weights other than the default model's."""
    return running(name, command(name, llama, file))


def started_by(code: str, environment: Mapping[str, str]) -> AbstractContextManager[Running]:
    """twostroke's server, after `code` has changed the package."""
    start = f"{code}\nfrom twostroke.cli.main import main; main()"
    return running(OURS, [sys.executable, "-c", start, *our_arguments()], environment)


@contextmanager
def running(name: str, words: list[str], environment: Mapping[str, str] | None = None) -> Iterator[Running]:
    url = f"http://127.0.0.1:{PORT[name]}"
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(url + READY[name], timeout=1).close()
                break
            except (urllib.error.URLError, OSError):
                assert process.poll() is None, f"{name} did not start"
                time.sleep(0.1)
        yield url, process
    finally:
        process.terminate()
        process.wait(30)
