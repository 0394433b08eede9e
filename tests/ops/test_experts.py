"""Experts: the native kernels against the reference; the same bits for any batch, threads and instruction set."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from twostroke.ops.cpu.library import available
from twostroke.ops.formats import FLOATS, Stored, from_float, layout_of, stored_bytes
from twostroke.ops.interface import ExpertSet, Gate, Norm, Routing
from twostroke.ops.reference.backend import ReferenceOps
from twostroke.ops.reference.routing import route
from twostroke.record import replace

if not available():
    pytest.skip("the native library is not built", allow_module_level=True)

from twostroke.ops.cpu.backend import NativeCpuOps, instruction_sets

HIDDEN = 256
PLAIN = Routing(experts=6, chosen=2)
ROUTINGS = {
    "softmax": PLAIN,
    "all": Routing(experts=3, chosen=3, normalised=True, factor=3.0),
    "one": Routing(experts=20, chosen=1),
    "normalised": Routing(experts=33, chosen=5, normalised=True),
    "greedy groups": Routing(experts=16, chosen=3, factor=1.5, groups=4, kept_groups=2),
    "sigmoid groups": Routing(16, 4, "sigmoid", True, 2.5, groups=4, kept_groups=2, group_best=2),
}
FORMATS = {  # and the width
    "F32": 256, "F16": 96, "BF16": 96, "Q8_0": 256, "Q4_0": 96, "Q4_1": 96, "Q5_0": 96, "Q5_1": 96, "Q4_K": 256,
    "Q5_K": 256, "Q6_K": 256, "MXFP4": 96,
}  # fmt: skip
SCALES = {  # of random codes, so that weights have about the same size
    "Q8_0": 1e-3, "Q4_0": 1e-2, "Q4_1": 1e-2, "Q5_0": 5e-3, "Q5_1": 5e-3, "Q4_K": 3e-4, "Q5_K": 2e-4, "Q6_K": 3e-5,
}  # fmt: skip


def stored(name: str, rows: int, cols: int, rng: np.random.Generator) -> Stored:
    if name == "F32":
        return from_float(rng.standard_normal((rows, cols), np.float32) * np.float32(cols**-0.5))
    data = rng.integers(0, 256, (rows, stored_bytes(name, (cols,))), np.uint8)
    if name == "BF16":
        values = rng.standard_normal((rows, cols), np.float32) * np.float32(cols**-0.5)
        data = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    elif name == "F16":
        data = (rng.standard_normal((rows, cols)) * cols**-0.5).astype(np.float16).view(np.uint8)
    elif name == "MXFP4":
        data.reshape(rows, -1, 17)[..., 0] = rng.integers(118, 124, (rows, cols // 32))
    else:
        layout = layout_of(name)
        for field in ("d", "m"):
            if field in layout.names:
                data.view(layout)[field] = SCALES[name]
    return Stored(name, (rows, cols), data.reshape(-1))


def make(
    ops: Any, routing: Routing, name: str = "F32", gate: str = "silu", bias: bool = False
) -> tuple[Norm, ExpertSet]:
    """The same weights for every backend."""
    rng = np.random.default_rng(7)
    width = FORMATS[name]

    def place(values: np.ndarray) -> Any:
        return values if ops.device is None else torch.from_numpy(values)

    def vector(size: int) -> Any:
        return place(rng.standard_normal(size).astype(np.float32) * np.float32(0.3))

    norm = Norm(place(1 + rng.standard_normal(HIDDEN).astype(np.float32) * np.float32(0.2)), 1e-6)
    router = ops.pack([stored("F32", routing.experts, HIDDEN, rng)], vector(routing.experts) if bias else None)
    gate_up, down = [], []
    for _ in range(routing.experts):
        parts = [stored(name, width, HIDDEN, rng) for _ in range(2)]
        gate_up.append(ops.pack(parts, vector(2 * width) if bias else None))
        down.append(ops.pack([stored(name, HIDDEN, width, rng)], vector(HIDDEN) if bias else None))
    correction = vector(routing.experts) if routing.scores == "sigmoid" else None
    return norm, ExpertSet(routing, router, correction, tuple(gate_up), Gate(gate), tuple(down))  # type: ignore[arg-type]


def rows_of(count: int) -> np.ndarray:
    return np.random.default_rng(count).standard_normal((count, HIDDEN)).astype(np.float32)


def close(ops: NativeCpuOps, x: np.ndarray, limit: float, *made: Any) -> None:
    reference = ReferenceOps()
    norm, experts = make(reference, *made)
    expected = reference.experts(torch.from_numpy(x), norm, experts).numpy()
    got = ops.experts(x, *make(ops, *made))
    assert np.linalg.norm(got - expected) < limit * np.linalg.norm(expected)


@pytest.mark.parametrize("name", ROUTINGS)
def test_every_routing(name: str) -> None:
    close(NativeCpuOps(2), rows_of(37), 1e-5, ROUTINGS[name])


@pytest.mark.parametrize("name", FORMATS)
def test_every_format(name: str) -> None:
    """Quantized weights are multiplied with inputs of 8 bits."""
    close(NativeCpuOps(2), rows_of(21), 1e-5 if name in FLOATS else 2e-2, PLAIN, name)


@pytest.mark.parametrize("gate", ["silu", "gelu_tanh", "swiglu_oai"])
def test_gates_and_biases(gate: str) -> None:
    close(NativeCpuOps(1), 3 * rows_of(9), 1e-5, PLAIN, "F32", gate, True)


@pytest.mark.parametrize("name", ["F32", "F16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q5_K", "Q6_K", "MXFP4"])
def test_bits_do_not_depend_on_the_batch(name: str) -> None:
    """Alone, in a batch, on every instruction set, with any number of threads."""
    x = rows_of(70)
    results = []
    for isa in instruction_sets():
        for threads in (1, 3):
            ops = NativeCpuOps(threads, isa=isa)
            norm, experts = make(ops, ROUTINGS["greedy groups"], name)
            results.append(ops.experts(x, norm, experts))
            pieces = [ops.experts(x[a:b], norm, experts) for a, b in ((0, 1), (1, 3), (3, 20), (20, 70))]
            results.append(np.concatenate(pieces))
    for other in results[1:]:
        assert np.array_equal(other, results[0])


def test_equal_scores_take_the_lowest_index() -> None:
    """All experts score the same: the first ones are chosen, and with groups those of the first groups."""
    logits = torch.zeros(12)
    for routing, expected in (
        (Routing(12, 3), [0, 1, 2]),
        (Routing(12, 3, groups=6, kept_groups=2), [0, 1, 2]),
        (Routing(12, 3, "sigmoid", groups=3, kept_groups=1, group_best=2), [0, 1, 2]),
    ):
        assert [expert for expert, _ in route(logits, None, routing)] == expected
        ops = NativeCpuOps(1)
        norm, experts = make(ops, routing)
        flat = ops.pack([from_float(np.zeros((12, HIDDEN), np.float32))])
        x = rows_of(2)
        got = ops.experts(x, norm, replace(experts, router=flat, correction=None))
        weights = dict(route(logits, None, routing))
        total = np.zeros_like(x)
        for expert, weight in weights.items():
            inner = ops.linear(x, experts.gate_up[expert], before=norm)
            total += np.float32(weight) * ops.linear(inner, experts.down[expert], before=experts.gate)
        np.testing.assert_allclose(got, total, rtol=1e-5, atol=1e-5)


def test_a_bad_row_stays_alone() -> None:
    ops, x = NativeCpuOps(2), rows_of(20)
    made = make(ops, ROUTINGS["sigmoid groups"], "Q8_0")
    good = ops.experts(x, *made)
    x[7] = np.nan
    got = ops.experts(x, *made)
    assert np.isnan(got[7]).all()
    assert np.array_equal(np.delete(got, 7, 0), np.delete(good, 7, 0))


def test_refusals() -> None:
    ops = NativeCpuOps(1)
    norm, experts = make(ops, PLAIN)
    with pytest.raises(ValueError, match="does not fit"):
        ops.experts(np.zeros((1, HIDDEN + 1), np.float32), norm, experts)
    for routing in (replace(PLAIN, chosen=7), replace(PLAIN, groups=4), replace(PLAIN, chosen=0)):
        with pytest.raises(ValueError, match="cannot choose"):
            ops.experts(rows_of(1), norm, replace(experts, routing=routing))
    with pytest.raises(ValueError, match="6 experts"):
        ops.experts(rows_of(1), norm, replace(experts, down=experts.down[:-1]))
    assert ops.experts(np.zeros((0, HIDDEN), np.float32), norm, experts).shape == (0, HIDDEN)
