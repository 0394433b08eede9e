"""Experts on the GPU against the specification: under Triton's interpreter anywhere, and on the card with `-m gpu`."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from twostroke.record import replace

pytest.importorskip("triton")

from tests.ops.test_triton import DEVICE, ON_CARD, REFERENCE, close, pytestmark  # noqa: F401
from twostroke.ops.cuda.backend import SOME_OF_EXPERTS, CudaOps
from twostroke.ops.cuda.exact import ExactCudaOps
from twostroke.ops.cuda.kernels.experts import route
from twostroke.ops.cuda.kernels.grouping import FEW_PAIRS, group
from twostroke.ops.cuda.kernels.quantized import as_float
from twostroke.ops.cuda.weights import FloatMatrix
from twostroke.ops.formats import Stored, from_float
from twostroke.ops.interface import ExpertSet, Gate, Norm, Routing
from twostroke.ops.reference.backend import ReferenceMatrix
from twostroke.ops.reference.routing import route as reference_route

slow_here = pytest.mark.gpu if ON_CARD else pytest.mark.slow  # the interpreter takes long
HIDDEN, WIDTH = 72, 40  # neither fills the tiles
ROUTINGS = {
    "softmax": Routing(experts=6, chosen=2),
    "all": Routing(experts=3, chosen=3, normalised=True, factor=3.0),
    "normalised": Routing(experts=33, chosen=5, normalised=True),
    "greedy groups": Routing(experts=20, chosen=3, factor=1.5, groups=4, kept_groups=2),
    "sigmoid groups": Routing(16, 4, "sigmoid", True, 2.5, groups=4, kept_groups=2, group_best=2),
    "softplus": Routing(9, 3, "sqrt_softplus", True, 1.5),
}


def random_matrix(rng: np.random.Generator, rows: int, columns: int) -> Stored:
    return from_float(rng.standard_normal((rows, columns), np.float32) * np.float32(columns**-0.5))


def make(ops, routing: Routing, gate: str = "silu") -> tuple[Norm, ExpertSet]:  # type: ignore[no-untyped-def]
    """The same weights for every backend."""
    rng = np.random.default_rng(7)

    def place(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.float32)).to(ops.device)

    norm = Norm(place(1 + rng.standard_normal(HIDDEN) * 0.2), 1e-6)
    router = ops.pack_precisely([random_matrix(rng, routing.experts, HIDDEN)])
    gate_up, down = [], []
    for _ in range(routing.experts):
        gate_up.append(ops.pack([random_matrix(rng, WIDTH, HIDDEN) for _ in range(2)]))
        down.append(ops.pack([random_matrix(rng, HIDDEN, WIDTH)]))
    correction = place(rng.standard_normal(routing.experts) * 0.3) if routing.scores != "softmax" else None
    return norm, ExpertSet(routing, router, correction, tuple(gate_up), Gate(gate), tuple(down))  # type: ignore[arg-type]


def rows_of(count: int) -> torch.Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(count))


@pytest.mark.parametrize(
    ("name", "rows"),
    [("softmax", 1), ("sigmoid groups", 9), *(pytest.param(n, r, marks=slow_here) for n in ROUTINGS for r in (3, 19))],
)
def test_experts(name: str, rows: int) -> None:
    """A few rows read their experts one by one, many are grouped by expert."""
    ops, x = CudaOps(torch.float32, DEVICE), rows_of(rows)
    expected = REFERENCE.experts(x, *make(REFERENCE, ROUTINGS[name]))
    close(ops.experts(x.to(DEVICE), *make(ops, ROUTINGS[name])), expected, 1e-5)


@slow_here
@pytest.mark.parametrize("quantize", ["int8", "fp8"])
@pytest.mark.parametrize("rows", [2, 10])
def test_experts_of_few_bits(quantize: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The codes give what their decoded matrices give."""
    for name, value in (("HIDDEN", 192), ("WIDTH", 64)):
        monkeypatch.setitem(globals(), name, value)
    ops, x = CudaOps(torch.float32, DEVICE, quantize), rows_of(rows)
    norm, experts = make(ops, ROUTINGS["softmax"])
    plain = [[ReferenceMatrix(as_float(one, torch.float32).cpu(), None) for one in part] for part in
             (experts.gate_up, experts.down)]  # fmt: skip
    router = ReferenceMatrix(experts.router.weight.cpu(), None)
    decoded = replace(experts, router=router, gate_up=tuple(plain[0]), down=tuple(plain[1]))
    expected = REFERENCE.experts(x, Norm(norm.weight.cpu(), norm.eps), decoded)
    close(ops.experts(x.to(DEVICE), norm, experts), expected, 1e-5)


