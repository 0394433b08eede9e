"""The last diagnosis of this server, and when a new one is made: in a process of its own, one at a time, at low
priority, and so rarely that it takes a small share of one core."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
from collections.abc import Awaitable, Callable
from typing import Any

log = logging.getLogger(__name__)
FEWEST = 4  # answers that a verdict needs
SHORTEST = 10.0  # seconds between two verdicts
SHARE = 0.1  # of the time that may be spent on verdicts
PATIENCE = 120.0  # seconds after which one is given up


class Verdicts:
    def __init__(self, clock: Callable[[], float]):
        self.clock = clock
        self.verdict: dict[str, Any] | None = None
        self.trouble: str | None = None
        self.made = 0.0
        self.next = 0.0  # the earliest time for another one
        self.basis: Any = None  # what the newest one is made from
        self.made_from: Any = None  # the basis of the one that is shown
        self.task: asyncio.Task[None] | None = None

    @property
    def working(self) -> bool:
        return self.task is not None and not self.task.done()

    def refresh(self, answered: int, basis: Any, documents: Callable[[], Awaitable[bytes]]) -> None:
        """Starts another verdict if there are enough answers, the basis has changed, and enough time has passed."""
        if not self.working and answered >= FEWEST and basis != self.basis and self.clock() >= self.next:
            self.basis = basis
            self.task = asyncio.create_task(self._make(documents))

    def document(self, answered: int, basis: Any = None) -> dict[str, Any]:
        """basis: what a verdict would be made from now."""
        return {
            "verdict": self.verdict,
            "age_s": self.clock() - self.made if self.verdict is not None else None,
            "outdated": self.verdict is not None and basis != self.made_from,
            "working": self.working,
            "requests": answered,
            "needed": FEWEST,
            "trouble": self.trouble,
        }

    async def _make(self, documents: Callable[[], Awaitable[bytes]]) -> None:
        began, basis = self.clock(), self.basis
        try:
            async with asyncio.timeout(PATIENCE):
                answer = await ask(await documents())
            self.trouble = answer.get("trouble")
            if self.trouble is None:
                self.verdict, self.made, self.made_from = answer, self.clock(), basis
        except Exception:
            log.exception("no verdict could be reached")
            self.trouble = "The verdict failed: the server's log has the reason."
        self.next = self.clock() + max(SHORTEST, (self.clock() - began) / SHARE)


async def ask(documents: bytes) -> dict[str, Any]:
    """The verdict of a child process on these documents."""
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
