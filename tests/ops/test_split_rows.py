"""A few rows times a matrix with few outputs, whose inputs several programs share."""

from __future__ import annotations

import pytest
import torch

from tests.ops.test_triton import DEVICE, ON_CARD
from twostroke.ops.cuda.kernels.split_rows import BLOCK_N, LEAST, TILES, shares_of, split_product

pytestmark = [pytest.mark.gpu] if ON_CARD else []
DTYPE = torch.bfloat16 if ON_CARD else torch.float32


@pytest.mark.parametrize("rows", [9, 16, 17, 32])
@pytest.mark.parametrize("shares", [2, 4])
@pytest.mark.parametrize("add", [False, True])
def test_the_shares_of_a_tile_are_added(rows: int, shares: int, add: bool) -> None:
    generator = torch.Generator().manual_seed(rows)
    n, k = 130, 512  # the last tile is not full
    x, weight, before = (torch.randn(shape, generator=generator).to(DTYPE) for shape in ((rows, k), (n, k), (rows, n)))
    expected = x.double() @ weight.double().t() + (before.double() if add else 0)
    x, weight = x.to(DEVICE), weight.to(DEVICE)
    found = [split_product(x, weight, before.clone().to(DEVICE), add, shares) for _ in range(3)]
    assert all(torch.equal(found[0], other) for other in found)  # whichever program ends last
    limit = 1e-2 if ON_CARD else 1e-5
    assert (found[0].cpu().double() - expected).abs().max() < limit * expected.abs().max()


def test_products_are_shared_where_outputs_are_few() -> None:
    assert shares_of(4096, 4096, 16) == shares_of(4096, 14336, 16) == 4
    assert shares_of(4096, 4096, 32) == shares_of(4096, 14336, 32) == 2
    assert shares_of(2048, 8192, 16) == 8 and shares_of(2048, 8192, 32) == 4
    assert shares_of(6144, 4096, 16) == shares_of(28672, 4096, 16) == 1  # enough tiles
    assert shares_of(4096, 14336, 8) == 1  # tiles of 16 outputs
    assert shares_of(1024, 1000, 16) == 1  # inputs that cannot be divided
    for n, k in ((64, 1024), (576, 1536), (BLOCK_N * TILES, 2048)):
        assert k // shares_of(n, k, 16) >= LEAST
