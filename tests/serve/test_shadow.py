"""Hits that are computed as well wait until the server is quiet, though not for ever."""

from __future__ import annotations

import asyncio

import pytest

from twostroke.serve import shadow
from twostroke.serve.shadow import Shadows


@pytest.mark.parametrize(("busy", "after"), [(False, shadow.QUIET), (True, shadow.LONGEST)])
def test_a_check_waits_for_a_quiet_server(monkeypatch: pytest.MonkeyPatch, busy: bool, after: float) -> None:
    monkeypatch.setattr(shadow, "LOOK", 0.0)
    now, begun = [100.0], list[float]()
    shadows = Shadows(lambda: now[0], lambda: busy)

    async def scene() -> None:
        shadows.request()
        for _ in range(2):
            shadows.add(lambda: begun.append(now[0]))  # what cannot be submitted is left out
        while now[0] < 100 + after + 1:
            for _ in range(5):
                await asyncio.sleep(0)
            now[0] += 0.5

    asyncio.run(scene())
    assert begun == [100 + after] * 2


def test_more_than_can_wait_are_left_out() -> None:
    shadows, begun = Shadows(lambda: 1000.0, lambda: True), list[int]()

    async def scene() -> None:
        for number in range(shadow.MOST + 5):
            shadows.add(lambda number=number: begun.append(number))
        assert len(shadows._waiting) == shadow.MOST and not begun

    asyncio.run(scene())
