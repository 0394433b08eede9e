"""Another key's requests: their answers are known and must be the same bit for bit, and pauses of streams are timed."""

from __future__ import annotations

import asyncio
import json
import time
from itertools import pairwise

import httpx

from tests.hostile.one_end import check_end
from tests.serve.server import events

TOGETHER = 0.0005  # seconds between parts that were read at once
GREEDY = {"temperature": 0, "stream": True, "ignore_eos": True}
LETTERS = {"prompt": "x", "regex": "[a-z]{5,20}( [a-z]{3,9})+", "max_tokens": 80, "temperature": 0, "stream": True}
CHAT = {"messages": [{"role": "user", "content": "Tell me of the little engine that could."}]}
REQUESTS = (
    ("/v1/completions", GREEDY | {"prompt": "Once upon a time", "max_tokens": 300}),
    ("/v1/completions", GREEDY | {"prompt": "The quick brown fox " * 40, "max_tokens": 100}),
    ("/v1/completions", GREEDY | {"prompt": "The quick brown fox " * 150, "max_tokens": 60}),
    ("/v1/completions", GREEDY | {"prompt": "a b c", "max_tokens": 100, "n": 3}),
    ("/v1/completions", GREEDY | {"prompt": "0123", "max_tokens": 40, "logprobs": 5}),
    ("/v1/completions", GREEDY | {"prompt": "dog", "max_tokens": 80, "presence_penalty": 1.5, "min_tokens": 70}),
    ("/v1/completions", LETTERS),
    ("/v1/chat/completions", CHAT | GREEDY | {"max_tokens": 200}),
    ("/v1/chat/completions", CHAT | {"stream": True, "max_tokens": 120, "temperature": 1.0, "seed": 11, "n": 2}),
)


class Victim:
    def __init__(self, url: str, key: str):
        self.url, self.key = url, key
        self.right: list[dict] = []
        self.gaps: list[float] = []
        self.same = 0
        self.failed: list[tuple[float, float, str]] = []  # (begin, end, how) of answers that ended with an error
        self.wrong: list[str] = []

    async def run(self, until: float, streams: int = 2) -> None:
        async with self._client() as client:
            await asyncio.gather(*(self._go_on(client, until, first) for first in range(streams)))

    async def learn(self) -> None:
        """The right answers, from a server that does nothing else."""
        async with self._client() as client:
            for path, body in REQUESTS:
                end, answer, _ = await self._ask(client, path, body)
                assert end == "whole", end
                self.right.append(answer)

    def _client(self) -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {self.key}"}
        return httpx.AsyncClient(base_url=self.url, headers=headers, timeout=300.0)

    async def _go_on(self, client: httpx.AsyncClient, until: float, first: int) -> None:
        number = first
        while time.monotonic() < until:
            index = number % len(REQUESTS)
            number += 1
            began = time.monotonic()
            try:
                end, answer, gaps = await self._ask(client, *REQUESTS[index])
            except (AssertionError, httpx.HTTPError, ValueError, KeyError) as error:
                self.wrong.append(f"{time.time():.1f} request {index}: {error!r}"[:600])
                continue
            if end != "whole":
                self.failed.append((began, time.monotonic(), f"{time.time():.1f} request {index}: {end}"))
                await asyncio.sleep(0.3)
                continue
            self.gaps += gaps
            self.same += answer == self.right[index]
            if answer != self.right[index]:
                self.wrong.append(f"{time.time():.1f} request {index}: another answer: {answer}"[:600])
            await asyncio.sleep(0.1)

    async def _ask(self, client: httpx.AsyncClient, path: str, body: dict) -> tuple[str, dict, list[float]]:
        """How it ended, the answer without what differs each time, and the seconds between the parts that arrive."""
        parts: list[bytes] = []
        moments: list[float] = []
        async with client.stream("POST", path, json=body) as answer:
            async for part in answer.aiter_raw():
                moments.append(time.monotonic())
                parts.append(part)
            text = b"".join(parts).decode()
            end = check_end(path, body, answer.status_code, text)
        gaps = [gap for earlier, later in pairwise(moments) if (gap := later - earlier) > TOGETHER]
        return end, contents(text) if end == "whole" else {}, gaps


def contents(text: str) -> dict:
    """Of each choice: its text, its log probabilities, and why it ended."""
    found: dict = {}
    for line in events(text)[:-1]:
        for choice in json.loads(line)["choices"]:
            mine = found.setdefault(choice["index"], {"text": "", "scores": [], "reason": None})
            mine["text"] += choice.get("text") or choice.get("delta", {}).get("content") or ""
            mine["reason"] = choice["finish_reason"] or mine["reason"]
            mine["scores"] += (choice.get("logprobs") or {}).get("token_logprobs") or []
    return found
