"""A load generator for any server with OpenAI's API. Open loop: requests are sent when they are due.

The arrival is the time at which a request was due, not the time at which it was sent. So a client that is too slow
shows as latency and as a flag, not as a lower load. Answers are streamed; a piece is an SSE event with text.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from twostroke.bench import prompts
from twostroke.bench.record import RequestRecord, Run, new_run
from twostroke.bench.workload import Load
from twostroke.cost.simulation.trace import Arrival
from twostroke.errors import InputError

OnRecord = Callable[[RequestRecord], None]
clock = time.perf_counter
DENIED = (401, 403)  # statuses for a wrong key


@dataclass(frozen=True, slots=True)
class Target:
    url: str  # with or without /v1
    model: str | None = None  # None: the first that the server lists
    key: str | None = None
    chat: bool = False  # /v1/chat/completions instead of /v1/completions
    vocabulary: int | None = None  # send token ids below it instead of words: exact prompt lengths
    timeout: float = 600.0
    likely: str | None = None  # used instead of the first where the server lists it, or lists nothing

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            whole = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # a port above 65535, or half an IPv6 address
            whole = False
        if not whole:
            raise InputError(f"--url {self.url}: write the whole address, for example http://127.0.0.1:8000.")

    @property
    def base(self) -> str:
        return self.url.rstrip("/").removesuffix("/v1")


def measure(target: Target, load: Load, machine: str = "", progress: OnRecord | None = None) -> Run:
    return asyncio.run(Client(target, load, progress).run(machine))


def refused(base: str, status: int) -> str:
    if status in DENIED:
        return f"{base}: refuses the key ({status}): give --api-key."
    return f"{base}: answers /v1/models with {status}: no OpenAI-compatible server. If it is one, name its --model."


class Client:
    def __init__(self, target: Target, load: Load, progress: OnRecord | None = None):
        import httpx

        self.target = target
        self.load = load
        self.progress = progress
        headers = {"authorization": f"Bearer {target.key}"} if target.key else {}
        self.http = httpx.AsyncClient(
            base_url=target.base,
            headers=headers,
            timeout=httpx.Timeout(target.timeout, connect=10.0),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=256),
        )
        self.trouble = (httpx.HTTPError, json.JSONDecodeError, KeyError, IndexError, TypeError)
        self.began = 0.0

    async def run(self, machine: str) -> Run:
        async with self.http:
            model = self.target.model or await self.first_model()
            run = new_run(self.load, self.target.base, model, machine)
            bodies = [self.body(number, model) for number in range(len(self.load.arrivals))]  # before the clock starts
            self.began = clock()
            if self.load.closed is not None:
                run.records = await self._closed(bodies)
            else:
                tasks = [asyncio.create_task(self._due(*pair)) for pair in zip(self.load.arrivals, bodies, strict=True)]
                run.records = list(await asyncio.gather(*tasks))
            return run

    async def first_model(self) -> str:
        import httpx

        try:
            answer = await self.http.get("/v1/models")
            answer.raise_for_status()
            names = [str(one["id"]) for one in answer.json()["data"]]
            return self.target.likely if self.target.likely in names else names[0]
        except httpx.HTTPStatusError as error:
            status = error.response.status_code
            if self.target.likely is not None and status not in DENIED:
                return self.target.likely
            raise InputError(refused(self.target.base, status)) from None
        except httpx.TransportError as error:
            raise InputError(
                f"{self.target.base}: cannot be reached ({error}): is the server up, the address right?"
            ) from None
        except (*self.trouble, UnicodeDecodeError) as error:
            if self.target.likely is not None:
                return self.target.likely
            raise InputError(
                f"{self.target.base}/v1/models does not name a model ({type(error).__name__}): give --model."
            ) from None

    def body(self, number: int, model: str) -> dict[str, Any]:
        arrival, texts = self.load.arrivals[number], self.load.texts
        text = texts[number] if texts else prompts.text(arrival)
        body: dict[str, Any] = {
            "model": model,
            "max_tokens": arrival.output,
            "temperature": self.load.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,  # of twostroke, vLLM and SGLang; other servers ignore it
        }
        if self.target.chat:
            body["messages"] = [{"role": "user", "content": text}]
        elif self.target.vocabulary is not None and not texts:
            body["prompt"] = prompts.token_ids(arrival, self.target.vocabulary)
        else:
            body["prompt"] = text
        return body

    # ---- arrivals --------------------------------------------------------------------------------------------------

    async def _due(self, arrival: Arrival, body: dict[str, Any]) -> RequestRecord:
        await asyncio.sleep(max(0.0, self.began + arrival.at - clock()))
        return await self._ask(arrival, arrival.at, body)

    async def _closed(self, bodies: list[dict[str, Any]]) -> list[RequestRecord]:
        assert self.load.closed is not None
        left = list(zip(self.load.arrivals, bodies, strict=True))[::-1]
        records: list[RequestRecord] = []

        async def one_after_the_other() -> None:
            while left:
                arrival, body = left.pop()
                records.append(await self._ask(arrival, clock() - self.began, body))

        await asyncio.gather(*(one_after_the_other() for _ in range(self.load.closed)))
        return sorted(records, key=lambda record: record.arrival)

    # ---- one request -----------------------------------------------------------------------------------------------

    async def _ask(self, arrival: Arrival, due: float, body: dict[str, Any]) -> RequestRecord:
        record = RequestRecord(due, clock() - self.began, prompt=arrival.prompt)
        record.parts = [list(part) for part in arrival.parts]
        path = "/v1/chat/completions" if self.target.chat else "/v1/completions"
        try:
            async with self.http.stream("POST", path, json=body) as answer:
                if answer.status_code != 200:
                    record.error = f"{answer.status_code}: {(await answer.aread())[:200].decode('utf-8', 'replace')}"
                else:
                    async for line in answer.aiter_lines():
                        if line.startswith("data:"):
                            self._event(record, line[5:].strip())
        except self.trouble as error:
            record.error = f"{type(error).__name__}: {error}"
        record.end = clock() - self.began
        if not record.output:
            record.output = len(record.pieces)
        if self.progress is not None:
            self.progress(record)
        return record

    def _event(self, record: RequestRecord, data: str) -> None:
        if data == "[DONE]":
            return
        event = json.loads(data)
        if event.get("error"):
            record.error = str(event["error"])[:200]
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or choice
            if delta.get("text") or delta.get("content") or delta.get("reasoning_content"):
                record.pieces.append(clock() - self.began)
        usage = event.get("usage")
        if usage:
            record.prompt = usage.get("prompt_tokens", record.prompt)
            record.output = usage.get("completion_tokens", record.output)
            record.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        if event.get("timings"):
            record.timings = event["timings"]
