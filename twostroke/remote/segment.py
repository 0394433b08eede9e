"""Memory that two processes share: KV blocks travel in it between an engine and its front end. Torch-free.

On Linux a segment is a file without a name (memfd): another process of the same user opens it under /proc, or gets its
descriptor over a Unix socket. It is gone when the last process that has it open ends, however that process ends. Its
size is sealed, so that it cannot shrink under a reader. Elsewhere it is a temporary file, which `close` deletes.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import stat
import sys
import tempfile

SEALED = sys.platform == "linux"


class Segment:
    """Shared bytes: `view` is this process's view of them. Use it in a `with` block, or `close` it."""

    def __init__(self, descriptor: int, size: int, path: str, named: bool = False):
        self.descriptor = descriptor
        self.size = size
        self.path = path  # under which another process of this user can open it while this one keeps it open
        self._named = named  # a file that has to be deleted
        self._map = mmap.mmap(descriptor, size) if size else None
        self.view = memoryview(self._map) if self._map is not None else memoryview(b"")

    @classmethod
    def create(cls, size: int) -> Segment:
        if SEALED:
            descriptor = os.memfd_create("twostroke", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            path = f"/proc/{os.getpid()}/fd/{descriptor}"
        else:
            descriptor, path = tempfile.mkstemp(prefix="twostroke-")
        try:
            os.ftruncate(descriptor, size)
            if SEALED:
                fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            return cls(descriptor, size, path, not SEALED)
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def open(cls, path: str, size: int) -> Segment:
        """A segment of another process, which may close it then. OSError: there is none of this size."""
        return cls.adopt(os.open(path, os.O_RDWR | os.O_CLOEXEC), size, None if SEALED else path)

    @classmethod
    def adopt(cls, descriptor: int, size: int, path: str | None = None) -> Segment:
        """A segment whose descriptor another process has sent. Its size must be right and, on Linux, sealed."""
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) or found.st_size != size:
                raise OSError(f"no shared memory of {size} bytes")
            if SEALED and not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise OSError("the size of the shared memory is not sealed")
            return cls(descriptor, size, path or f"/proc/{os.getpid()}/fd/{descriptor}")
        except BaseException:
            os.close(descriptor)
            raise

    def close(self) -> None:
        """Let go of the memory. It exists for others as long as they have it open."""
        if self.descriptor < 0:
            return
        with contextlib.suppress(BufferError):  # a part of it is still used: the memory goes with that part
            self.view.release()
            if self._map is not None:
                self._map.close()
        if self._named:
            with contextlib.suppress(OSError):
                os.unlink(self.path)
        os.close(self.descriptor)
        self.descriptor = -1

    def __enter__(self) -> Segment:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
