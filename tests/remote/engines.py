"""Asynchronous engines for tests: in a child process or on a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from tests.waiting import until
from twostroke.remote.async_engine import AsyncEngine
from twostroke.remote.client import EngineClient
from twostroke.remote.process import Patience, ProcessEngine
from twostroke.remote.thread import ThreadEngine
from twostroke.sampling import SamplingParams

SETTINGS: dict = {"threads": 1, "seed": 3}
GREEDY = SamplingParams(temperature=0, max_tokens=12)
CLIENTS: dict[str, Callable[..., EngineClient]] = {"process": ProcessEngine, "thread": ThreadEngine}


def run(
    folder: Path,
    scenario: Callable[[AsyncEngine], Awaitable[None]],
    patience: Patience | None = None,
    client: str = "process",
    block_key: bytes | None = None,
    **settings: object,
) -> None:
    async def whole() -> None:
        given = SETTINGS | settings
        made: ProcessEngine | ThreadEngine
        if client == "process":
            made = ProcessEngine(folder, given, patience, block_key)
        else:
            made = ThreadEngine(folder, given, block_key)
        engine = AsyncEngine(folder, given, client=made)
        try:
            await asyncio.wait_for(engine.start(), 600)
            await asyncio.wait_for(scenario(engine), 600)
        finally:
            child = made.child if isinstance(made, ProcessEngine) else None
            await engine.stop()
            assert child is None or child.process.poll() is not None, "the child outlived the front end"
            if isinstance(made, ThreadEngine):
                assert made._thread is not None and not made._thread.is_alive(), "the thread outlived the front end"

    asyncio.run(whole())


async def healthy(engine: AsyncEngine) -> None:
    await until(lambda: engine.client.healthy, "the engine was not started again")


async def answer(engine: AsyncEngine, tokens: list[int], params: SamplingParams = GREEDY) -> list[int]:
    await engine.prepare(params)
    return [token async for piece in engine.submit([tokens], params) for token in piece.event.token_ids]
