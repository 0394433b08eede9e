"""What a stream gives to its listener, and what to the task that reads it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import wraps

import pytest

from twostroke.engine.answer import StreamEvent
from twostroke.remote.stream import Stream
from twostroke.sampling import SamplingParams


def in_a_loop(test: Callable[[], Coroutine[None, None, None]]) -> Callable[[], None]:
    @wraps(test)
    def run() -> None:
        asyncio.run(test())

    return run


class Owner:
    def __init__(self) -> None:
        self.later: list[Stream] = []

    def wake_later(self, stream: Stream) -> None:
        self.later.append(stream)

    def abort(self, request_ids: list[int]) -> None: ...

    def end(self, stream: Stream, error: str) -> None: ...


def made(n: int = 1) -> Stream:
    return Stream(Owner(), [[1]], SamplingParams(n=n), 0.0, b"")


def text(written: str) -> StreamEvent:
    return StreamEvent(written, (1,))


async def asleep(stream: Stream) -> asyncio.Task:
    task = asyncio.create_task(stream.take())
    await asyncio.sleep(0)
    return task


@in_a_loop
async def test_text_of_several_steps_is_told_at_once() -> None:
    stream, told = made(2), list[tuple[int, str]]()
    stream.listener = lambda choice, written: not told.append((choice, written))
    task = await asleep(stream)
    for choice, written in ((0, "a"), (1, "x"), (0, "b")):
        stream.put(choice, text(written))
    assert not told
    stream.wake()
    assert told == [(0, "ab"), (1, "x")] and not task.done()
    stream.put(0, text("c"))
    stream.put(0, StreamEvent("d", (1,), "length"))
    stream.wake()
    assert told[2:] == [(0, "cd")]  # the text of the last piece too; its end is for the task
    assert [(piece.event.text, piece.event.finish_reason) for piece in await task] == [("", "length")]


@in_a_loop
async def test_pieces_of_an_answer_keep_their_order() -> None:
    """What is more than text is for the task, and text after it too."""
    stream, told = made(2), list[tuple[int, str]]()
    stream.listener = lambda choice, written: not told.append((choice, written))
    task = await asleep(stream)
    scored = StreamEvent("b", (1,), logprobs=())
    for choice, event in ((0, text("a")), (0, scored), (0, text("c")), (1, text("x"))):
        stream.put(choice, event)
    stream.wake()
    assert told == [(0, "a"), (1, "x")]
    assert [piece.event.text for piece in await task] == ["b", "c"]


@in_a_loop
async def test_what_the_listener_cannot_take_waits_for_the_task() -> None:
    stream, told = made(2), list[tuple[int, str]]()
    stream.listener = lambda choice, written: choice == 0 and not told.append((choice, written))
    task = await asleep(stream)
    for choice, written in ((0, "a"), (1, "x"), (0, "b"), (1, "y")):
        stream.put(choice, text(written))
    stream.wake()
    assert told == [(0, "ab")]
    assert [(piece.choice, piece.event.text) for piece in await task] == [(1, "x"), (1, "y")]


@in_a_loop
async def test_a_failing_listener_fails_the_task() -> None:
    stream = made()

    def fails(choice: int, written: str) -> bool:
        raise ValueError("no")

    stream.listener = fails
    task = await asleep(stream)
    stream.put(0, text("a"))
    stream.wake()
    with pytest.raises(ValueError, match="no"):
        await task
