"""One row times an int4 matrix, in several ways of cutting the work."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")

from tests.ops.int4 import whole_int4
from tests.ops.test_triton import DEVICE, REFERENCE, close, pytestmark  # noqa: F401
from twostroke.ops.cuda.backend import CudaOps
from twostroke.ops.cuda.kernels.one_row_int4 import WIDEST, Int4Form, form_for
from twostroke.ops.cuda.kernels.quantized import Int4
from twostroke.ops.interface import Gate, Norm
from twostroke.ops.reference.backend import ReferenceMatrix

LIMIT = 2e-4  # x keeps sixteen bits; codes and least values nearly cancel each other
CASES = [  # widths that do and do not fill the segments; outputs that end amid a tile; programs that share a tile
    (1024, 48, "norm", Int4Form(4, 2, 2)), (1408, 80, "none", Int4Form(2, 4, 1)),
    (2048, 40, "norm", Int4Form(2, 4, 1)), (576, 16, "silu", Int4Form(8, 1, 2)),
    (1024, 80, "gelu_tanh", Int4Form(1, 2, 1)), (2880, 24, "silu", Int4Form(4, 1, 3)),
]  # fmt: skip


def cut_as(form: Int4Form, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twostroke.ops.cuda.kernels.one_row_int4.form_for", lambda segments, gated: form)
    monkeypatch.setattr("twostroke.ops.cuda.kernels.one_row_int4.processors", lambda device: 2)
    monkeypatch.setattr("twostroke.ops.cuda.backend.decoded_product", None)  # must not be asked


def on_card(norm: Norm) -> Norm:
    return Norm(norm.weight.to(DEVICE), norm.eps)


def made(ops: CudaOps, out: int, wide: int, bias: torch.Tensor, generator: torch.Generator) -> Int4:
    weight = ops.adopt(torch.randn(out, wide, generator=generator).to(DEVICE), bias)
    assert isinstance(weight, Int4)
    return weight


@pytest.mark.parametrize(("wide", "out", "before", "form"), CASES)
def test_one_row(wide: int, out: int, before: str, form: Int4Form, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_as(form, monkeypatch)
    ops = CudaOps(torch.float32, DEVICE, "int4")
    generator = torch.Generator().manual_seed(wide)
    x = torch.randn(1, wide if before in ("none", "norm") else 2 * wide, generator=generator)
    bias, residual = torch.randn(out, generator=generator), torch.randn(1, out, generator=generator)
    weight = made(ops, out, wide, bias, generator)
    norm = Norm(torch.rand(wide, generator=generator) + 0.5, 1e-5)
    kinds = {"none": None, "norm": norm, "silu": Gate("silu"), "gelu_tanh": Gate("gelu_tanh")}
    expected = REFERENCE.linear(
        x, ReferenceMatrix(whole_int4(weight), bias), before=kinds[before], add_to=residual.clone()
    )
    mine = on_card(norm) if before == "norm" else kinds[before]
    for _ in range(2):  # counters are set back
        found = ops.linear(x.to(DEVICE), weight, before=mine, add_to=residual.clone().to(DEVICE))
        close(found, expected, LIMIT)


@pytest.mark.parametrize(("activation", "out", "form"), [
    ("silu", 48, Int4Form(4, 1, 2)), ("gelu_tanh", 80, Int4Form(2, 2, 1)), ("silu", 40, Int4Form(1, 4, 1)),
])  # fmt: skip
def test_gated_row(activation: str, out: int, form: Int4Form, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs of outputs that do and do not fill the tiles, from either half of the matrix."""
    cut_as(form, monkeypatch)
    ops, gate = CudaOps(torch.float32, DEVICE, "int4"), Gate(activation)
    generator = torch.Generator().manual_seed(out)
    x, bias = torch.randn(1, 512, generator=generator), torch.randn(out, generator=generator)
    weight = made(ops, out, 512, bias, generator)
    norm = Norm(torch.rand(512, generator=generator) + 0.5, 1e-5)
    inner = REFERENCE.linear(x, ReferenceMatrix(whole_int4(weight), bias), before=norm)
    expected = REFERENCE.linear(inner, ReferenceMatrix(torch.eye(out // 2), None), before=gate)
    found = ops.gated(x.to(DEVICE), weight, on_card(norm), gate)
    assert found is not None
    close(found, expected, LIMIT)


def test_every_form_holds_its_matrix() -> None:
    """Powers of two, and with a gate one program for all inputs of a tile."""
    for segments in range(1, WIDEST + 1):
        plain, gated = form_for(segments, False), form_for(segments, True)
        assert gated.warps * gated.rounds >= segments
        for form in (plain, gated):
            assert form.warps & (form.warps - 1) == 0 == form.rounds & (form.rounds - 1)


def test_gates_of_wider_matrices_are_left_to_the_next_product() -> None:
    ops = CudaOps(torch.float32, DEVICE, "int4")
    weight = ops.adopt(torch.zeros(32, 128 * (WIDEST + 1), device=DEVICE))
    x = torch.zeros(1, 128 * (WIDEST + 1), device=DEVICE)
    assert ops.gated(x, weight, on_card(Norm(torch.ones(x.shape[1]), 1e-5)), Gate("silu")) is None


@pytest.mark.slow
def test_x_lies_in_registers() -> None:
    """Codes are multiplied as integers. In shared memory x would take 32 KB, and the loop would read it byte by byte;
    sums over the warps take a few KB."""
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.ops.compile_int4_row"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=plain)
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == 2
    for instruction, shared in lines:
        assert "m16n8k32" in instruction and ".s8." in instruction
        assert int(shared) <= 8192
