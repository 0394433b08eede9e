"""Answers as server-sent events, or whole. Text that waits at one moment goes out in one write."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from functools import partial
from json.encoder import encode_basestring
from typing import Any, Protocol

from twostroke.engine.answer import StreamEvent
from twostroke.remote.stream import Piece
from twostroke.serve.off_loop import INLINE
from twostroke.serve.service import Generation
from twostroke.serve.transport.errors import ApiError
from twostroke.serve.transport.http import GoneError, dump, dump_large
from twostroke.types import TokenLogprobs

DONE = b"data: [DONE]\n\n"
PLACEHOLDER = secrets.token_hex(16)
SCORE = 50  # characters that one log probability takes as JSON


class Writer(Protocol):
    """How one API writes an answer."""

    whole_events: bool = False  # it needs the tokens of each piece, not only its text

    def whole(self) -> dict[str, Any]:
        """The document of an answer that is not streamed."""
        ...

    def begin(self) -> bytes:
        """Events before the first token."""
        return b""

    def piece(self, choice: int, event: StreamEvent) -> bytes: ...

    def pieces(self, several: Iterable[Piece]) -> bytes:
        return b"".join([self.piece(choice, event) for choice, event in several])

    def size(self, several: Iterable[Piece]) -> int:
        """About how many characters these pieces have as JSON."""
        return sum(len(event.text) + scores_size(event.logprobs or ()) for _, event in several)

    def end(self) -> bytes: ...

    def problem(self, error: ApiError) -> bytes:
        """The end of a stream that failed."""
        ...


def scores_size(scores: Iterable[TokenLogprobs | None]) -> int:
    return SCORE * sum(1 + len(one.top) for one in scores if one is not None)


def data(document: Any) -> bytes:
    return b"data: " + dump(document) + b"\n\n"


def typed_event(kind: str, /, **fields: Any) -> bytes:
    """An event with a name, which its document repeats as `type`."""
    return b"event: " + kind.encode() + b"\n" + data({"type": kind, **fields})


class TextEvents:
    """Events of which only the text changes. Each choice's event is encoded once; then only the text is filled in."""

    __slots__ = ("_halves", "_write")

    def __init__(self, write: Callable[[int, str], bytes]):
        """write: the event of a choice with a text."""
        self._write = write
        self._halves: dict[int, tuple[bytes, bytes]] = {}

    def fill(self, choice: int, text: str) -> bytes:
        halves = self._halves.get(choice)
        if halves is None:
            before, after = self._write(choice, PLACEHOLDER).split(b'"%b"' % PLACEHOLDER.encode())
            halves = self._halves[choice] = (before, after)
        try:
            return b"%b%b%b" % (halves[0], encode_basestring(text).encode(), halves[1])  # as `dump` writes a text
        except UnicodeEncodeError:
            return halves[0] + dump(text) + halves[1]


async def reply(generation: Generation, writer: Writer, streamed: bool | None) -> None:
    if streamed:
        await send(generation, writer)
        return
    await generation.finish()
    size = writer.size(generation.whole_pieces())
    if size > INLINE:
        generation.exchange.weight = size

    def whole() -> bytes:
        generation.read_whole()
        return (dump if size <= INLINE else dump_large)(writer.whole())

    await generation.exchange.respond(200, await generation.off_loop(size, whole), generation.headers())


async def send(generation: Generation, writer: Writer) -> None:
    """The whole stream. If an answer fails, the stream ends with an error event; if the client disconnects, the answer
    is ended."""
    exchange, stream, write_now = generation.exchange, generation.stream, generation.exchange.write_now

    def listen(choice: int, text: str) -> bool:
        return write_now is not None and write_now(partial(writer.piece, choice, StreamEvent(text, ())))

    async with exchange.watched(stream.close):
        await exchange.begin_stream()
        await exchange.write(writer.begin())
        if not writer.whole_events:
            stream.listener = listen
        while pieces := await stream.take():
            good = [piece for piece in pieces if piece.event.error is None]
            await exchange.write(await generation.off_loop(writer.size(good), writer.pieces, good))
    generation.record()
    try:
        generation.check()
        await exchange.write(await generation.off_loop(writer.size(generation.whole_pieces()), writer.end))
    except ApiError as error:
        await exchange.write(writer.problem(error))
    except GoneError:
        return
    await exchange.end_stream()
