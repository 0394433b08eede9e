"""What h11 forgives and this server refuses: bare line feeds in the head of a request, heads over the limit, and bodies
in too many chunks.

Two servers that disagree about where a line or a head ends can be made to see different requests in the same bytes. h11
needs some 40 µs for each chunk, however small: a body of 4 MiB in chunks of one byte would take minutes.
"""

from __future__ import annotations

import re

import h11
from h11._receivebuffer import ReceiveBuffer

MAX_HEADER_BYTES = 32 << 10
MAX_CHUNKS = 4096  # of one body
END_OF_HEAD = re.compile(rb"\n\r?\n")


class StrictBuffer(ReceiveBuffer):
    """The received bytes that h11 has not read yet."""

    def __init__(self) -> None:
        super().__init__()
        self.chunks = 0  # of the present body

    def maybe_extract_next_line(self) -> bytearray | None:
        """The line before a chunk; None while it has not come."""
        line: bytearray | None = super().maybe_extract_next_line()
        if line is not None:
            self.chunks += 1
            if self.chunks > MAX_CHUNKS:
                raise h11.RemoteProtocolError("too many chunks")
        return line

    def maybe_extract_lines(self) -> list[bytearray] | None:
        """The lines up to the first empty one; None while it has not come. h11 limits what comes before that."""
        if self._data[:1] == b"\n":
            raise bare_line_feed()
        found = END_OF_HEAD.search(self._data, self._multiple_lines_search)
        if found is not None:
            head = self._data[: found.end()]
            if head.count(b"\n") != head.count(b"\r\n"):
                raise bare_line_feed()
            self.chunks = 0
            if len(head) > MAX_HEADER_BYTES:
                raise h11.RemoteProtocolError("the head is too long", error_status_hint=431)
        return super().maybe_extract_lines()


def bare_line_feed() -> h11.RemoteProtocolError:
    return h11.RemoteProtocolError("a line ends without a carriage return")
