"""Black-box probing: the strokes of a machine that is known, read back from what it shows."""

from __future__ import annotations

import pytest

from tests.cost.fleets import parts
from twostroke.cost.probe import BATCHES, PROMPTS, Point, read_shape


def test_the_strokes_are_read_back():
    roofline, _ = parts()
    prompts = [Point(length, 0.01 + roofline.prefill_seconds(length)) for length in PROMPTS]
    batches = [Point(count, roofline.decode_seconds(count, 50)) for count in BATCHES]
    shape = read_shape(prompts, batches, 1.0, 0.1)
    real = (prompts[-1].seconds - prompts[0].seconds) / (PROMPTS[-1] - PROMPTS[0])
    assert shape.per_token == pytest.approx(real, rel=0.1)
    assert shape.alone == pytest.approx(roofline.decode_seconds(1, 50))
    assert shape.growth < 0.15 and any("almost free" in line for line in shape.sentences)
    assert any("prefix cache works" in line for line in shape.sentences)


def test_a_batch_that_is_full_is_seen():
    batches = [Point(count, 0.01 * count) for count in BATCHES]
    shape = read_shape([Point(32, 0.1), Point(1024, 0.2)], batches, 1.0, 0.98)
    assert shape.growth == pytest.approx(1.0)
    assert any("slows the others" in line for line in shape.sentences)
    assert any("no prefix cache" in line for line in shape.sentences)
