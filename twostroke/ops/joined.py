"""Arrays of NumPy or of torch put together. Torch itself is not imported."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from twostroke.ops.interface import Array


def side_by_side(parts: Sequence[Array]) -> Array:
    """The rows of several arrays joined."""
    rows, width = len(parts[0]), sum(part.shape[1] for part in parts)
    first = parts[0]
    out = np.empty((rows, width), first.dtype) if isinstance(first, np.ndarray) else first.new_empty((rows, width))
    start = 0
    for part in parts:
        out[:, start : start + part.shape[1]] = part
        start += part.shape[1]
    return out
