"""What a model does in NumPy beside its backend: rotary tables, and the cap on logits."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from tests.helpers import run_tokens
from tests.model.test_parity import load, make_peer, tokens_of
from twostroke.model.arch import Rope
from twostroke.model.rope_table import rope_table
from twostroke.ops.cpu.backend import NativeCpuOps
from twostroke.ops.cpu.library import available


def test_rotary_tables_are_the_same_however_many_angles_are_made_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    rope = Rope((1.0, 0.37, 0.011), 1.25)
    whole = rope_table(rope, 1000, None)
    for position in (0, 1, 57, 999):
        for pair, frequency in enumerate(rope.frequencies):
            angle = float(np.float32(position) * np.float32(frequency))  # rounded as in training
            assert whole.cos[position, pair] == pytest.approx(1.25 * math.cos(angle), abs=1e-7)
            assert whole.sin[position, pair] == pytest.approx(1.25 * math.sin(angle), abs=1e-7)
    monkeypatch.setattr("twostroke.model.rope_table.ANGLES", 100)
    pieces = rope_table(rope, 1000, None)
    assert np.array_equal(pieces.cos, whole.cos) and np.array_equal(pieces.sin, whole.sin)


def test_an_element_of_tanh_does_not_know_its_place() -> None:
    """A cap on logits rests on it: a row must have the same bits alone and among others."""
    x = np.random.default_rng(0).standard_normal(600, np.float32) * 3
    whole = np.tanh(x)
    for start in range(40):
        for count in (1, 3, 15, 16, 17, 100, 511):
            assert np.array_equal(np.tanh(x[start : start + count]), whole[start : start + count]), (start, count)


@pytest.mark.skipif(not available(), reason="the native library is not built")
def test_capped_logits_are_those_of_torch(tmp_path: Path) -> None:
    make_peer("gemma3 scaled", tmp_path)
    tokens = tokens_of(40)
    ours, theirs = load(tmp_path, NativeCpuOps(2)), load(tmp_path)
    assert ours.arch.logit_softcap == 5.0
    got, expected = run_tokens(ours, tokens), run_tokens(theirs, tokens)
    assert 1.0 < expected.abs().max() <= 5.0
    assert (got - expected).abs().max() < 1e-4
    assert np.array_equal(run_tokens(ours, tokens, [1] * 5 + [35]), got)
