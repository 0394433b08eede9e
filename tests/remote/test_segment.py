"""Memory that two processes share: what one writes the other reads, and nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from twostroke.remote.segment import Segment

WRITE = (
    "import sys; from twostroke.remote.segment import Segment; s = Segment.open(sys.argv[1], 6); s.view[:] = b'hello!'"
)


def opened(*files: str) -> list[str]:
    """Shared memory and these files, for each descriptor that this process has of them. Of other files it may close
    some at any moment: those of earlier tests, when they are collected as garbage."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the one that lists this folder
            found.append(os.readlink(descriptor))
    return sorted(name for name in found if name.startswith("/memfd:twostroke") or name in files)


def test_another_process_writes_and_this_one_reads() -> None:
    before = opened()
    with Segment.create(6) as segment:
        assert bytes(segment.view) == bytes(6) and len(opened()) > len(before)
        subprocess.run([sys.executable, "-c", WRITE, segment.path], check=True)
        assert bytes(segment.view) == b"hello!"
        with Segment.adopt(os.dup(segment.descriptor), 6) as other:
            other.view[0] = ord("H")
        assert bytes(segment.view) == b"Hello!"
    assert opened() == before
    segment.close()


def test_a_part_that_is_still_used_does_not_keep_the_descriptor() -> None:
    segment = Segment.create(100)
    part = segment.view[10:20]
    segment.close()
    assert segment.descriptor == -1 and len(part) == 10


def test_what_is_no_sealed_memory_of_that_size_is_refused() -> None:
    before = opened("/")
    with Segment.create(6) as segment:
        with pytest.raises(OSError, match="no shared memory of 7 bytes"):
            Segment.open(segment.path, 7)
        with pytest.raises(OSError):
            os.ftruncate(segment.descriptor, 3)
    with pytest.raises(OSError):
        Segment.open(segment.path, 6)
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(bytes(6))
        held = opened(file.name)
        with pytest.raises(OSError):
            Segment.open(file.name, 6)
        assert opened(file.name) == held
    with pytest.raises(OSError):
        Segment.open("/", 6)
    assert opened("/") == before
