"""Ctrl-C between steps, never within one: a step that is half done would leave the bookkeeping half done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupt_deferred() -> Iterator[None]:
    """A SIGINT that arrives inside raises KeyboardInterrupt at the end of the block."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are only delivered to the main thread
        return
    arrived: list[int] = []

    def remember(number: int, frame: FrameType | None) -> None:
        arrived.append(number)

    previous = signal.getsignal(signal.SIGINT)
    if previous is None or previous == signal.SIG_IGN:
        yield
        return
    signal.signal(signal.SIGINT, remember)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if arrived:
        signal.raise_signal(signal.SIGINT)
