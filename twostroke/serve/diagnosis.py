"""GET /twostroke/diagnosis: the current verdict on this server, from its own recorded requests and steps.

Nobody waits for it: the answer is the last verdict, and a new one is begun in a process of its own when there is reason
to. One at a time, at low priority, and only so often that it takes a small share of one core.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
from typing import Any

from twostroke.hardware import free_memory
from twostroke.serve import admin
from twostroke.serve.http import Call
from twostroke.serve.service import Service

log = logging.getLogger(__name__)
FEWEST = 4  # answers that a verdict needs
SHORTEST = 10.0  # seconds between two verdicts
SHARE = 0.1  # of the time that verdicts may take
PATIENCE = 120.0  # seconds after which one is given up
STEPS = 1024  # that are looked at


class Verdicts:
    def __init__(self, service: Service):
        self.service = service
        self.clock = service.engine.clock
        self.verdict: dict[str, Any] | None = None
        self.trouble: str | None = None
        self.made = 0.0
        self.next = 0.0  # when another one may be begun
        self.basis: tuple[Any, ...] = ()  # what the last one was made from
        self.task: asyncio.Task[None] | None = None

    async def handle(self, service: Service, call: Call) -> None:
        ended = service.engine.ended.latest()
        answered = sum(one.output_tokens > 0 for one in ended)
        newest = ended[-1].request if ended else None
        basis = (newest, tuple(service.engine.changed.items()), service.engine.client.restarts)
        idle = self.task is None or self.task.done()
        if idle and answered >= FEWEST and basis != self.basis and self.clock() >= self.next and not service.draining:
            self.basis = basis
            self.task = asyncio.create_task(self._make())
        await call.respond(200, self.document(answered))

    def document(self, answered: int) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "age_s": self.clock() - self.made if self.verdict is not None else None,
            "working": self.task is not None and not self.task.done(),
            "requests": answered,
            "needed": FEWEST,
            "trouble": self.trouble,
        }

    async def _make(self) -> None:
        began = self.clock()
        try:
            async with asyncio.timeout(PATIENCE):
                answer = await self._ask(await self._documents())
            self.trouble = answer.get("trouble")
            if self.trouble is None:
                self.verdict, self.made = answer, self.clock()
        except Exception:
            log.exception("no verdict could be reached")
            self.trouble = "The verdict failed: the server's log has the reason."
        self.next = self.clock() + max(SHORTEST, (self.clock() - began) / SHARE)

    async def _documents(self) -> bytes:
        settings = admin.settings_document(self.service)
        block = settings["layout"]["block_bytes"] * settings["settings"]["kv_blocks"]["value"]
        on_cpu = settings["settings"]["device"]["value"] == "cpu"
        memory = free_memory() + settings["weight_bytes"] + block if on_cpu else None
        steps = await admin.steps_document(self.service, 0, STEPS)
        arrivals = admin.arrivals_document(self.service, STEPS)
        whole = {"settings": settings, "memory": memory}
        return await asyncio.to_thread(lambda: json.dumps({**whole, "steps": steps(), "arrivals": arrivals()}).encode())

    async def _ask(self, documents: bytes) -> dict[str, Any]:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "twostroke.cost.answers.verdict", stdin=pipe, stdout=pipe, stderr=pipe
        )
        try:
            answer, complaint = await process.communicate(documents)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        if process.returncode != 0:
            raise RuntimeError(complaint.decode("utf-8", "replace")[-2000:])
        found: dict[str, Any] = json.loads(answer)
        return found
