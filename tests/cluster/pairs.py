"""Pairs of workers for tests, behind the front end that the server uses."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.fakes import FakeTransport
from tests.holding import holding
from tests.waiting import until
from twostroke.cluster.channel import derive
from twostroke.cluster.member import Member
from twostroke.cluster.pools import PlacedWorker, Pools
from twostroke.cluster.router import Role
from twostroke.cluster.sockets import SharedMemoryTransport, TcpTransport
from twostroke.cluster.transport import Transport
from twostroke.cluster.worker import Worker
from twostroke.remote import process
from twostroke.remote.async_engine import AsyncEngine
from twostroke.remote.client import BlockClient, EngineError
from twostroke.remote.messages import Direct
from twostroke.remote.nixl_agent import package
from twostroke.remote.process import ProcessEngine
from twostroke.remote.thread import ThreadEngine
from twostroke.sampling import SamplingParams

SECRET = bytes(range(32))
PEERS = derive(SECRET, "peers")
NAMES = derive(SECRET, "names")
SETTINGS: dict = {"threads": 1, "seed": 3, "max_model_len": 256, "kv_blocks": 80}
SOCKETS = [TcpTransport, SharedMemoryTransport]
GREEDY = SamplingParams(temperature=0, max_tokens=12)


class NixlTransport(TcpTransport):
    """It carries messages: the engines of a pair that has it read blocks from each other's pools."""


OVER_NIXL = Direct("127.0.0.1", True)
needs_nixl = pytest.mark.skipif(package() is None, reason="nixl is not installed")
REAL = [*SOCKETS, pytest.param(NixlTransport, marks=needs_nixl)]


class Pair(Pools):
    """One worker of each kind."""

    @property
    def prefill(self) -> Member:
        return self.members["prefill"]

    @property
    def decode(self) -> Member:
        return self.members["decode"]


Scenario = Callable[[AsyncEngine, Pair], Awaitable[None]]


def client(
    folder: Path,
    kind: str,
    settings: dict,
    key: bytes = NAMES,
    direct: Direct | None = None,
    mixed: tuple[str, ...] = (),
) -> BlockClient:
    if kind == "process":
        return ProcessEngine(folder, settings, block_key=key, direct=direct, mixed=mixed)
    return ThreadEngine(folder, settings, key, direct, mixed)


def run_pair(
    folder: Path,
    scenario: Scenario,
    transport: Callable[[], Transport] = FakeTransport,
    kind: str = "thread",
    prefill: dict | None = None,
    decode: dict | None = None,
    direct: Direct | None = None,
    mixed: tuple[str, ...] = (),
    **options: object,
) -> None:
    """prefill, decode: settings of one engine beside SETTINGS. direct: how they read each other's blocks. mixed: the
    ways in which they compute, where these differ. Afterwards every block is back in both engines."""

    async def whole() -> None:
        first, second = SETTINGS | (prefill or {}), SETTINGS | (decode or {})
        one = transport()
        other = one if isinstance(one, FakeTransport) else transport()
        reads = OVER_NIXL if isinstance(one, NixlTransport) else direct
        clients = [client(folder, kind, settings, direct=reads, mixed=mixed) for settings in (first, second)]
        workers = {
            "prefill": PlacedWorker(Role.PREFILL, Worker(clients[0], one, **options)),  # type: ignore[arg-type]
            "decode": PlacedWorker(Role.DECODE, Worker(clients[1], other, **options)),  # type: ignore[arg-type]
        }
        pair = Pair(workers, apart=True)
        engine = AsyncEngine(folder, second, client=pair, max_queue=200)
        try:
            await asyncio.wait_for(engine.start(), 600)
            await asyncio.wait_for(scenario(engine, pair), 900)
            await all_back(engine, pair)
            assert not any(one.worker.holder._copies or one.worker.holder._tickets for one in pair.members.values())
        finally:
            await engine.stop()

    asyncio.run(whole())


@contextlib.contextmanager
def held_answers(
    monkeypatch: pytest.MonkeyPatch, path: Path, tokens: int = 80, answers: int = 1
) -> Iterator[Callable[[], None]]:
    """Engine processes that are started now write so many tokens of an answer and wait, until the function is called
    that this gives: what happens meanwhile happens in the middle of the answer, however slow this process is. answers:
    none goes far before so many are written at once."""
    path.touch()
    monkeypatch.setattr(process, "BOOT", holding(path, tokens, answers) + process.BOOT)
    try:
        yield lambda: path.unlink(missing_ok=True)
    finally:
        path.unlink(missing_ok=True)


async def moved(pair: Pools) -> None:
    """An answer may be complete before the transfer that began it has been closed."""
    await until(lambda: not pair._moves, "a transfer does not end")


async def all_back(engine: AsyncEngine, pair: Pools, seconds: float = 300.0) -> None:
    """Until no request, lease or transfer is left, and every block is free or cached in both engines."""
    deadline = time.monotonic() + seconds

    def left() -> list[object]:
        held = {one.name: one.worker.held for one in pair.members.values() if one.worker.held.leases}
        return [one for one in (engine.in_flight, pair.flights, pair._moves, held) if one]

    await until(lambda: not left(), "requests, transfers or leases are left", seconds, left)
    assert not pair._by_number and not any(one.queued or one.streams for one in pair.members.values())
    for side in pair.members.values():
        empty = False
        while side.up and not empty:
            empty = await is_empty(side)
            assert time.monotonic() < deadline, f"{side.name} holds blocks after {seconds:.0f} s: {side.counts}"
    assert engine.admission.samples == engine.admission.blocks == 0


async def is_empty(side: Member) -> bool:
    """Whether its engine has no request, and every block is free or cached."""
    with contextlib.suppress(EngineError):  # it may have been killed a moment ago
        await side.worker.steps(0, 1)  # an engine reports its counts after each message
    await asyncio.sleep(0.02)
    counts = side.counts
    return counts.blocks_free + counts.blocks_cached == counts.blocks_total and not counts.running + counts.waiting


async def answer(engine: AsyncEngine, tokens: list[int], params: SamplingParams = GREEDY) -> list:
    """(tokens, finish reason, log probabilities) of each sample."""
    await engine.prepare(params)
    stream = engine.submit([tokens], params)
    async for _ in stream:
        pass
    return [(one.sample.token_ids, one.sample.finish_reason, one.sample.logprobs) for one in stream.answers]
