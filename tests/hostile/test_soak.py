"""Minutes of everything at once: one key sends ordinary and hostile requests and goes away at random moments, child
processes are killed and stopped, and another key's answers stay the same, bit for bit and in time.

SOAK_MINUTES says how long (10 without it): `SOAK_MINUTES=30 pytest -m slow tests/hostile/test_soak.py -s`."""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import time
from pathlib import Path

import pytest

from tests.hostile.fault_injection import Faults
from tests.hostile.held import Held, held
from tests.hostile.victim import Victim
from tests.serve.server import KEY, OTHER_KEY, PATIENT, ROOT, Server, wait_until

pytestmark = pytest.mark.slow

MINUTES = float(os.environ.get("SOAK_MINUTES", "10"))
WARM_UP = 30.0  # seconds of the same traffic before anything is measured
POOLED = 8  # threads of the server once each pool has all of its own: a pool starts a thread when it is needed
HOSTILE_KEY = "test-key-three"
MAX_GAP = 0.25  # seconds
SETTINGS = ("-s", f"max_gap={MAX_GAP}", "-s", "kv_blocks=4096")  # a small cache: its memory is touched in the warm-up


async def attack(server: Server, seconds: float, seed: int) -> dict:
    """The attacker's document."""
    arguments = ("-m", "tests.hostile.attacker", server.url, HOSTILE_KEY, str(seconds), str(seed))
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments, cwd=ROOT, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    assert process.returncode == 0
    return json.loads(output)


async def start_every_thread(server: Server) -> None:
    """A long request is recorded by a thread. Long texts of two keys at a time need two: one key alone gets one."""
    body = {"prompt": "so it goes " * 100_000}
    long = {"prompt": "so it goes " * 200, "max_tokens": 1}
    keys = [{"authorization": f"Bearer {key}"} for key in (OTHER_KEY, HOSTILE_KEY)]
    deadline = time.monotonic() + PATIENT
    async with server.async_client() as client:
        assert (await client.post("/v1/completions", json=long)).status_code == 200
        while held(server).threads[0] < POOLED:
            assert time.monotonic() < deadline, held(server)
            await asyncio.gather(*(client.post("/tokenize", json=body, headers=key) for key in keys))


async def soak(server: Server, seconds: float) -> tuple[dict, Victim, Faults, Held]:
    victim = Victim(server.url, OTHER_KEY)
    await victim.learn()
    warm = await attack(server, WARM_UP, 0)
    assert not warm["wrong"], warm["wrong"][:10]
    await start_every_thread(server)
    before = await asyncio.to_thread(held, server)
    faults = Faults(server, 1)
    until = time.monotonic() + seconds
    found, *_ = await asyncio.gather(attack(server, seconds, 1), victim.run(until), faults.run(until))
    return found, victim, faults, before


def test_soak(long_folder: Path) -> None:
    server = Server(long_folder, *SETTINGS, keys=(KEY, OTHER_KEY, HOSTILE_KEY)).wait()
    try:
        found, victim, faults, before = asyncio.run(soak(server, 60 * MINUTES))
        check_answers(found, victim, faults)
        check_gaps(victim)
        check_leaks(server, before)
    finally:
        code = server.stop()
    assert code == 0


def check_answers(found: dict, victim: Victim, faults: Faults) -> None:
    print(f"\nhostile key: {json.dumps(found['ends'], indent=1)}\nfaults: {dict(faults.counts)}")
    print(f"other key: {victim.same} answers the same, {len(victim.failed)} ended by a fault")
    assert not found["wrong"], found["wrong"][:10]
    assert not victim.wrong, victim.wrong[:10]
    unexplained = [how for begin, end, how in victim.failed if not faults.near(begin, end)]
    assert not unexplained, unexplained[:10]
    assert victim.same > 20 * MINUTES and faults.counts["engine killed"] >= MINUTES // 3


def check_gaps(victim: Victim) -> None:
    gaps = sorted(victim.gaps)
    p99 = gaps[int(0.99 * len(gaps))]
    print(f"gaps: {len(gaps)}, median {statistics.median(gaps):.4f} s, p99 {p99:.4f} s, longest {gaps[-1]:.2f} s")
    assert p99 < 2 * MAX_GAP


def check_leaks(server: Server, before: Held) -> None:
    server.assert_no_blocks_held()
    seen = [before]

    def returned() -> bool:
        seen.append(now := held(server))
        grown = [abs(after - then) for after, then in zip(now.megabytes, before.megabytes, strict=True)]
        time.sleep(1)
        return max(grown) < 50 and now[1:] == before[1:]

    try:
        wait_until(returned, f"held before {before}")
    finally:
        print(f"held before {before}, after {seen[-1]}")
