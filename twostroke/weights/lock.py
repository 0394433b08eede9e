"""One process at a time, by a lock the operating system drops when its holder dies."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold the lock file `path`, waiting for the process that has it. The file stays behind, empty."""
    with path.open("ab") as file:
        while not _try_lock(file):
            time.sleep(0.1)  # polling keeps Ctrl-C working on every platform
        yield  # closing the file unlocks it


if sys.platform == "win32":
    import msvcrt

    def _try_lock(file: BinaryIO) -> bool:
        try:
            file.seek(0)
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

else:
    import fcntl

    def _try_lock(file: BinaryIO) -> bool:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
