"""Messages as bytes: msgpack with the types of messages.py, after a length. Torch-free.

Decoding is strict: a message that does not have exactly the expected types is a `WireError`, and so is one that is
longer than MAX_MESSAGE. The receiver then ends the connection.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import msgspec

from twostroke.remote.messages import FromEngine, Message, ToEngine

T = TypeVar("T")
MAX_MESSAGE = 128 << 20  # bytes; the prompt logprobs of one step are the largest content of a message
LENGTH = struct.Struct("<I")
ENCODER = msgspec.msgpack.Encoder()  # for every thread: it keeps the interpreter's lock while it encodes


class WireError(Exception):
    """Bytes that are no message of this schema."""


def encode(message: Message) -> bytes:
    data = ENCODER.encode(message)
    if len(data) > MAX_MESSAGE:
        raise WireError(f"a message of {len(data)} bytes is over the limit of {MAX_MESSAGE}")
    return LENGTH.pack(len(data)) + data


class Reader(Generic[T]):
    """Bytes in, whole messages out."""

    def __init__(self, kinds: Any):
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kinds)
        self._buffer = bytearray()

    def feed(self, data: bytes | memoryview) -> Iterator[T]:
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
                yield self.decode(body)
        finally:
            del self._buffer[:start]

    def decode(self, body: bytes) -> T:
        try:
            return self._decoder.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise WireError(f"not a message: {error}") from None


def from_engine() -> Reader[FromEngine]:
    return Reader(FromEngine)


def to_engine() -> Reader[ToEngine]:
    return Reader(ToEngine)
