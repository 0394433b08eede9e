"""Messages as bytes on a socket: msgpack after a length, and back in however many pieces they come. Torch-free."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import msgpack

MAX_MESSAGE = 128 << 20  # bytes; the prompt logprobs of one step are the largest thing ever said
LENGTH = struct.Struct("<I")
REPORT_MARK = b"\xc1"  # with which no msgpack begins
PACKER = msgpack.Packer(use_bin_type=True)  # for every thread: it keeps the interpreter's lock while it packs


class WireError(Exception):
    """A message that this schema does not know."""


def frame(body: list[Any]) -> bytes:
    return framed(PACKER.pack(body))


def framed(data: bytes) -> bytes:
    if len(data) > MAX_MESSAGE:
        raise WireError(f"a message of {len(data)} bytes is over the limit of {MAX_MESSAGE}")
    return LENGTH.pack(len(data)) + data


class Frames:
    """Bytes in, whole messages out."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes | memoryview) -> Iterator[list[Any]]:
        self._buffer += data
        start = 0
        try:
            while len(self._buffer) - start >= LENGTH.size:
                (size,) = LENGTH.unpack_from(self._buffer, start)
                if size > MAX_MESSAGE:
                    raise WireError(f"a message of {size} bytes is over the limit of {MAX_MESSAGE}")
                first = start + LENGTH.size
                if len(self._buffer) < first + size:
                    return
                body = bytes(memoryview(self._buffer)[first : first + size])
                start = first + size
                yield message_of(body)
        finally:
            del self._buffer[:start]


def message_of(body: bytes) -> list[Any]:
    if body.startswith(REPORT_MARK):
        return ["report", body]
    message = unpack(body)
    if not message or not isinstance(message[0], str):
        raise WireError("a message must be an array that starts with its kind")
    return message


def unpack(data: bytes) -> list[Any]:
    try:
        return listed(msgpack.unpackb(data, raw=False, use_list=True, strict_map_key=False))
    except (ValueError, msgpack.exceptions.UnpackException) as error:
        raise WireError(f"not msgpack: {error}") from None


def listed(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise WireError(f"{type(value).__name__} where a list belongs")
    return value
