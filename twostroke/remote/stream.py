"""The answers to one call, piece by piece as they are written. Torch-free."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import NamedTuple, Protocol

from twostroke.engine.answer import Answer, StreamEvent
from twostroke.sampling import SamplingParams
from twostroke.types import TokenLogprobs

MAX_UNREAD = 8192  # tokens that may wait for a reader before its stream is ended
SLOW_READER = "the reader was too slow: the answer was ended"


class Piece(NamedTuple):
    """What is new of one answer of a stream: prompt number × n + sample."""

    choice: int
    event: StreamEvent


class StreamOwner(Protocol):
    """What a stream needs of the engine that fills it."""

    def wake_later(self, stream: Stream) -> None: ...

    def abort(self, request_ids: list[int]) -> None: ...

    def end(self, stream: Stream, error: str) -> None: ...


class Stream:
    """`take` gives all pieces that wait, iteration one at a time.

    A `listener` may take pieces that are only text (choice, text) while a task waits in `take`: the task then sleeps
    on. It returns False when it cannot take one, which then waits for `take` as any other.
    """

    def __init__(
        self, owner: StreamOwner, prompts: Sequence[list[int]], params: SamplingParams, arrival: float, salt: bytes
    ):
        self.owner = owner
        self.prompts = prompts
        self.params = params
        self.arrival = arrival
        self.salt = salt
        self.answers: list[Answer] = []
        self.prompt_logprobs: list[dict[int, TokenLogprobs]] = [{} for _ in prompts]
        self.open = len(prompts) * params.n  # answers without a last piece
        self.listener: Callable[[int, str], bool] | None = None
        self.taps: list[Callable[[int, StreamEvent], None]] = []  # each is called with every piece
        self.holders = 0  # other streams that are filled from this one: it goes on without its own reader
        self._closed = False
        self._pieces: deque[Piece] = deque()
        self._unread = 0
        self._given_up = False
        self._waiter: asyncio.Future[None] | None = None

    async def take(self) -> list[Piece]:
        """All pieces since the last call; waits for one if there is none. Empty when all answers have ended."""
        while not self._pieces:
            if not self.open:
                return []
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        pieces = list(self._pieces)
        self._pieces.clear()
        self._unread = 0
        return pieces

    async def __aiter__(self) -> AsyncIterator[Piece]:
        try:
            while pieces := await self.take():
                for piece in pieces:
                    yield piece
        finally:
            self.close()

    def put(self, choice: int, event: StreamEvent) -> None:
        for tap in tuple(self.taps):
            tap(choice, event)
        if self._closed and self.holders and event.finish_reason is None:
            return  # its own reader has gone
        self._pieces.append(Piece(choice, event))
        self._unread += len(event.token_ids)
        if event.finish_reason is not None:
            self.open -= 1
        self.owner.wake_later(self)
        if self._unread > MAX_UNREAD and self.open and not self._given_up:
            self._given_up = True  # what waits is kept, and is bounded; the rest is ended
            self.owner.end(self, SLOW_READER)

    def wake(self) -> None:
        """Give text that waits to the listener, and resume the task in `take` if there is anything else. Many streams
        may end in one step: text is written before the tasks deal with the ends."""
        waiter = self._waiter
        if waiter is None or waiter.done():
            return
        try:
            self._tell()
        except Exception as error:
            waiter.set_exception(error)  # for the task that waits, not for the engine
            return
        if self._pieces:
            waiter.set_result(None)

    def _tell(self) -> None:
        """The listener gets the text of each answer at once, however many steps it is from."""
        if self.listener is None:
            return
        waiting: dict[int, list[StreamEvent]] = {}
        for choice, event in self._pieces:
            waiting.setdefault(choice, []).extend(event.parts)
        for choice, events in waiting.items():
            count = next((n for n, event in enumerate(events) if not event.is_text), len(events))
            if count and not self.listener(choice, "".join(event.text for event in events[:count])):
                break
            del events[:count]
        self._pieces = deque(Piece(choice, event) for choice, events in waiting.items() for event in events)
        self._unread = sum(len(piece.event.token_ids) for piece in self._pieces)

    @property
    def ending(self) -> bool:
        """Whether the reader has gone and no other stream holds the answer."""
        return self._closed and not self.holders

    def release(self) -> None:
        """A holder needs it no more."""
        self.holders -= 1
        if self._closed:
            self.close()

    def close(self) -> None:
        """End whatever has not ended. Safe to call at any time, any number of times."""
        self._closed = True
        if self.holders:
            return
        self.owner.abort([answer.request.id for answer in self.answers if not answer.finished])
