"""Attention in bytes: the specification's own properties, and what must not go wrong in the native kernels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.ops.cases import Case, copied, make_step
from twostroke.ops.cpu.library import available
from twostroke.ops.interface import Attention
from twostroke.ops.reference.backend import attended, attended_bytes, rounded, spread, spread_size
from twostroke.record import replace

ONE_HEAD = Attention(1, 1, 8, scale=1.0)


def in_bytes(q: Tensor, keys: Tensor, codes: Tensor, scales: Tensor, first: int = 0) -> Tensor:
    """One head; codes (n, 8) and scales (n,) of the values, at positions from `first` on."""
    places = torch.arange(first, first + len(keys))
    values = codes * scales.unsqueeze(1)
    return attended_bytes(q.unsqueeze(0), keys.unsqueeze(1), values.unsqueeze(1), scales.unsqueeze(1), places, ONE_HEAD)


def test_one_key_gives_its_value() -> None:
    codes = torch.tensor([[127.0, -127, 3, 0, 1, -1, 64, 5]])
    out = in_bytes(torch.ones(8), torch.randn(1, 8), codes, torch.tensor([0.25]))
    torch.testing.assert_close(out, codes * 0.25)


def test_each_step_of_64_positions_has_its_own_scale() -> None:
    """Weights of 1 in one step, of e^-12 in the next: with one scale for both the second step would vanish."""
    generator = torch.Generator().manual_seed(0)
    keys = torch.zeros(128, 8)
    keys[64:, 0] = -12
    codes, scales = torch.zeros(128, 8), torch.full((128,), 0.01)
    codes[64:] = torch.randint(1, 127, (64, 8), generator=generator).float()
    q = torch.zeros(8)
    q[0] = 1
    exact = attended(q[None], keys[:, None], (codes * 0.01)[:, None], ONE_HEAD)
    torch.testing.assert_close(in_bytes(q, keys, codes, scales), exact, rtol=1e-3, atol=0)
    moved = in_bytes(q, keys, codes, scales, first=32)  # some of each share a step: the small ones are lost
    assert (moved < 0.9 * exact).all()


def test_rounding_is_to_127_parts_of_the_peak_half_to_even() -> None:
    x = torch.tensor([[254.0, 1.0, 3.0, -5.0, 0.9], [0.0, 0.0, 0.0, 0.0, 0.0]])
    assert rounded(x).tolist() == [[254.0, 0.0, 4.0, -4.0, 0.0], [0.0] * 5]


def test_spreading_keeps_products_and_shares_out_a_large_element() -> None:
    q, k = torch.randn(2, 80).double(), torch.randn(2, 80).double()
    torch.testing.assert_close((spread(q) * spread(k)).sum(-1) / spread_size(80), (q * k).sum(-1))
    assert spread(torch.eye(16)[3]).abs().tolist() == [1.0] * 16


# ---- the native kernels ----------------------------------------------------------------------------------------------

if available():
    from tests.ops.tensors import TensorOps
    from twostroke.ops.cpu.backend import NativeCpuOps, instruction_sets

    ISAS = instruction_sets()
else:
    ISAS = []
CASE = Case(((0, 40), (70, 1)), heads=3, kv_heads=1, head_dim=32, rotary=0, format="int8")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv_format", ["int8", "int4"])
def test_values_of_zeros(isa: str, kv_format: str) -> None:
    qkv, attention, kv, batch = make_step(replace(CASE, requests=((0, 40),), format=kv_format))  # type: ignore[arg-type]
    qkv[:, -32:] = 0
    out = TensorOps(NativeCpuOps(1, isa=isa)).attend(qkv, attention, kv, batch, 0)
    assert torch.equal(out, torch.zeros_like(out))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", [-32, -64, 0])
def test_bad_numbers_show_where_they_are_seen(isa: str, bad: float, place: int) -> None:
    """place: in v, k or q of the eleventh row. Later rows see its k and v; earlier rows and other requests do not."""
    qkv, attention, kv, batch = make_step(CASE)
    ops = TensorOps(NativeCpuOps(2, isa=isa))
    clean = ops.attend(qkv, attention, copied(kv), batch, 0)
    spoilt = qkv.clone()
    spoilt[10, place] = bad
    got = ops.attend(spoilt, attention, copied(kv), batch, 0)
    touched = torch.zeros(41, dtype=torch.bool)
    touched[10 : 40 if place else 11] = True
    assert torch.equal(got[~touched], clean[~touched])
    heads = got.view(41, 3, 32)[touched]
    assert not torch.isfinite(heads[:, 0]).any()
    assert torch.isfinite(heads[:, 1:]).all() if place == 0 else not torch.isfinite(heads).any()


@pytest.mark.parametrize("isa", ISAS)
def test_keys_with_a_large_constant_part(isa: str) -> None:
    """A constant in all keys changes nothing in exact arithmetic. Codes keep the rest of the keys once it is
    subtracted."""
    qkv, attention, kv, batch = make_step(replace(CASE, requests=((0, 40),)))
    ops = TensorOps(NativeCpuOps(1, isa=isa))
    wanted = ops.attend(qkv, attention, copied(kv), batch, 0)
    center = 50 * torch.randn(1, 32, generator=torch.Generator().manual_seed(1))
    qkv[:, 96:128] += center
    plain = ops.attend(qkv, attention, copied(kv), batch, 0)
    centered = ops.attend(qkv, replace(attention, key_center=center), copied(kv), batch, 0)
    assert (centered - wanted).abs().max() < 0.02
    assert (plain - wanted).abs().max() > 0.1
