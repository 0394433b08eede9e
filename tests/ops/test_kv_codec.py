"""What the cache stores: the codes, the scales, and what comes back."""

from __future__ import annotations

import pytest
import torch

from twostroke.ops.interface import KVFormat
from twostroke.ops.reference.kv_codec import decode_kv, encode_kv


@pytest.mark.parametrize(("kv_format", "codes", "step"), [("int8", 127, 1 / 254), ("int4", 7, 1 / 14)])
def test_integers_stay_within_half_a_step(kv_format: KVFormat, codes: int, step: float) -> None:
    x = torch.randn(50, 3, 16, generator=torch.Generator().manual_seed(0))
    stored, scales = encode_kv(x, kv_format)
    assert scales is not None
    largest = x.abs().amax(-1)
    assert torch.equal(scales, largest / codes)
    back = decode_kv(stored, scales, kv_format)
    assert ((back - x).abs() <= largest.unsqueeze(-1) * step * 1.0001).all()


def test_known_codes() -> None:
    x = torch.tensor([[7.0, -7.0, 0.5, 1.5, 2.5, -0.5]])
    stored, scales = encode_kv(x, "int4")
    assert scales is not None
    assert scales.tolist() == [1.0]
    assert stored.tolist() == [[15 | 1 << 4, 8 | 10 << 4, 10 | 8 << 4]]  # halves go to the even neighbour
    assert decode_kv(stored, scales, "int4").tolist() == [[7.0, -7.0, 0.0, 2.0, 2.0, 0.0]]
    stored, scales = encode_kv(torch.tensor([[127.0, -127.0, 0.5, 1.5]]), "int8")
    assert stored.tolist() == [[127, -127, 0, 2]]


@pytest.mark.parametrize("kv_format", ["int8", "int4"])
def test_zeros(kv_format: KVFormat) -> None:
    stored, scales = encode_kv(torch.zeros(2, 8), kv_format)
    assert scales is not None
    assert torch.equal(decode_kv(stored, scales, kv_format), torch.zeros(2, 8))


@pytest.mark.parametrize("kv_format", ["float32", "float16", "bfloat16"])
def test_floats_are_rounded_once(kv_format: KVFormat) -> None:
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    stored, scales = encode_kv(x, kv_format)
    assert scales is None
    assert torch.equal(decode_kv(stored, None, kv_format), x.to(getattr(torch, kv_format)).float())
