"""Our server and llama.cpp's, started on the same weights with the same room."""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from twostroke.hardware import usable_cores
from twostroke.weights.catalog import DEFAULT, fetch

VOCAB = 49_152
SLOTS = 16  # requests that run at once
CONTEXT = 2048  # tokens of one request
PORT = {"twostroke": 18431, "llama.cpp": 18432}
READY = {"twostroke": "/health/ready", "llama.cpp": "/health"}


def command(name: str, llama: Path | None) -> list[str]:
    port = str(PORT[name])
    if name == "twostroke":
        settings = ["-s", f"max_requests={SLOTS}", "-s", f"max_model_len={CONTEXT}"]
        return [
            sys.executable,
            "-m",
            "twostroke.cli",
            "serve",
            DEFAULT,
            "--port",
            port,
            "--max-queue",
            "1000",
            *settings,
        ]
    assert llama is not None, "where llama.cpp's programs lie"
    return [str(llama / "llama-server"), "-m", str(fetch(DEFAULT)), "--port", port, "-t", str(usable_cores()),
            "-np", str(SLOTS), "-c", str(SLOTS * CONTEXT), "-fa", "on", "--no-webui"]  # fmt: skip


@contextmanager
def started(name: str, llama: Path | None = None) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """The address of a server that is ready, and its process."""
    url = f"http://127.0.0.1:{PORT[name]}"
    process = subprocess.Popen(command(name, llama), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
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
