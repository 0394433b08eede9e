"""A faster start: no garbage collection while modules are imported and a vocabulary is read. Both create many objects
that stay, and the collector would visit them again and again: a sixth of a start in which torch is imported."""

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
