"""Matrices whose codes a GPU keeps as a file has them: against the specification, interpreted or on the card."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

ON_CARD = torch.cuda.is_available()
if not ON_CARD:
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from tests import published, tiny  # noqa: E402
from tests.helpers import run_tokens  # noqa: E402
from twostroke.ops.cuda.backend import CudaOps  # noqa: E402
from twostroke.ops.cuda.kernels.four_bits import FourBits  # noqa: E402
from twostroke.ops.cuda.kernels.quantized import Fp8, Int4, Int8, as_float  # noqa: E402
from twostroke.ops.cuda.weights import FloatMatrix, lay_matrices  # noqa: E402
from twostroke.ops.formats import Stored, dequantize, layout_of, stored_bytes  # noqa: E402
from twostroke.ops.interface import Norm  # noqa: E402
from twostroke.ops.reference.backend import ReferenceOps  # noqa: E402
from twostroke.weights.checkpoint import open_checkpoint  # noqa: E402
from twostroke.weights.load import load_model  # noqa: E402

DEVICE = torch.device("cuda" if ON_CARD else "cpu")
REFERENCE = ReferenceOps()
pytestmark = [pytest.mark.gpu] if ON_CARD else []


def random_blocks(name: str, outputs: int, inputs: int, by_output: bool = False) -> Stored:
    """Any codes under sane scales."""
    rng = np.random.default_rng(inputs)
    blocks = np.zeros((outputs, inputs // (256 if name == "Q4_K" else 32)), layout_of(name))
    for field in blocks.dtype.names or ():
        part = blocks[field]
        if part.dtype.kind == "f":
            low = -0.08 if field == "m" and name == "Q4_1" else 1e-3
            part[...] = rng.uniform(low, 1e-2, (*part.shape[:1], 1) if by_output else part.shape)
        else:
            part[...] = rng.integers(0, 16 if field == "z" else 256, part.shape).astype(part.dtype)
    if name == "F8_32":
        blocks["qs"] &= np.uint8(0xF7)  # no NaN
    data = blocks.view(np.uint8).reshape(-1)
    assert data.size == stored_bytes(name, (outputs, inputs))
    return Stored(name, (outputs, inputs), data)


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.float().cpu() - expected).norm() / expected.norm())


KINDS: dict[str, tuple[str, Callable[[], list[Stored]]]] = {
    name: ("Int4", lambda name=name: [random_blocks(name, n, 256) for n in (48, 16)])  # type: ignore[misc]
    for name in ("Q4_0", "Q4_1", "Q4_Z", "Q4_K")
} | {
    "Q8_0": ("Int8", lambda: [random_blocks("Q8_0", n, 256, by_output=True) for n in (48, 16)]),
    "F8_32": ("Fp8", lambda: [random_blocks("F8_32", n, 256, by_output=True) for n in (48, 16)]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_kept(kind: str) -> None:
    name, make = KINDS[kind]
    ops = CudaOps(torch.bfloat16 if ON_CARD else torch.float32, DEVICE, keep=True)
    parts, bias = make(), torch.randn(64, generator=torch.Generator().manual_seed(1))
    weight = ops.pack(parts, bias)
    assert type(weight).__name__ == name and isinstance(weight, Int4 | Int8 | Fp8)
    exact = torch.from_numpy(np.concatenate([dequantize(part) for part in parts]))
    assert error(as_float(weight, torch.float32), exact) < (6e-3 if name == "Int4" else 1e-6)
    norm, spec = Norm(torch.rand(256) + 0.5, 1e-5), REFERENCE.pack(parts, bias)
    for rows in (1, 20):
        x = torch.randn(rows, 256, generator=torch.Generator().manual_seed(rows))
        got = ops.linear(x.to(DEVICE, ops.dtype), weight, before=Norm(norm.weight.to(DEVICE), norm.eps))
        assert error(got, REFERENCE.linear(x, spec, before=norm)) < 1e-2
    rows_of = ops.embed(weight, torch.tensor([5, 60], device=DEVICE), 1.0)
    assert error(rows_of, exact[[5, 60]]) < 6e-3


def test_rows_that_are_no_whole_slices() -> None:
    part = random_blocks("Q4_Z", 32, 96)
    weight = CudaOps(torch.float32, DEVICE, keep=True).pack([part])
    assert isinstance(weight, Int4)
    assert error(as_float(weight, torch.float32), torch.from_numpy(dequantize(part))) < 4e-3


def test_what_is_decoded() -> None:
    """Scales in groups for eight bits, inputs in another order, several formats in one, and formats without kernels."""
    ops = CudaOps(torch.float32, DEVICE, keep=True)
    plain = random_blocks("Q4_0", 32, 256)
    turned = Stored(plain.format, plain.shape, plain.data, np.random.default_rng(0).permutation(256))
    for parts in (
        [random_blocks("Q8_0", 32, 256)],
        [random_blocks("F8_32", 32, 256)],
        [random_blocks("Q5_0", 32, 256)],
        [random_blocks("Q4_0", 16, 256), random_blocks("Q8_0", 16, 256, by_output=True)],
        [turned],
    ):
        weight = ops.pack(parts)
        assert isinstance(weight, FloatMatrix)
        exact = torch.from_numpy(np.concatenate([dequantize(part) for part in parts]))
        torch.testing.assert_close(weight.weight.cpu(), exact)
    assert isinstance(CudaOps(torch.float32, DEVICE).pack([plain]), FloatMatrix)  # a precision was asked for


def test_experts() -> None:
    """They have a layout of their own for four bits, and are all of one kind."""
    ops = CudaOps(torch.float32, DEVICE, keep=True)
    assert isinstance(ops.pack_expert([random_blocks("Q4_0", 32, 256)]), FourBits)
    coded = ops.pack_expert([random_blocks("Q8_0", 32, 256, by_output=True)])
    assert isinstance(coded, Int8)
    assert lay_matrices([coded, coded], torch.float32).format != 0
    assert lay_matrices([coded, ops.pack_expert([random_blocks("Q8_0", 32, 256)])], torch.float32).format == 0


@pytest.mark.slow
@pytest.mark.skipif(ON_CARD, reason="tests/gpu has all formats")
@pytest.mark.parametrize(
    ("kind", "kept"),
    [("awq", "Int4"), ("gptq", "Int4"), ("compressed int8", "Int8"), ("compressed fp8 by output", "Fp8"),
     ("gptq, act-order", "FloatMatrix"), ("fp8 in squares", "FloatMatrix")],
)  # fmt: skip
@torch.no_grad()
def test_a_model(kind: str, kept: str, tmp_path: Path) -> None:
    shape = {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 1, "head_dim": 64}
    folder = tiny.tiny_llama(tmp_path / "model", num_attention_heads=4, **shape)
    published.rewrite(folder, kind)
    model = load_model(open_checkpoint(folder), CudaOps(torch.float32, DEVICE, keep=True), 64)
    assert type(model.layers[0].mixer.qkv).__name__ == kept
    tokens = [5, 90, 17, 200, 33]
    expected = run_tokens(load_model(open_checkpoint(folder), REFERENCE, 64), tokens)
    assert error(run_tokens(model, tokens, chunks=[4, 1]), expected) < 2e-2  # the interpreter cuts bfloat16 off
