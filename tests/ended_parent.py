"""A process that kills itself, and the child that must end with it."""

from __future__ import annotations

import subprocess
import sys
import time

from tests.serve.server import command_line


def assert_ends(code: str) -> None:
    """code: starts a child, prints its process id and kills itself."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300)
    number, deadline = int(done.stdout), time.monotonic() + 120
    while command_line(number):  # empty once it has ended
        assert time.monotonic() < deadline, "it is still there"
        time.sleep(0.05)
