"""Ctrl-C between steps, never within one: a step that is half done would leave the bookkeeping half done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Deferred:
    """SIGINT is remembered, and given to the handler that was there before by `deliver` and at the end."""

    def __init__(self, previous: Any):
        self._previous = previous
        self._arrived = False

    def start(self) -> None:
        signal.signal(signal.SIGINT, self._remember)

    def stop(self) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def deliver(self) -> None:
        """Raises KeyboardInterrupt if Ctrl-C arrived and the previous handler is Python's own."""
        if self._arrived:
            self._arrived = False
            self.stop()
            try:
                signal.raise_signal(signal.SIGINT)
            finally:
                self.start()

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self._arrived = True


class Unhandled:
    """Takes the place of `Deferred` where no SIGINT can arrive."""

    def deliver(self) -> None:
        return


@contextmanager
def interrupt_deferred() -> Iterator[Deferred | Unhandled]:
    """A SIGINT that arrives inside raises KeyboardInterrupt at the next `deliver`, or at the end of the block."""
    main = threading.current_thread() is threading.main_thread()  # signals are only delivered to it
    previous = signal.getsignal(signal.SIGINT) if main else None
    if previous is None or previous == signal.SIG_IGN:
        yield Unhandled()
        return
    deferred = Deferred(previous)
    deferred.start()
    try:
        yield deferred
        deferred.deliver()
    finally:
        deferred.stop()
