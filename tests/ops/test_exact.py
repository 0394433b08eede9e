"""The bits of a row depend on nothing but the row: not on how many rows there are, nor on its place among them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.ops.cases import CASES, Case, alone, copied, make_step, part_of
from twostroke.ops.formats import from_float
from twostroke.ops.interface import Gate, KVFormat, Norm
from twostroke.ops.reference.backend import ReferenceOps, gated

OPS = ReferenceOps()
ODD = (1, 7, 16, 33, 64, 100, 192, 577, 1536)
SPANS = ((0, 1), (1, 2), (5, 8), (7, 40), (100, 233), (299, 300), (0, 300))


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def check_rows(operation, x: Tensor) -> None:
    """Every span of rows, as a view and as a copy of its own, gives the rows of the whole."""
    whole = operation(x.clone())
    for start, stop in SPANS:
        for part in (x[start:stop], x[start:stop].clone()):
            assert torch.equal(operation(part), whole[start:stop]), (x.shape, start, stop)


# (out, in): the matrices of real models, small and large, and odd ones
SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536), (896, 4864), (1152, 896), (2048, 640), (97, 33), (8200, 40))


@pytest.mark.parametrize("shape", SHAPES)
def test_linear(shape: tuple[int, int]) -> None:
    packed = OPS.pack([from_float(randn(*shape).numpy())], randn(shape[0], seed=1))
    check_rows(lambda x: OPS.linear(x, packed), randn(300, shape[1], seed=2))


@pytest.mark.parametrize("width", ODD)
def test_elementwise(width: int) -> None:
    """Where torch's vector code and its scalar tail differ, a row's place in memory would show."""
    norm = Norm(randn(width, seed=3), 1e-6)
    check_rows(lambda x: OPS.norm(x, norm), randn(300, width))
    check_rows(lambda x: OPS.norm(x.view(-1, 3, width)[:, :2], norm), randn(300, 3 * width))
    check_rows(lambda x: gated(x, Gate("silu")), 4 * randn(300, 2 * width))
    check_rows(lambda x: gated(x, Gate("gelu_tanh")), 4 * randn(300, 2 * width))
    check_rows(torch.exp, 4 * randn(300, width))
    check_rows(torch.tanh, 4 * randn(300, width))


@pytest.mark.parametrize("name", CASES)
def test_attention_among_neighbours(name: str) -> None:
    qkv, attention, kv, batch = make_step(CASES[name])
    together = OPS.attend(qkv, attention, copied(kv), batch, 0)
    for request in range(len(batch.contexts)):
        rows, only = alone(batch, request)
        assert torch.equal(OPS.attend(qkv[rows], attention, copied(kv), only, 0), together[rows])


@pytest.mark.parametrize("kv_format", ["float32", "float16", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("window", [0, 1, 24, 130])
def test_attention_in_chunks(kv_format: KVFormat, window: int) -> None:
    """One prefill, uneven chunks, token by token across a tile's border: the same rows."""
    case = Case(((3, 290),), heads=9, kv_heads=3, head_dim=64, window=window, format=kv_format)
    qkv, attention, kv, batch = make_step(case)
    whole = OPS.attend(qkv, attention, copied(kv), batch, 0)
    for sizes in ([120] + [1] * 20 + [150], [100, 1, 28, 130, 31], [16] * 18 + [1, 1]):
        cache, done = copied(kv), 0
        for size in sizes:
            rows, part = part_of(batch, done, size, 3)
            got = OPS.attend(qkv[rows], attention, cache, part, 0)
            assert torch.equal(got, whole[rows]), (sizes[:3], done)
            done += size
