"""One row times a matrix of eight bits, in several ways of cutting the work."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from tests.ops.test_triton import DEVICE, REFERENCE, close, pytestmark  # noqa: F401
from twostroke.ops.cuda.backend import CudaOps
from twostroke.ops.cuda.kernels.one_row import RowForm
from twostroke.ops.cuda.kernels.quantized import as_float
from twostroke.ops.interface import Gate, Norm
from twostroke.ops.reference.backend import ReferenceMatrix

CASES = [  # widths that do and do not fill the rounds; outputs that end amid a tile; one tile or several in a program
    (1024, 48, "norm", RowForm(4, 2, 2, 2)), (1408, 80, "none", RowForm(2, 1, 1, 1)),
    (512, 16, "silu", RowForm(8, 1, 2, 1)),
    (1024, 80, "gelu_tanh", RowForm(1, 8, 1, 1)), (512, 112, "norm", RowForm(2, 8, 2, 1)),
]  # fmt: skip
KINDS = ["fp8", "int8"]


def cut_as(form: RowForm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twostroke.ops.cuda.kernels.one_row.form_for", lambda fmt, segments: form)
    monkeypatch.setattr("twostroke.ops.cuda.kernels.one_row.processors", lambda device: 2)
    monkeypatch.setattr("twostroke.ops.cuda.backend.decoded_product", None)  # must not be asked


def on_card(norm: Norm) -> Norm:
    return Norm(norm.weight.to(DEVICE), norm.eps)


@pytest.mark.parametrize("quantize", KINDS)
@pytest.mark.parametrize(("wide", "out", "before", "form"), CASES)
def test_one_row(
    quantize: str, wide: int, out: int, before: str, form: RowForm, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_as(form, monkeypatch)
    ops = CudaOps(torch.float32, DEVICE, quantize)
    generator = torch.Generator().manual_seed(wide)
    x = torch.randn(1, wide if before in ("none", "norm") else 2 * wide, generator=generator)
    bias, residual = torch.randn(out, generator=generator), torch.randn(1, out, generator=generator)
    weight = ops.adopt(torch.randn(out, wide, generator=generator).to(DEVICE), bias)
    norm = Norm(torch.rand(wide, generator=generator) + 0.5, 1e-5)
    kinds = {"none": None, "norm": norm, "silu": Gate("silu"), "gelu_tanh": Gate("gelu_tanh")}
    matrix = as_float(weight, torch.float32).cpu()
    expected = REFERENCE.linear(x, ReferenceMatrix(matrix, bias), before=kinds[before], add_to=residual.clone())
    mine = on_card(norm) if before == "norm" else kinds[before]
    close(ops.linear(x.to(DEVICE), weight, before=mine, add_to=residual.to(DEVICE)), expected, 1e-4)


@pytest.mark.parametrize("quantize", KINDS)
@pytest.mark.parametrize(
    ("activation", "out", "form"), [("silu", 48, RowForm(4, 2, 1, 2)), ("gelu_tanh", 80, RowForm(2, 4, 2, 1))]
)
def test_gated_row(quantize: str, activation: str, out: int, form: RowForm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs of outputs that do and do not fill the tiles, from either half of the matrix."""
    cut_as(form, monkeypatch)
    ops, gate = CudaOps(torch.float32, DEVICE, quantize), Gate(activation)
    generator = torch.Generator().manual_seed(out)
    x, bias = torch.randn(1, 512, generator=generator), torch.randn(out, generator=generator)
    weight = ops.adopt(torch.randn(out, 512, generator=generator).to(DEVICE), bias)
    norm = Norm(torch.rand(512, generator=generator) + 0.5, 1e-5)
    inner = REFERENCE.linear(x, ReferenceMatrix(as_float(weight, torch.float32).cpu(), bias), before=norm)
    expected = REFERENCE.linear(inner, ReferenceMatrix(torch.eye(out // 2), None), before=gate)
    found = ops.gated(x.to(DEVICE), weight, on_card(norm), gate)
    assert found is not None
    close(found, expected, 1e-4)


def test_gates_are_left_to_the_next_product_for_several_rows() -> None:
    ops = CudaOps(torch.float32, DEVICE, "int8")
    weight = ops.adopt(torch.zeros(32, 64, device=DEVICE))
    norm = on_card(Norm(torch.ones(64), 1e-5))
    assert ops.gated(torch.zeros(2, 64, device=DEVICE), weight, norm, Gate("silu")) is None
