"""Pools that compute K and V in different ways: weights of other formats, or other devices. Torch-free.

Their blocks travel all the same. So an answer depends on which worker read its prompt, and nothing is exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from twostroke.config import Resolved
from twostroke.errors import ConfigError
from twostroke.record import replace

DEPENDS = "an answer depends on which worker reads its prompt"


def ways_of(workers: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """In words, from the settings of the workers; (): all compute in one way."""
    several = len({settings.get("device") for settings in workers}) > 1
    found = {_way(settings, several) for settings in workers}
    if len(found) < 2:
        return ()
    if any(settings.get("exact") for settings in workers):
        raise ConfigError(f"exact=True does not go with {in_words(found)}: {DEPENDS}. Leave out one of the two.")
    return tuple(sorted(found))


def _way(settings: Mapping[str, Any], with_device: bool) -> str:
    weights = f"weights {settings.get('quantize') or settings.get('dtype') or 'as in the file'}"
    return f"{weights} on {settings.get('device')}" if with_device else weights


def in_words(ways: Sequence[str] | set[str]) -> str:
    return f"pools that compute in different ways ({'; '.join(sorted(ways))})"


def without_promise(settings: Resolved, ways: Sequence[str]) -> Resolved:
    """As they are shown."""
    if not ways:
        return settings
    return replace(settings, exact=False, reasons=settings.reasons | {"exact": in_words(ways)})