# Up to eight rows are programs of their own; then they are grouped by expert.
CASES = ((None, 8), ("fp8", 2), (None, 23), ("fp8", 9), ("int8", 64))


@pytest.mark.parametrize(
    ("quantize", "rows"), [(None, 1), (None, 9), *(pytest.param(q, r, marks=slow_here) for q, r in CASES)]
)
def test_the_expert_that_every_row_takes(quantize: str | None, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is as wide as three others, whose kernels compute it in parts; all is added to x in place."""
    for name, value in (("HIDDEN", 192), ("WIDTH", 64)):
        monkeypatch.setitem(globals(), name, value)
    ops, x, rng = CudaOps(torch.float32, DEVICE, quantize), rows_of(rows), np.random.default_rng(3)
    norm, experts = make(ops, ROUTINGS["sigmoid groups"])
    shared = (
        ops.pack([random_matrix(rng, 3 * WIDTH, HIDDEN) for _ in "gu"]),
        ops.pack([random_matrix(rng, HIDDEN, 3 * WIDTH)]),
    )
    mine = x.to(DEVICE).clone()
    total = ops.experts(mine, norm, experts)
    inner = ops.linear(mine, shared[0], before=norm)
    expected = mine + ops.linear(inner, shared[1], before=experts.gate, add_to=total)
    found = ops.add_experts(mine, norm, experts, shared)
    assert found is mine
    close(found, expected.cpu(), 1e-5 if quantize is None else 1e-4)


def test_an_expert_of_another_width_is_left_alone() -> None:
    """So are many rows, and an engine with one order of additions."""
    ops, rng = CudaOps(torch.float32, DEVICE), np.random.default_rng(3)
    made = make(ops, ROUTINGS["softmax"])
    odd = ops.pack([random_matrix(rng, 2 * 56, HIDDEN)]), ops.pack([random_matrix(rng, HIDDEN, 56)])
    assert ops.add_experts(rows_of(1).to(DEVICE), *made, odd) is None
    assert ops.add_experts(rows_of(9).to(DEVICE), *made, odd) is None
    assert ops.add_experts(rows_of(SOME_OF_EXPERTS + 1).to(DEVICE), *made, None) is None
    assert ExactCudaOps(torch.float32, DEVICE).add_experts(rows_of(1).to(DEVICE), *made, None) is None


@slow_here
@pytest.mark.parametrize("rows", [2, 10])
def test_gelu(rows: int) -> None:
    ops, x = CudaOps(torch.float32, DEVICE), rows_of(rows)
    expected = REFERENCE.experts(x, *make(REFERENCE, ROUTINGS["softmax"], "gelu_tanh"))
    close(ops.experts(x.to(DEVICE), *make(ops, ROUTINGS["softmax"], "gelu_tanh")), expected, 1e-5)


@slow_here
@pytest.mark.parametrize(
    ("name", "quantize"), [("normalised", None), ("sigmoid groups", None), ("softmax", "int8"), ("softmax", "fp8")]
)
def test_bits_do_not_depend_on_the_batch(
    name: str, quantize: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    if quantize is not None:  # codes of 8 bits need whole slices
        for side, value in (("HIDDEN", 192), ("WIDTH", 64)):
            monkeypatch.setitem(globals(), side, value)
    for dtype in (torch.float32, torch.bfloat16) if ON_CARD else (torch.float32,):
        ops, x = ExactCudaOps(dtype, DEVICE, quantize), rows_of(700 if ON_CARD else 20).to(DEVICE, dtype)
        made = make(ops, ROUTINGS[name])
        whole = ops.experts(x, *made)
        for a, b in ((0, 1), (1, 3), (3, 20), (20, 700))[: 4 if ON_CARD else 3]:
            assert torch.equal(ops.experts(x[a:b].contiguous(), *made), whole[a:b]), (dtype, a, b)
        assert isinstance(made[1].down[0], FloatMatrix) == (quantize is None)


@pytest.mark.parametrize("rows", [2, pytest.param(10, marks=slow_here)])
def test_a_table_chooses(rows: int) -> None:
    """DeepSeek V4's first layers: the experts of each token, which the scores weigh. Gates are clamped."""
    table = torch.stack([torch.randperm(9, generator=torch.Generator().manual_seed(n))[:3] for n in range(20)]).int()
    tokens, x = torch.arange(rows) * 7 % 20, rows_of(rows) * 3
    found = []
    for ops in (REFERENCE, CudaOps(torch.float32, DEVICE), ExactCudaOps(torch.float32, DEVICE)):
        norm, experts = make(ops, ROUTINGS["softplus"], "swiglu_10")
        experts = replace(experts, table=table.to(ops.device), correction=None)
        norm = Norm(norm.weight * 30, norm.eps)  # outputs of gate and up reach the clamp
        found.append(ops.experts(x.to(ops.device), norm, experts, tokens.to(ops.device)))
    for mine in found[1:]:
        close(mine, found[0], 1e-5)
    assert ops.add_experts(x[:1].to(ops.device), norm, experts, None) is None  # it is not told the tokens


@pytest.mark.parametrize("quantize", [None, "int8"])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_clamped_gate_before_a_product(quantize: str | None, rows: int) -> None:
    """Of the expert that every row takes."""
    rng = np.random.default_rng(5)
    x = torch.from_numpy(rng.standard_normal((rows, 128), np.float32) * 12)
    down, gate = random_matrix(rng, 64, 64), Gate("swiglu_10")
    for kind in (CudaOps, ExactCudaOps):
        ops = kind(torch.float32, DEVICE, quantize)
        weight = ops.pack([down])
        matrix = weight.weight if quantize is None else as_float(weight, torch.float32)
        expected = REFERENCE.linear(x, ReferenceMatrix(matrix.cpu(), None), before=gate)
        limit = 1e-5 if quantize is None else 1e-4
        if ON_CARD and quantize is not None and kind is ExactCudaOps:
            limit = 4e-3  # its weights are rounded to bfloat16
        close(ops.linear(x.to(DEVICE), weight, before=gate), expected, limit)


@pytest.mark.parametrize("pairs", [1, 33, FEW_PAIRS, FEW_PAIRS + 1])
def test_pairs_in_the_order_of_their_experts(pairs: int) -> None:
    """One program for few pairs, several for more."""
    ids = torch.randint(0, 7, (pairs, 1), generator=torch.Generator().manual_seed(pairs), dtype=torch.int32)
    found = group(ids.to(DEVICE), 9)
    assert found.counts.tolist() == torch.bincount(ids[:, 0], minlength=9).tolist()
    assert sorted(found.order.flatten().tolist()) == list(range(pairs))
    ordered = ids[found.order.flatten().cpu().long(), 0]
    assert torch.equal(ordered, ordered.sort().values)


def test_scores_of_softplus_far_from_zero() -> None:
    logits = torch.tensor([[-80.0, -30, -17, -9, 0, 9, 17, 30, 80]])
    ids, weights = route(logits.to(DEVICE), None, None, Routing(9, 9, "sqrt_softplus"))
    expected = reference_route(logits[0], None, Routing(9, 9, "sqrt_softplus"))
    assert ids[0].tolist() == [expert for expert, _ in expected]
    torch.testing.assert_close(weights[0].cpu(), torch.tensor([weight for _, weight in expected]), rtol=1e-5, atol=0)


def test_equal_scores_take_the_lowest_index() -> None:
    for routing in (Routing(12, 3), Routing(12, 3, groups=6, kept_groups=2),
                    Routing(12, 3, "sigmoid", groups=3, kept_groups=1, group_best=2)):  # fmt: skip
        ids, weights = route(torch.zeros(2, 12, device=DEVICE), None, None, routing)
        assert ids.tolist() == [[0, 1, 2]] * 2
        expected = [weight for _, weight in reference_route(torch.zeros(12), None, routing)]
        torch.testing.assert_close(weights.cpu(), torch.tensor([expected] * 2))


def test_a_router_may_have_a_bias() -> None:
    logits, bias = rows_of(4)[:, :6].contiguous(), torch.linspace(-2, 2, 6)
    ids, _ = route(logits.to(DEVICE), bias.to(DEVICE), None, ROUTINGS["softmax"])
    wanted = [[e for e, _ in reference_route(row + bias, None, ROUTINGS["softmax"])] for row in logits]
    assert ids.tolist() == wanted


@slow_here
def test_a_bad_row_stays_alone() -> None:
    ops, x = CudaOps(torch.float32, DEVICE), rows_of(12).to(DEVICE)
    made = make(ops, ROUTINGS["sigmoid groups"])
    good = ops.experts(x, *made)
    x[7] = float("nan")
    got = ops.experts(x, *made)
    assert got[7].isnan().all()
    others = [row for row in range(12) if row != 7]
    assert torch.equal(got[others], good[others])


@slow_here
def test_all_rows_may_choose_one_expert() -> None:
    """The longest group that there can be, and experts without a row."""
    ops, x = CudaOps(torch.float32, DEVICE), rows_of(40)
    routing = Routing(experts=7, chosen=1)
    pulled = torch.zeros(7, HIDDEN)
    pulled[5] = 1.0
    found = []
    for backend, device in ((REFERENCE, torch.device("cpu")), (ops, DEVICE)):
        norm, experts = make(backend, routing)
        router = backend.pack([from_float(pulled.numpy())])
        found.append(backend.experts(x.abs().to(device), norm, replace(experts, router=router)))
    close(found[1], found[0], 1e-5)
