"""One key's traffic for as long as asked, in a process of its own: ordinary requests, clients that go away, and hostile
requests of every kind. `python -m tests.hostile.attacker URL KEY SECONDS SEED` prints one JSON document: what ended how
often, and what ended in a way that it must not."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable

import httpx

from tests.hostile.one_end import CLEAN, check_end
from tests.hostile.random_requests import random_request, text
from tests.hostile.test_bodies import BODIES
from tests.hostile.test_grammar_budget import AMBIGUOUS

CLIENTS = 6
PATIENCE = 300.0  # seconds for one request
NOT_HTTP = (
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"GET /v1/models HTTP/1.1\nhost: localhost\n\n",
    b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nx-long: " + b"y" * 50_000 + b"\r\n\r\n",
)
REFUSED = (
    ("GET", "/twostroke/settings", {}, None),
    ("POST", "/twostroke/settings", {}, {"max_requests": 1}),
    ("GET", "/twostroke/arrivals", {}, None),
    ("GET", "/v1/models", {"origin": "https://evil.example"}, None),
    ("GET", "/v1/models", {"host": "rebind.evil.example"}, None),
    ("GET", "/v1/models", {"authorization": "Bearer wrong-key"}, None),
    ("POST", "/v1/completions", {}, {"prompt": "x", "priority": -5}),
    ("POST", "/v1/completions", {}, {"prompt": "x", "n": 10**9}),
    ("POST", "/v1/completions", {}, {"prompt": "x", "logit_bias": {"5": 1, "05": 1}}),
    ("POST", "/v1/completions", {"content-type": "text/plain"}, {"prompt": "x"}),
)


class Attacker:
    def __init__(self, url: str, key: str, seed: int):
        self.url, self.key = url, key
        self.rng = random.Random(seed)
        self.ends: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.kinds: list[tuple[float, Callable[[], Awaitable[str]]]] = [
            (10, self.whole),
            (6, self.gone),
            (2, self.refused),
            (1, self.not_http),
            (1, self.half_sent),
            (1, self.unread),
            (0.4, self.slow_grammar),
            (0.2, self.slow_schema),
            (0.5, self.large_body),
        ]

    async def run(self, seconds: float) -> None:
        headers = {"authorization": f"Bearer {self.key}"}
        async with httpx.AsyncClient(base_url=self.url, headers=headers, timeout=PATIENCE) as self.client:
            self.model = (await self.client.get("/v1/models")).json()["data"][0]["id"]
            first = await asyncio.gather(*(self.post(path, body) for path, body in BODIES.values()))
            self.ends.update(f"large_body {status}" for status in first)
            until = time.monotonic() + seconds
            await asyncio.gather(*(self.go_on(until) for _ in range(CLIENTS)))

    async def go_on(self, until: float) -> None:
        weights = [weight for weight, _ in self.kinds]
        while time.monotonic() < until:
            (_, kind) = self.rng.choices(self.kinds, weights)[0]
            try:
                async with asyncio.timeout(PATIENCE):
                    self.ends[f"{kind.__name__} {await kind()}"] += 1
            except (AssertionError, TimeoutError, httpx.HTTPError, OSError, ValueError, KeyError) as error:
                self.wrong.append(f"{time.time():.1f} {kind.__name__}: {error!r}"[:600])
            await asyncio.sleep(self.rng.random() * 0.4)

    # ---- ordinary requests -------------------------------------------------------------------------------------------

    def request(self) -> tuple[str, dict]:
        path, body = random_request(self.rng)
        return path, body | ({"model": self.model} if path == "/v1/messages" else {})

    async def whole(self) -> str:
        path, body = self.request()
        answer = await self.client.post(path, json=body)
        return check_end(path, body, answer.status_code, answer.text)

    async def gone(self) -> str:
        """A client that closes its connection: after some events, or after some time."""
        path, body = self.request()
        events, seconds = self.rng.choice([0, 1, 3, 20]), self.rng.choice([0.005, 0.05, 0.5])
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds), self.client.stream("POST", path, json=body) as answer:
                assert answer.status_code in CLEAN
                async for _ in answer.aiter_raw():
                    events -= 1
                    if events < 0:
                        return "in its answer"
        return "at any time"

    # ---- hostile ones ------------------------------------------------------------------------------------------------

    async def post(self, path: str, body: bytes) -> str:
        answer = await self.client.post(path, content=body, headers={"content-type": "application/json"})
        assert answer.status_code in CLEAN, answer.text[:300]
        return str(answer.status_code)

    async def large_body(self) -> str:
        return await self.post(*BODIES[self.rng.choice(list(BODIES))])

    async def refused(self) -> str:
        method, path, headers, body = self.rng.choice(REFUSED)
        answer = await self.client.request(method, path, headers=headers, json=body)
        assert 400 <= answer.status_code < 500 or answer.status_code == 503, (path, answer.status_code)
        return str(answer.status_code)

    async def slow_grammar(self) -> str:
        n = self.rng.choice([1, 8])
        body = {"prompt": "x", "grammar": AMBIGUOUS, "n": n, "max_tokens": 2000, "min_tokens": 2000, "stream": True}
        answer = await self.client.post("/v1/completions", json=body)
        return check_end("/v1/completions", body, answer.status_code, answer.text)

    async def slow_schema(self) -> str:
        schema = {"type": "integer", "multipleOf": 1_000_003 + self.rng.randrange(1000)}  # a state for each remainder
        form = {"type": "json_schema", "json_schema": {"name": "slow", "schema": schema}}
        body = {"prompt": "x", "response_format": form, "max_tokens": 4}
        answer = await self.client.post("/v1/completions", json=body)
        return check_end("/v1/completions", body, answer.status_code, answer.text)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, port = self.url.removeprefix("http://").split(":")
        return await asyncio.open_connection(host, int(port), limit=1 << 16)

    async def not_http(self) -> str:
        reader, writer = await self.connect()
        with contextlib.suppress(ConnectionError):
            writer.write(self.rng.choice(NOT_HTTP))
            answer = await reader.read(100)
            assert answer.split(b" ")[1] in (b"400", b"401", b"431"), answer
        writer.close()
        return "refused"

    def head(self, body: bytes) -> bytes:
        lines = [f"authorization: Bearer {self.key}", f"content-length: {len(body)}", "", ""]
        return ("POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n" + "\r\n".join(lines)).encode()

    async def half_sent(self) -> str:
        """A head or a body that stops in the middle."""
        _, writer = await self.connect()
        body = json.dumps({"prompt": text(self.rng), "max_tokens": 4}).encode()
        whole = self.head(body) + body
        with contextlib.suppress(ConnectionError):
            writer.write(whole[: self.rng.randrange(len(whole))])
            await asyncio.sleep(self.rng.random() * 4)
        writer.close()
        return "closed"

    async def unread(self) -> str:
        """A stream that is asked for and not read."""
        _, writer = await self.connect()
        wanted = {"prompt": text(self.rng), "max_tokens": 1000, "ignore_eos": True, "stream": True, "logprobs": 5}
        body = json.dumps(wanted).encode()
        with contextlib.suppress(ConnectionError):
            writer.write(self.head(body) + body)
            await asyncio.sleep(self.rng.random() * 4)
        writer.close()
        return "closed"


def main(url: str, key: str, seconds: str, seed: str) -> None:
    attacker = Attacker(url, key, int(seed))
    asyncio.run(attacker.run(float(seconds)))
    print(json.dumps({"ends": attacker.ends, "wrong": attacker.wrong}))


if __name__ == "__main__":
    main(*sys.argv[1:])
