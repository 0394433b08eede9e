"""Starting quickly. Importing modules and reading a vocabulary make a great many objects that stay: looking through
them for garbage again and again while they are made takes time, a sixth of a start where torch is among the modules."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """No cyclic garbage collection inside. Also a decorator; nests, and leaves a collector that was off alone."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
