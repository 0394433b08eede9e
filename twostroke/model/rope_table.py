"""Cosines and sines of all positions, as a model rotates its queries and keys by them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from twostroke.model.arch import Rope
from twostroke.ops.arrays import placed
from twostroke.ops.interface import RopeTable

if TYPE_CHECKING:
    import torch

ANGLES = 1 << 20  # computed at a time


def rope_table(rope: Rope, positions: int, device: torch.device | None) -> RopeTable:
    """cos and sin of every position below `positions`.

    Angles are rounded to float32 as transformers does, in training too: at position 10,000 that is an error of about
    0.001 radians, and a model must be run with the angles it learnt. The factor is rounded to float32 too: a GGUF file
    stores it so, and both files of a model must give the same table.
    """
    frequencies, factor = np.asarray(rope.frequencies, np.float32), float(np.float32(rope.factor))
    cos, sin = (np.empty((positions, len(frequencies)), np.float32) for _ in "cs")
    step = max(1, ANGLES // len(frequencies))

    def fill(first: int) -> None:
        places = np.arange(first, min(first + step, positions), dtype=np.float32)
        angles = np.outer(places, frequencies).astype(np.float64)
        for table, function in ((cos, np.cos), (sin, np.sin)):
            np.multiply(function(angles), factor, out=table[first : first + step], casting="same_kind")

    with ThreadPoolExecutor() as pool:
        list(pool.map(fill, range(0, positions, step)))
    return RopeTable(placed(cos, device), placed(sin, device))
