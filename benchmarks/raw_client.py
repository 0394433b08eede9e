"""A load generator that uses hardly any processor time, for servers on the same machine.

One asyncio process, one connection for each request, HTTP written by hand. During the load it only records when bytes
arrived; they are parsed afterwards.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from itertools import cycle
from typing import Any
from urllib.parse import urlsplit

from twostroke.bench.prompts import token_ids
from twostroke.bench.record import RequestRecord
from twostroke.cost.simulation.trace import Arrival

clock = time.perf_counter
SECONDS = 300.0  # limit for one answer


class Exchange(asyncio.Protocol):
    """One request, and the bytes of its answer with their times."""

    def __init__(self, request: bytes):
        self.request = request
        self.received: list[tuple[float, bytes]] = []
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.received.append((clock(), data))

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(clock())


class RawClient:
    def __init__(self, url: str, vocabulary: int, *more: dict[str, Any]):
        """more: fields of requests beside the usual ones; the requests take them in turns."""
        address = urlsplit(url)
        self.host, self.port = address.hostname or "127.0.0.1", address.port or 80
        self.vocabulary, self.more = vocabulary, more or ({},)

    def requests(self, arrivals: Sequence[Arrival]) -> list[bytes]:
        return [self.request(arrival, more) for arrival, more in zip(arrivals, cycle(self.more), strict=False)]

    def request(self, arrival: Arrival, more: dict[str, Any]) -> bytes:
        body = json.dumps({
            "prompt": token_ids(arrival, self.vocabulary), "max_tokens": arrival.output, "temperature": 0,
            "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
            **more,
        }).encode()  # fmt: skip
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {self.host}\r\nconnection: close\r\n"
        return f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body

    def open_loop(self, arrivals: Sequence[Arrival]) -> list[RequestRecord]:
        """Send each request when it is due."""
        requests = self.requests(arrivals)

        async def run() -> list[RequestRecord]:
            began = clock() + 0.1

            async def one(arrival: Arrival, request: bytes) -> RequestRecord:
                await asyncio.sleep(max(0.0, began + arrival.at - clock()))
                return await self._ask(arrival, request, began, arrival.at)

            return list(await asyncio.gather(*map(one, arrivals, requests)))

        return asyncio.run(run())

    def closed_loop(self, arrivals: Sequence[Arrival], at_once: int) -> list[RequestRecord]:
        """Send the next request when one has ended."""
        left = list(zip(arrivals, self.requests(arrivals), strict=True))[::-1]

        async def run() -> list[RequestRecord]:
            began, records = clock(), []

            async def one_after_the_other() -> None:
                while left:
                    arrival, request = left.pop()
                    records.append(await self._ask(arrival, request, began, clock() - began))

            await asyncio.gather(*(one_after_the_other() for _ in range(at_once)))
            return records

        return asyncio.run(run())

    async def _ask(self, arrival: Arrival, request: bytes, began: float, due: float) -> RequestRecord:
        record = RequestRecord(due, clock() - began, prompt=arrival.prompt)
        try:
            make = lambda: Exchange(request)  # noqa: E731
            _, exchange = await asyncio.get_running_loop().create_connection(make, self.host, self.port)
            async with asyncio.timeout(SECONDS):
                record.end = await exchange.ended - began
        except (OSError, TimeoutError) as error:
            record.error = f"{type(error).__name__}: {error}"
            return record
        read(exchange.received, began, record)
        return record


def read(received: Sequence[tuple[float, bytes]], began: float, record: RequestRecord) -> None:
    """Server-sent events; both servers put each into one chunk of its own."""
    status = received[0][1][:40] if received else b"nothing"
    if b" 200 " not in status:
        record.error = status.decode("latin-1")
        return
    rest = b""
    for moment, data in received:
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                take(json.loads(line[6:]), moment - began, record)
    if not record.output:
        record.error = "no usage in the stream"


def take(event: dict, moment: float, record: RequestRecord) -> None:
    if event.get("error"):
        record.error = str(event["error"])[:200]
    if any(choice.get("text") for choice in event.get("choices") or ()):
        record.pieces.append(moment)
    if event.get("usage"):
        record.output = event["usage"]["completion_tokens"]
        record.cached = (event["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
