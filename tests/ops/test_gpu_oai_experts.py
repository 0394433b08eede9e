"""Experts with biases, gpt-oss' activation and four bits against the specification: interpreted, or on the card."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from tests.ops.test_gpu_experts import slow_here
from tests.ops.test_triton import DEVICE, ON_CARD, REFERENCE, close, pytestmark  # noqa: F401
from twostroke.ops.cuda.backend import CudaOps
from twostroke.ops.cuda.exact import ExactCudaOps
from twostroke.ops.cuda.kernels.four_bits import LARGEST, FourBits, decoded, pack_words, unpack_words
from twostroke.ops.cuda.kernels.narrow_tiles import INT4, MXFP4
from twostroke.ops.cuda.weights import FloatMatrix, lay_matrices
from twostroke.ops.formats import Stored, dequantize, from_float, stored_bytes
from twostroke.ops.interface import ExpertSet, Gate, Norm, Routing
from twostroke.ops.reference.backend import ReferenceMatrix
from twostroke.record import replace

ROUTING = Routing(experts=6, chosen=3, normalised=True)
HIDDEN, WIDTH = 160, 96  # five and three groups: neither is whole slices


def matrix(rng: np.random.Generator, name: str, rows: int, columns: int) -> Stored:
    if name == "F32":
        return from_float(rng.standard_normal((rows, columns), np.float32) * np.float32(columns**-0.5))
    data = rng.integers(0, 256, (rows, stored_bytes(name, (columns,))), np.uint8)
    if name == "MXFP4":
        data.reshape(rows, -1, 17)[..., 0] = rng.integers(121, 125, (rows, columns // 32))
    else:
        data.reshape(rows, -1, 18)[..., :2] = np.frombuffer(np.float16(0.02).tobytes(), np.uint8)
    return Stored(name, (rows, columns), data.reshape(-1))


def make(
    ops: Any, name: str = "F32", hidden: int = HIDDEN, width: int = WIDTH, bias: bool = True,
    gate: str = "swiglu_oai", routing: Routing = ROUTING,
) -> tuple[Norm, ExpertSet]:  # fmt: skip
    """The same weights for every backend. name: the format of the experts."""
    rng = np.random.default_rng(11)

    def vector(size: int, spread: float = 0.5) -> torch.Tensor:
        return torch.from_numpy(rng.standard_normal(size).astype(np.float32) * np.float32(spread)).to(ops.device)

    norm = Norm(1 + vector(hidden, 0.2), 1e-6)
    router = ops.pack_precisely([matrix(rng, "F32", routing.experts, hidden)], vector(routing.experts))
    gate_up, down = [], []
    for _ in range(routing.experts):
        both = [matrix(rng, name, width, hidden) for _ in "gu"]
        gate_up.append(ops.pack_expert(both, vector(2 * width) if bias else None))
        down.append(ops.pack_expert([matrix(rng, name, hidden, width)], vector(hidden) if bias else None))
    return norm, ExpertSet(routing, router, None, tuple(gate_up), Gate(gate), tuple(down))  # type: ignore[arg-type]


def rows_of(count: int, hidden: int = HIDDEN) -> torch.Tensor:
    return 2 * torch.randn(count, hidden, generator=torch.Generator().manual_seed(count))


def many(*cases: tuple[Any, ...]) -> list[Any]:
    """The first case everywhere, the others where time allows."""
    return [cases[0], *(pytest.param(*case, marks=slow_here) for case in cases[1:])]


@pytest.mark.parametrize(("rows", "gate"), many((1, "swiglu_oai"), (10, "swiglu_oai"), (4, "silu"), (12, "gelu_tanh")))
def test_biases(rows: int, gate: str) -> None:
    ops, x = CudaOps(torch.float32, DEVICE), rows_of(rows)
    expected = REFERENCE.experts(x, *make(REFERENCE, gate=gate))
    close(ops.experts(x.to(DEVICE), *make(ops, gate=gate)), expected, 1e-5)
    without = REFERENCE.experts(x, *make(REFERENCE, gate=gate, bias=False))
    assert (without - expected).norm() > 0.1 * expected.norm()  # else this test could not fail


@pytest.mark.parametrize(
    ("rows", "hidden", "width", "bias"),
    many((1, HIDDEN, WIDTH, True), (10, HIDDEN, WIDTH, True), (2, 128, 256, False), (9, 128, 256, False),
         (3, 1056, 64, True), (11, 1056, 64, True), (2, 64, 1088, True)),
)  # fmt: skip
def test_mxfp4(rows: int, hidden: int, width: int, bias: bool) -> None:
    """Few rows and many. More than eight slices take a second round."""
    ops, x = CudaOps(torch.float32, DEVICE, keep=True), rows_of(rows, hidden)
    norm, experts = make(ops, "MXFP4", hidden, width, bias)
    assert {type(one) for one in (*experts.gate_up, *experts.down)} == {FourBits}
    expected = REFERENCE.experts(x, *make(REFERENCE, "MXFP4", hidden, width, bias))
    close(ops.experts(x.to(DEVICE), norm, experts), expected, 1e-5)


@slow_here
@pytest.mark.parametrize("chosen", [1, 2, 11])
def test_any_number_of_chosen_experts(chosen: int) -> None:
    """The last product has a warp for each pair, and eight at most. It is added to x in place."""
    ops, x, routing = CudaOps(torch.float32, DEVICE, keep=True), rows_of(2), Routing(12, chosen)
    expected = x + REFERENCE.experts(x, *make(REFERENCE, "MXFP4", routing=routing))
    mine = x.to(DEVICE)
    assert ops.add_experts(mine, *make(ops, "MXFP4", routing=routing), None) is mine
    close(mine, expected, 1e-5)


@pytest.mark.parametrize(("name", "rows"), many(("quantize", 1), ("quantize", 10), ("Q4_0", 3), ("Q4_0", 9)))
def test_int4(name: str, rows: int) -> None:
    """Quantized, or as a file has it: the codes give what their decoded matrices give."""
    if name == "quantize":
        ops, stored = CudaOps(torch.float32, DEVICE, "int4"), "F32"
    else:
        ops, stored = CudaOps(torch.float32, DEVICE, keep=True), name
    x = rows_of(rows)
    norm, experts = make(ops, stored)
    _, exact = make(REFERENCE, stored)
    plain: list[tuple[ReferenceMatrix, ...]] = []
    for ours, theirs in ((experts.gate_up, exact.gate_up), (experts.down, exact.down)):
        found = [decoded(one, torch.float32).cpu() for one in ours]
        for one, other in zip(found, theirs, strict=True):
            assert (one - other.weight).norm() < 0.1 * other.weight.norm()
        plain.append(tuple(ReferenceMatrix(one, other.bias) for one, other in zip(found, theirs, strict=True)))
    same = replace(exact, gate_up=plain[0], down=plain[1])
    expected = REFERENCE.experts(x, Norm(norm.weight.cpu(), norm.eps), same)
    close(ops.experts(x.to(DEVICE), norm, experts), expected, 1e-4 if ON_CARD else 2e-2)  # it cuts bfloat16 off here


@slow_here
@pytest.mark.parametrize("name", ["F32", "MXFP4"])
def test_bits_do_not_depend_on_the_batch(name: str) -> None:
    """Nor do those of codes that stay codes."""
    for dtype in (torch.float32, torch.bfloat16) if ON_CARD else (torch.float32,):
        ops, x = ExactCudaOps(dtype, DEVICE, keep=True), rows_of(700 if ON_CARD else 20).to(DEVICE, dtype)
        made = make(ops, name)
        assert isinstance(made[1].down[0], FourBits if name == "MXFP4" else FloatMatrix)
        whole = ops.experts(x, *made)
        for a, b in ((0, 1), (1, 3), (3, 20), (20, 700))[: 4 if ON_CARD else 3]:
            assert torch.equal(ops.experts(x[a:b].contiguous(), *made), whole[a:b]), (dtype, a, b)


def test_an_exact_engine_keeps_mxfp4_alone() -> None:
    rng, ops = np.random.default_rng(0), ExactCudaOps(torch.float32, DEVICE, keep=True)
    assert isinstance(ops.pack_expert([matrix(rng, "Q4_0", 16, 64)]), FloatMatrix)
    assert isinstance(ops.pack([matrix(rng, "MXFP4", 16, 64)]), FloatMatrix)
    assert isinstance(ops.pack_expert([matrix(rng, "MXFP4", 16, 64)]), FourBits)
    assert isinstance(ExactCudaOps(torch.float32, DEVICE).pack_expert([matrix(rng, "MXFP4", 16, 64)]), FloatMatrix)


@pytest.mark.parametrize("fmt", [INT4, MXFP4])
@pytest.mark.parametrize("width", [32, 160, 256])
def test_words_hold_all_codes(fmt: int, width: int) -> None:
    codes = torch.randint(0, 16, (9, width), dtype=torch.uint8, generator=torch.Generator().manual_seed(width))
    words = pack_words(codes, fmt)
    assert words.shape == (9, -(-width // 128) * 16)
    assert torch.equal(unpack_words(words, fmt, width), codes)


def test_every_code_under_every_scale() -> None:
    """Also groups of the least exponent, whose numbers are below bfloat16's normal ones: they are what they were."""
    blocks = np.zeros((LARGEST + 1, 17), np.uint8)
    blocks[:, 0], blocks[:, 1:] = np.arange(LARGEST + 1), np.arange(16) | np.arange(16)[::-1] << 4
    part = Stored("MXFP4", (LARGEST + 1, 32), blocks.reshape(-1))
    weight = CudaOps(torch.float32, DEVICE, keep=True).pack_expert([part])
    assert isinstance(weight, FourBits)
    exact = torch.from_numpy(dequantize(part))
    assert torch.equal(decoded(weight, torch.float32).cpu(), exact)
    assert torch.equal(decoded(weight, torch.bfloat16).float().cpu(), exact)


def test_what_is_decoded() -> None:
    """Exponents whose numbers the kernels cannot make; then all experts of the layer are floats."""
    rng, ops = np.random.default_rng(1), CudaOps(torch.float32, DEVICE, keep=True)
    good, large = (matrix(rng, "MXFP4", 16, 64) for _ in "gl")
    large.data[17 * 5] = LARGEST + 1
    kept, wide = ops.pack_expert([good], torch.ones(16)), ops.pack_expert([large], torch.zeros(16))
    assert isinstance(kept, FourBits) and isinstance(wide, FloatMatrix)
    laid = lay_matrices([kept, wide], torch.float32)
    assert laid.format == 0 and laid.bias is not None and laid.bias.sum(dim=1).tolist() == [16, 0]
    assert lay_matrices([kept, kept], torch.float32).four_bits
    torch.testing.assert_close(laid.codes.cpu(), torch.from_numpy(dequantize(good)))
