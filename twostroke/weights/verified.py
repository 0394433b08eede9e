"""Whether a cached model file still has the bytes that were verified, without reading them at every start.

Beside the file lies a small record: its sha256, and what the file system reported then (size, times, inode). If the
file system says the same now, the file was not written since. Otherwise it is read and hashed again. The time of the
last change (ctime) cannot be set by a program, so a file that is altered and given its old date is found too.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from pathlib import Path


def is_verified(file: Path, sha256: str) -> bool:
    """Whether the file has this sha256. Reads the whole file only if it may have changed since the last time."""
    before = _identity(file)
    record = _record(file)
    try:
        if record.read_text("utf-8") == _line(sha256, before):
            return True
    except (OSError, UnicodeError):
        pass  # no record: hash the file
    if hash_of(file) != sha256:
        return False
    if _identity(file) == before:
        _write(record, _line(sha256, before))
    return True


def hash_of(file: Path) -> str:
    with file.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()


def _identity(file: Path) -> tuple[int, ...]:
    found = file.stat()
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev


def _line(sha256: str, identity: tuple[int, ...]) -> str:
    return " ".join([sha256, *map(str, identity)]) + "\n"


def _record(file: Path) -> Path:
    return file.with_name(file.name + ".verified")


def _write(record: Path, line: str) -> None:
    """Write the record in one step. Where nothing can be written (a read-only folder, a full disk) the file is hashed
    at every start."""
    with contextlib.suppress(OSError):
        handle, temporary = tempfile.mkstemp(prefix=record.name, dir=record.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as out:
                out.write(line)
            os.replace(temporary, record)
        except OSError:
            os.unlink(temporary)
