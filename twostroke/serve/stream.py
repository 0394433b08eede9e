"""Server-sent events: pieces go out as they come, all that wait in one write."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from json.encoder import encode_basestring
from typing import Any, Protocol

from twostroke.engine.answer import StreamEvent
from twostroke.remote.stream import Piece
from twostroke.serve.errors import ApiError
from twostroke.serve.http import GoneError, dump
from twostroke.serve.service import Generation

DONE = b"data: [DONE]\n\n"
HERE = secrets.token_hex(16)  # stands for a text that is yet to come


class Writer(Protocol):
    """How one API writes a stream."""

    def begin(self) -> bytes: ...

    def text(self, choice: int, text: str) -> bytes:
        """A piece that is nothing but text."""
        return self.piece(Piece(choice, StreamEvent(text, ())))

    def piece(self, piece: Piece) -> bytes: ...

    def end(self) -> bytes: ...

    def problem(self, error: ApiError) -> bytes: ...


def data(document: Any) -> bytes:
    return b"data: " + dump(document) + b"\n\n"


def event(name: str, document: Any) -> bytes:
    return b"event: " + name.encode() + b"\n" + data(document)


class Forms:
    """Events of which only a text changes: each choice's is written once and filled in for every piece."""

    __slots__ = ("_halves", "_write")

    def __init__(self, write: Callable[[int, str], bytes]):
        """write: a choice's event with this text."""
        self._write = write
        self._halves: dict[int, tuple[bytes, bytes]] = {}

    def fill(self, choice: int, text: str) -> bytes:
        halves = self._halves.get(choice)
        if halves is None:
            before, after = self._write(choice, HERE).split(b'"%b"' % HERE.encode())
            halves = self._halves[choice] = (before, after)
        try:
            return b"%b%b%b" % (halves[0], encode_basestring(text).encode(), halves[1])  # as `dump` writes a text
        except UnicodeEncodeError:
            return halves[0] + dump(text) + halves[1]


async def send(generation: Generation, writer: Writer) -> None:
    """The whole stream. An answer that fails ends it with an error event; a client that goes away ends the answer."""
    call, stream = generation.call, generation.stream

    straight = call.straight

    def listen(choice: int, text: str) -> bool:
        """Text to the socket without waking this task, while the client keeps up with reading."""
        if straight is None or not straight.has_room:
            return False
        written = writer.text(choice, text)
        if written:
            straight.write(written)
        return True

    async with call.watched(stream.close):
        await call.begin_stream()
        opening = writer.begin()
        if opening:
            await call.write(opening)
        stream.listener = listen
        while pieces := await stream.take():
            await call.write(b"".join([writer.piece(piece) for piece in pieces if piece.event.error is None]))
    generation.record()
    try:
        generation.check()
        await call.write(writer.end())
    except ApiError as error:
        await call.write(writer.problem(error))
    except GoneError:
        return
    await call.end_stream()
