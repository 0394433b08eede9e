"""A few at a time, and keys take turns."""

from __future__ import annotations

import asyncio

import pytest

from twostroke.remote.admission import BusyError
from twostroke.remote.turns import FairTurns


def test_keys_take_turns_and_a_flood_is_refused() -> None:
    async def scenario() -> None:
        turns, order = FairTurns(most=8), list[str]()

        async def one(key: int, name: str) -> None:
            async with turns.turn(key, 0.75):
                order.append(name)
                await asyncio.sleep(0)

        flood = [asyncio.create_task(one(1, f"a{number}")) for number in range(7)]
        await asyncio.sleep(0)
        assert turns.inside.total() == 6 and isinstance(flood[6].exception(), BusyError)
        other = asyncio.create_task(one(2, "b"))
        gone = asyncio.create_task(one(2, "gone"))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.gather(*flood[:6], other)
        assert order.index("b") <= 3 and "gone" not in order and len(order) == 7
        assert not turns.inside and not turns._holding and not turns._waiting

    asyncio.run(scenario())


def test_a_turn_that_comes_to_a_caller_who_left_is_passed_on() -> None:
    async def scenario() -> None:
        turns = FairTurns(most=8)
        first, second = turns.turn(1, 1.0), turns.turn(2, 1.0)
        await first.__aenter__()
        waiting = asyncio.create_task(second.__aenter__())
        await asyncio.sleep(0)
        await first.__aexit__(None, None, None)  # gives the turn to the second
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        async with asyncio.timeout(5), turns.turn(3, 1.0):
            assert turns.inside.total() == 1

    asyncio.run(scenario())


def test_no_more_than_so_many_wait() -> None:
    async def scenario() -> None:
        turns = FairTurns(most=2)
        async with turns.turn(1, 1.0):
            waiting = asyncio.create_task(turns.turn(2, 1.0).__aenter__())
            await asyncio.sleep(0)
            with pytest.raises(BusyError, match="at capacity"):
                await turns.turn(3, 1.0).__aenter__()
        await waiting

    asyncio.run(scenario())


def test_one_key_leaves_a_place_to_others() -> None:
    async def scenario() -> None:
        turns, gate, order = FairTurns(places=2), asyncio.Event(), list[str]()

        async def one(key: int, name: str) -> None:
            async with turns.turn(key):
                order.append(name)
                await gate.wait()

        tasks = [asyncio.create_task(one(1, f"a{number}")) for number in range(5)]
        await asyncio.sleep(0)
        assert order == ["a0"]
        tasks.append(asyncio.create_task(one(2, "b")))
        await asyncio.sleep(0)
        assert order == ["a0", "b"], "another key waits for no call of the first"
        gate.set()
        await asyncio.gather(*tasks)
        assert not turns.inside and not turns._holding and not turns._waiting

    asyncio.run(scenario())


def test_without_keys_all_places_are_used() -> None:
    async def scenario() -> None:
        turns = FairTurns(places=2)
        async with turns.turn(0), turns.turn(0):
            third = asyncio.create_task(turns.turn(0).__aenter__())
            await asyncio.sleep(0)
            assert not third.done()
        await asyncio.wait_for(third, 5)

    asyncio.run(scenario())
