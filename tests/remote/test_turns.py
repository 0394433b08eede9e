"""One at a time, and keys take turns."""

from __future__ import annotations

import asyncio

import pytest

from twostroke.remote.admission import BusyError
from twostroke.remote.turns import FairTurns


def test_keys_take_turns_and_a_flood_is_refused() -> None:
    async def scenario() -> None:
        turns, order = FairTurns(8), list[str]()

        async def one(key: int, name: str) -> None:
            async with turns.turn(key, 0.75):
                order.append(name)
                await asyncio.sleep(0)

        flood = [asyncio.create_task(one(1, f"a{number}")) for number in range(7)]
        await asyncio.sleep(0)
        assert turns.inside == 6 and isinstance(flood[6].exception(), BusyError)
        other = asyncio.create_task(one(2, "b"))
        gone = asyncio.create_task(one(2, "gone"))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.gather(*flood[:6], other)
        assert order.index("b") <= 3 and "gone" not in order and len(order) == 7
        assert turns.inside == 0 and not turns._busy and not turns._of and not turns._waiting

    asyncio.run(scenario())


def test_a_turn_that_comes_to_a_caller_who_left_is_passed_on() -> None:
    async def scenario() -> None:
        turns = FairTurns(8)
        first, second = turns.turn(1, 1.0), turns.turn(2, 1.0)
        await first.__aenter__()
        waiting = asyncio.create_task(second.__aenter__())
        await asyncio.sleep(0)
        await first.__aexit__(None, None, None)  # gives the turn to the second
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        async with asyncio.timeout(5), turns.turn(3, 1.0):
            assert turns.inside == 1

    asyncio.run(scenario())


def test_no_more_than_so_many_wait() -> None:
    async def scenario() -> None:
        turns = FairTurns(2)
        async with turns.turn(1, 1.0):
            waiting = asyncio.create_task(turns.turn(2, 1.0).__aenter__())
            await asyncio.sleep(0)
            with pytest.raises(BusyError, match="at capacity"):
                await turns.turn(3, 1.0).__aenter__()
        await waiting

    asyncio.run(scenario())
