"""Reading a checkpoint's description without trusting it. Torch-free.

Everything in config.json or GGUF metadata may be missing, of another type or absurd. Each getter returns a value within
bounds or raises a ModelError that names the key; the bounds keep a hostile file from causing a giant allocation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from twostroke.errors import ModelError

MAX_LAYERS = 1024
MAX_WIDTH = 1 << 20  # of hidden and feed-forward
MAX_HEADS = 4096
MAX_HEAD_DIM = 1024
MAX_VOCAB = 1 << 22
MAX_POSITIONS = 1 << 24


class Fields:
    """A mapping with typed, bounded getters. A key whose value is null counts as missing."""

    def __init__(self, values: Mapping[str, Any], where: str, prefix: str = ""):
        self.values, self.where, self.prefix = values, where, prefix

    def get(self, key: str) -> Any:
        return self.values.get(self.prefix + key)

    def has(self, key: str) -> bool:
        return self.get(key) is not None

    def error(self, key: str, reason: str) -> ModelError:
        return ModelError(f"{self.where}: {self.prefix}{key} {reason}.")

    def integer(self, key: str, default: int | None = None, *, least: int = 1, most: int = MAX_WIDTH) -> int:
        value = self.get(key)
        if value is None:
            if default is None:
                raise self.error(key, "is missing")
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(key, f"must be a whole number, not {value!r:.80}")
        if not least <= value <= most:
            raise self.error(key, f"must lie between {least} and {most}, not {value}")
        return value

    def even(self, key: str, default: int, *, most: int) -> int:
        value = self.integer(key, default, least=2, most=most)
        if value < 2 or value % 2:  # the default is derived from other keys
            raise self.error(key, f"must be even, not {value}")
        return value

    def number(self, key: str, default: float | None = None, *, most: float = 1e12) -> float:
        """A finite number above 0."""
        value = self.get(key)
        if value is None:
            if default is None:
                raise self.error(key, "is missing")
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(key, f"must be a number, not {value!r:.80}")
        if not (math.isfinite(value) and 0 < value <= most):
            raise self.error(key, f"must be above 0 and at most {most:g}, not {value!r}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, f"must be true or false, not {value!r:.80}")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self.get(key)
        if value is None:
            if default is None:
                raise self.error(key, "is missing")
            return default
        if not isinstance(value, str):
            raise self.error(key, f"must be a text, not {value!r:.80}")
        return value

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """`count` finite numbers above 0."""
        return positive_numbers(self.get(key), count, f"{self.where}: {self.prefix}{key}")

    def section(self, key: str) -> Fields:
        value = self.get(key)
        if not isinstance(value, Mapping):
            raise self.error(key, "must be an object" if self.has(key) else "is missing")
        return Fields(value, f"{self.where}: {self.prefix}{key}")

    def only(self, key: str, *supported: Any) -> None:
        """Refuse a setting whose value changes the model in a way that is not implemented. Missing is fine."""
        value = self.get(key)
        plain = isinstance(value, str | int | float | list | dict)  # an array of a GGUF file equals nothing
        if value is not None and not (plain and value in supported):
            wanted = " or ".join(repr(s) for s in supported) or "absent"
            raise self.error(key, f"is {value!r:.80}, which is not supported (it must be {wanted})")


def positive_numbers(value: Any, count: int, where: str) -> tuple[float, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != count:
        raise ModelError(f"{where} must be a list of {count} numbers.")
    if any(isinstance(v, bool) or not isinstance(v, int | float) or not 0 < v < math.inf for v in value):
        raise ModelError(f"{where} must hold finite numbers above 0.")
    return tuple(float(v) for v in value)
