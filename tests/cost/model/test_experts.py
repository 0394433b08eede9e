"""Costs of mixtures of experts: parameters, what a token multiplies, what a step reads."""

from __future__ import annotations

import numpy as np
import pytest

from twostroke.cost.model.devices import find_device
from twostroke.cost.model.known_models import known_arch
from twostroke.cost.model.rates import datasheet_rates
from twostroke.cost.model.roofline import Roofline, model_cost
from twostroke.kv.layout import make_layout
from twostroke.model.arch import Product


@pytest.mark.parametrize(
    ("name", "parameters", "used"),  # in billions, as published
    [
        ("olmoe-1b-7b", 6.92, 1.28),
        ("mixtral-8x7b", 46.7, 12.88),
        ("qwen3-30b-a3b", 30.5, 3.35),
        ("qwen3-235b-a22b", 235.1, 22.2),
    ],
)
def test_published_sizes(name: str, parameters: float, used: float) -> None:
    arch = known_arch(name)
    assert arch is not None
    assert arch.parameters / 1e9 == pytest.approx(parameters, rel=0.005)
    embeddings = arch.head_weights * 2
    assert (arch.row_weights + embeddings) / 1e9 == pytest.approx(used, rel=0.01)
    assert arch.linear_flops(3, 0) == 6 * arch.row_weights


def test_expected_experts() -> None:
    """Against rows that choose at random."""
    product, rng = Product("gate_up", 10, 4, matrices=64, used=8), np.random.default_rng(0)
    for rows in (1, 2, 8, 40):
        drawn = [len({e for _ in range(rows) for e in rng.choice(64, 8, replace=False)}) for _ in range(200)]
        assert product.read(rows) / 40 == pytest.approx(np.mean(drawn), rel=0.02)
    assert product.read(0) == 0
    assert product.read(1) == product.row_weights == 320
    assert Product("down", 10, 4).read(5) == 40


def test_a_step_reads_more_experts_with_more_rows() -> None:
    arch = known_arch("olmoe-1b-7b")
    assert arch is not None
    cost = model_cost(arch, "int4")
    assert cost.read_bytes(1) == pytest.approx(arch.row_weights * cost.layer_bytes / arch.layer_weights)
    assert cost.read_bytes(1) < 0.2 * cost.layer_bytes
    assert cost.read_bytes(512) == pytest.approx(cost.layer_bytes)
    line = Roofline(cost, make_layout(arch, "float16"), datasheet_rates(find_device("h200"), "int4"))
    times = [line.decode_seconds(batch, 100) for batch in (1, 2, 4, 8, 16, 64)]
    assert times == sorted(times)
    assert line.bytes([], [100], 1) < 0.5 * line.bytes([], [100] * 64, 64)
    dense = known_arch("llama-3.2-1b")
    assert dense is not None and dense.read_share(1) == dense.read_share(100) == 1.0 and dense.read_share(0) == 0.0
