"""Waiting for what other tasks, threads and processes do.

What is waited for stays true once it is: a count that only grows, or a state that the test holds. A state that lasts a
moment may be over before it is looked at.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

PATIENT = 120.0  # seconds for what takes moments: only to end a test that hangs


async def until(
    condition: Callable[[], object],
    missed: str,
    seconds: float = PATIENT,
    seen: Callable[[], object] = lambda: "",
) -> None:
    """missed: what the test says where it never becomes true. seen: what is there instead."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{missed} ({seconds:.0f} s) {seen()}"
        await asyncio.sleep(0.002)
