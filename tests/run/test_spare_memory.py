"""Matrices of few bits have copies in floats where the KV cache can spare the memory."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

ON_CARD = torch.cuda.is_available()
if not ON_CARD:
    os.environ["TRITON_INTERPRET"] = "1"  # before the first import of Triton
pytest.importorskip("triton")

from twostroke.config import COPIES_SHARE, Config  # noqa: E402
from twostroke.ops.cuda import copies  # noqa: E402
from twostroke.ops.cuda.backend import CudaOps  # noqa: E402
from twostroke.ops.cuda.exact import ExactCudaOps  # noqa: E402
from twostroke.ops.cuda.kernels.quantized import as_float  # noqa: E402
from twostroke.ops.formats import from_float  # noqa: E402
from twostroke.run.cuda.spare_memory import keep_copies  # noqa: E402
from twostroke.weights.checkpoint import open_checkpoint  # noqa: E402
from twostroke.weights.load import load_model  # noqa: E402

pytestmark = [pytest.mark.gpu] if ON_CARD else []
DEVICE = "cuda" if ON_CARD else "cpu"


def model_of(folder: Path, quantize: str | None, ops_type: type[CudaOps] = CudaOps):
    return load_model(open_checkpoint(folder), ops_type(torch.float32, DEVICE, quantize), 128)


@pytest.mark.parametrize("quantize", ["int4", "int8", "fp8"])
def test_many_rows_are_multiplied_by_a_copy(quantize: str, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(1)
    ops = CudaOps(torch.float32, DEVICE, quantize)
    weight = ops.pack([from_float(generator.standard_normal((96, 256), np.float32))])
    x = torch.from_numpy(generator.standard_normal((copies.FEW + 1, 256), np.float32)).to(DEVICE)
    few, before = ops.linear(x[: copies.FEW], weight), ops.linear(x, weight)
    assert ops.copies.bytes([weight]) == 4 * 96 * 256
    ops.copies.keep([weight])
    monkeypatch.setattr(copies, "as_float", lambda *_: pytest.fail("the copy is there"))
    after = ops.linear(x, weight)
    torch.testing.assert_close(after, x @ as_float(weight, torch.float32).t(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(after, before, rtol=2e-2, atol=2e-2)
    assert torch.equal(ops.linear(x[: copies.FEW], weight), few)  # few rows read the codes as before


def test_memory_that_is_needed_is_not_spent(llama_folder: Path) -> None:
    model = model_of(llama_folder, "int4")
    size = keep_copies(model, Config(), 1 << 40)
    assert keep_copies(model_of(llama_folder, "int4"), Config(), int(size / COPIES_SHARE) + 8) == size
    for given, free in ((Config(), int(size / COPIES_SHARE) - 8), (Config(kv_blocks=9), 1 << 40)):
        assert keep_copies(model_of(llama_folder, "int4"), given, free) == 0
    assert keep_copies(model_of(llama_folder, "int4"), Config(kv_memory=1 << 20), 1 << 40) == 0


def test_floats_and_exact_products_need_none(llama_folder: Path) -> None:
    assert keep_copies(model_of(llama_folder, None), Config(), 1 << 40) == 0
    assert keep_copies(model_of(llama_folder, "int4", ExactCudaOps), Config(), 1 << 40) == 0
