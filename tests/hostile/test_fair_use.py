"""One key sends more than its share: it is refused with a time that is true, and another key is served at once."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import httpx
import pytest

from tests import tiny
from tests.measured import measured
from tests.serve.server import HEADERS, KEY, OTHER_KEY, PATIENT, Server

pytestmark = [pytest.mark.slow, pytest.mark.alone]  # seconds for each case

OTHER = {"authorization": f"Bearer {OTHER_KEY}"}
LONG = {"prompt": "Once upon a time", "max_tokens": 12_000, "temperature": 1.0, "ignore_eos": True}
SHORT = {"prompt": "The quick brown fox", "max_tokens": 8, "temperature": 1.0, "ignore_eos": True}
LIMITS = ("-s", "max_requests=4", "--max-queue", "12", "--drain-timeout", "0")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.tiny_llama(tmp_path_factory.mktemp("fair"), max_position_embeddings=16384)


async def in_flight(client: httpx.AsyncClient, count: int) -> None:
    while (await client.get("/health", headers=HEADERS)).json()["in_flight"] < count:
        await asyncio.sleep(0.02)


@measured
def test_a_flood_of_one_key_leaves_room_for_another(folder: Path) -> None:
    """40 long requests at once: three quarters of what runs and queues are taken, the rest is refused. The other key's
    requests are answered while the flood still runs, one after the other."""
    server = Server(folder, *LIMITS).wait()
    try:
        answers, others = asyncio.run(flooded(server, 40, 4))
    finally:
        server.stop()
    assert [other.status_code for other in others] == [200] * 4, [other.text for other in others]
    refused = [answer for answer in answers if answer.status_code == 429]
    assert len(refused) == 40 - 12, "the flood has three quarters of 4 + 12"
    for answer in refused:
        assert "has reached its share of the server" in answer.json()["error"]["message"]
        assert 1 <= int(answer.headers["retry-after"]) <= 120
    queues = [other.json()["timings"]["queue_s"] for other in others]
    assert max(queues) < 1.0, f"it waited for the flood: {queues}"


async def flooded(server: Server, flood: int, others: int) -> tuple[list[httpx.Response], list[httpx.Response]]:
    """The answers that the flood has got when the other key has all of its own."""
    async with server.async_client() as client, asyncio.timeout(PATIENT):
        asked = [asyncio.create_task(client.post("/v1/completions", json=LONG)) for _ in range(flood)]
        await in_flight(client, 12)
        found = [await client.post("/v1/completions", json=SHORT, headers=OTHER) for _ in range(others)]
        while sum(task.done() for task in asked) < flood - 12:  # three quarters of 4 + 12 are taken
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.1)
        answers = [task.result() for task in asked if task.done()]
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
    return answers, found


@measured
def test_retry_after_is_when_there_is_room(folder: Path) -> None:
    """All places are taken by long answers, and blocks are plenty: the time is that of the first answer that ends."""
    server = Server(folder, "-s", "max_requests=2", "--max-queue", "0", "--drain-timeout", "0", keys=(KEY,)).wait()
    try:
        advised, real = asyncio.run(refused_until_free(server))
    finally:
        server.stop()
    assert advised > 1 and real / 3 <= advised <= 3 * real + 1, (
        f"advised {advised} s, there was room after {real:.1f} s"
    )


async def refused_until_free(server: Server) -> tuple[int, float]:
    async with server.async_client() as client, asyncio.timeout(PATIENT):
        body = LONG | {"speculate": False}
        running = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(2)]
        await in_flight(client, 2)
        await asyncio.sleep(0.5)
        began = time.monotonic()
        refused = await client.post("/v1/completions", json=SHORT)
        assert refused.status_code == 429 and "at capacity" in refused.json()["error"]["message"]
        await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        real = time.monotonic() - began
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    return int(refused.headers["retry-after"]), real


def test_what_one_key_may_never_have_is_a_bad_request(folder: Path) -> None:
    server = Server(folder, *LIMITS).wait()
    try:
        with server.client() as client:
            refused = client.post("/v1/completions", json=SHORT | {"n": 13})
            assert refused.status_code == 400 and "one key" in refused.json()["error"]["message"]
            assert client.post("/v1/completions", json=SHORT | {"n": 12}).status_code == 200
    finally:
        server.stop()
