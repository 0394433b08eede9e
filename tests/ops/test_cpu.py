"""The torch CPU backend against the specification, op by op."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.ops.cases import CASES, copied, make_step
from twostroke.ops.cpu import TorchCpuOps, even_width
from twostroke.ops.formats import from_float
from twostroke.ops.interface import Gate, Norm
from twostroke.ops.reference import ReferenceOps
from twostroke.ops.select import make_ops

SLOW, FAST = ReferenceOps(), TorchCpuOps()


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", CASES)
def test_attention(name: str) -> None:
    qkv, attention, kv, batch = make_step(CASES[name])
    other = copied(kv)
    expected = SLOW.attend(qkv, attention, other, batch, 0)
    got = FAST.attend(qkv, attention, kv, batch, 0)
    assert torch.isfinite(got).all()
    torch.testing.assert_close(got, expected, atol=2e-6 if kv.format == "float32" else 2e-5, rtol=1e-5)
    slots = batch.groups[0].slots
    block, offset = slots // 16, slots % 16
    for mine, theirs in ((kv.keys, other.keys), (kv.values, other.values)):
        written, wanted = mine[block, :, offset].float(), theirs[block, :, offset].float()
        assert (written - wanted).abs().max() <= (1.0 if kv.format.startswith("int") else 1e-2)


def test_requests_of_one_step_share_the_blocks_it_fills() -> None:
    """The second request reads a block that the first one writes in the same call."""
    qkv, attention, kv, batch = make_step(CASES["mixed"].__class__(((0, 32), (16, 4))))
    tables = batch.groups[0].tables
    tables[1, 0] = tables[0, 0]
    expected = SLOW.attend(qkv, attention, copied(kv), batch, 0)
    torch.testing.assert_close(FAST.attend(qkv, attention, kv, batch, 0), expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("before", [None, Norm(1 + 0.2 * randn(66), 1e-5), Gate("silu"), Gate("gelu_tanh")])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("add", [False, True])
def test_linear(before: Norm | Gate | None, bias: bool, add: bool) -> None:
    inputs = 33 if isinstance(before, Gate) else 66
    parts = [from_float(randn(n, inputs, seed=n).numpy()) for n in (50, 7, 13)]
    offset = randn(70, seed=9) if bias else None
    for rows in (1, 2, 5, 40):
        x, target = randn(rows, 66, seed=rows), randn(rows, 70, seed=rows + 1) if add else None
        results = []
        for ops in (SLOW, FAST):
            onto = None if target is None else target.clone()
            out = ops.linear(x.clone(), ops.pack(parts, offset), before=before, add_to=onto)
            assert onto is None or out is onto
            results.append(out)
        torch.testing.assert_close(results[1], results[0], atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_wide_matrices_are_cut(dtype: str) -> None:
    ops = TorchCpuOps(getattr(torch, dtype))
    table = randn(20_000, 24).to(getattr(torch, dtype)).float()
    packed = ops.pack([from_float(table.numpy())])
    x = randn(3, 24, seed=1)
    torch.testing.assert_close(ops.linear(x, packed), x @ table.T, atol=2e-5, rtol=1e-5)
    tokens = torch.tensor([0, 19_999, 8192, 5, 5, 12_345])
    assert torch.equal(ops.embed(packed, tokens, 1.0), table[tokens])
    assert torch.equal(ops.embed(packed, tokens, 1.5), table[tokens] * 1.5)
    assert ops.weight_bytes(packed) == 20_000 * 24 * (4 if dtype == "float32" else 2)


def test_norm_and_embed() -> None:
    norm, x = Norm(1 + 0.2 * randn(50), 1e-5), randn(4, 50)
    torch.testing.assert_close(FAST.norm(x, norm), SLOW.norm(x, norm), atol=1e-6, rtol=1e-5)
    stored = [from_float(randn(30, 50).numpy())]
    tokens = torch.tensor([3, 29, 0])
    assert torch.equal(FAST.embed(FAST.pack(stored), tokens, 2.0), SLOW.embed(SLOW.pack(stored), tokens, 2.0))


def test_argmax_takes_the_first_of_equals() -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0], [2.0, 2.0, 2.0], [0.0, -1.0, 7.0]])
    for ops in (SLOW, FAST):
        assert ops.argmax(logits).tolist() == [1, 0, 2]


def test_even_width() -> None:
    assert even_width(100, 8192) == 100
    assert even_width(49_152, 8192) == 8192
    for total in (8193, 20_000, 128_256):
        width = even_width(total, 8192)
        assert width <= 8192
        assert width % 64 == 0


@pytest.mark.parametrize("wrong", [("tpu", None, 1), ("cpu", "int3", 1), ("cpu", None, 0)])
def test_unknown_choices(wrong: tuple[str, str | None, int]) -> None:
    with pytest.raises(ValueError, match=r"\.$"):
        make_ops(*wrong)


def test_empty_batch() -> None:
    packed = FAST.pack([from_float(np.ones((4, 8), np.float32))])
    assert FAST.linear(torch.empty(0, 8), packed).shape == (0, 4)
