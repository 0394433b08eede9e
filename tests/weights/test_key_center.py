"""The constant part of keys that a bias causes, which codes of keys leave out."""

from __future__ import annotations

import numpy as np

from twostroke.model.arch import Rope
from twostroke.weights.load import mean_rotated

BIAS = np.array([[40.0, -24.0, 8.0, 16.0, 5.0, 3.0]], np.float32)


def test_without_rotation_it_is_the_bias() -> None:
    assert mean_rotated(BIAS, None).tolist() == BIAS.tolist()


def test_slow_pairs_keep_their_bias_and_fast_ones_lose_it() -> None:
    center = mean_rotated(BIAS, Rope((1.0, 1e-7)))  # dimensions 0 and 2 turn fast, 1 and 3 slowly
    assert center.tolist() == [[0.0, -24.0, 0.0, 16.0, 5.0, 3.0]]
