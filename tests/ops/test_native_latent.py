"""Latent attention in the native library: the specification's numbers, and the same bits however tokens come."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from tests.ops.tensors import batch_arrays
from twostroke.model.arch import Rope
from twostroke.model.rope import plain_frequencies
from twostroke.model.rope_table import rope_table
from twostroke.ops.cpu.backend import NativeCpuOps, instruction_sets
from twostroke.ops.cpu.library import available
from twostroke.ops.formats import Stored, from_float
from twostroke.ops.interface import BLOCK, Batch, GroupBlocks, KVFormat, KVLayer, LatentAttention, Norm, latent_scales
from twostroke.ops.reference.backend import ReferenceOps
from twostroke.weights.quantize import quantize

if not available():
    pytest.skip("the native library is not built", allow_module_level=True)

TYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "int8": torch.int8}
SHAPES = {  # heads, latent, plain, rotated, value
    "deepseek": (16, 512, 128, 64, 128),
    "few heads": (2, 64, 32, 16, 24),
    "odd": (5, 40, 12, 6, 10),
}


@cache
def numbers(name: str) -> dict[str, np.ndarray]:
    heads, latent, plain, turned, value = SHAPES[name]
    rng = np.random.default_rng(7)
    return {
        "norm": 1 + 0.2 * rng.standard_normal(latent, np.float32),
        "key_up": rng.standard_normal((heads, latent, plain), np.float32) / np.float32(plain**0.5),
        "value_up": rng.standard_normal((heads, value, latent), np.float32) / np.float32(latent**0.5),
        "q": rng.standard_normal((700, heads * (plain + turned)), np.float32),
        "kv": rng.standard_normal((700, latent + turned), np.float32),
    }


def make_attention(ops: Any, name: str, bits: str | None = None) -> LatentAttention:
    heads, latent, plain, turned, value = SHAPES[name]
    given = numbers(name)

    def parts(matrices: np.ndarray) -> list[Stored]:
        return [from_float(one) if bits is None else quantize(from_float(one), bits) for one in matrices]

    return LatentAttention(
        heads=heads, latent=latent, plain_dim=plain, rope_dim=turned, value_dim=value, scale=(plain + turned) ** -0.5,
        rope=rope_table(Rope(tuple(plain_frequencies(10_000.0, turned))), 1024, ops.device),
        norm=Norm(given["norm"] if ops.device is None else torch.from_numpy(given["norm"]), 1e-6),
        key_up=ops.pack(parts(given["key_up"])), value_up=ops.pack(parts(given["value_up"])),
    )  # fmt: skip


class Life:
    """Sequences of rows that grow in one cache with scattered blocks."""

    def __init__(self, ops: Any, name: str, kv_format: KVFormat, count: int = 1, bits: str | None = None):
        _, latent, _, turned, _ = SHAPES[name]
        self.ops, self.attention = ops, make_attention(ops, name, bits)
        columns = 700 // BLOCK + 1
        order = torch.randperm(count * columns, generator=torch.Generator().manual_seed(count))
        self.tables = order.view(count, columns).to(torch.int32)
        coded = kv_format == "int8"
        unwritten = 99 if coded else float("nan")
        keys = torch.full((count * columns, 1, BLOCK, latent + turned), unwritten, dtype=TYPES[kv_format])
        scales = torch.full((count * columns, latent_scales(latent + turned), BLOCK), float("nan")) if coded else None
        self.torch_keys = keys, scales  # the arrays below are views of them
        if ops.device is None:
            keys = keys.view(torch.int16).numpy() if kv_format == "bfloat16" else keys.numpy()
            scales = None if scales is None else scales.numpy()
        self.cache = KVLayer(kv_format, keys, key_scales=scales)
        self.computed = [0] * count
        self.given = numbers(name)

    def step(self, work: list[tuple[int, int]]) -> list[np.ndarray]:
        """(sequence, so many more of its rows) …; results in that order. All sequences have the same rows."""
        places = [np.arange(self.computed[s], self.computed[s] + n) for s, n in work]
        owner = torch.tensor([s for s, n in work for _ in range(n)])
        positions = torch.from_numpy(np.concatenate(places))
        for sequence, count in work:
            self.computed[sequence] += count
        slots = self.tables[owner, positions // BLOCK].long() * BLOCK + positions % BLOCK
        counts = np.cumsum([0, *(n for _, n in work)])
        batch = Batch(
            tokens=positions,
            positions=positions,
            starts=torch.from_numpy(counts).to(torch.int32),
            contexts=torch.tensor([self.computed[s] for s, _ in work], dtype=torch.int32),
            groups=(GroupBlocks(slots, self.tables[[s for s, _ in work]]),),
            logit_rows=positions,
        )
        q, kv = (self.given[part][positions.numpy()] for part in ("q", "kv"))
        if self.ops.device is None:
            out = self.ops.attend_latent(q, kv, self.attention, self.cache, batch_arrays(batch), 0)
        else:
            q, kv = torch.from_numpy(q), torch.from_numpy(kv)
            out = self.ops.attend_latent(q, kv, self.attention, self.cache, batch, 0).numpy()
        return [out[a:b] for a, b in pairwise(counts)]


@pytest.mark.parametrize(
    ("name", "kv_format"),
    [
        *[("deepseek", "float16"), ("few heads", "bfloat16"), ("odd", "float32")],
        *[("deepseek", "int8"), ("few heads", "int8"), ("odd", "int8")],
    ],
)
def test_numbers_of_the_specification(name: str, kv_format: KVFormat) -> None:
    expected = Life(ReferenceOps(), name, kv_format).step([(0, 70)])[0]
    for isa in instruction_sets():
        got = Life(NativeCpuOps(2, isa=isa), name, kv_format).step([(0, 70)])[0]
        np.testing.assert_allclose(got, expected, atol=2e-3 if kv_format == "bfloat16" else 2e-4, rtol=0)


@pytest.mark.parametrize("outlier", [1, 30])
def test_the_error_of_latents_in_bytes(outlier: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against float32: 1.0 %, and the same where one number of each entry is thirty times as large."""
    given = dict(numbers("deepseek"))
    given["kv"] = given["kv"].copy()
    given["kv"][:, 77] *= outlier
    monkeypatch.setitem(globals(), "numbers", lambda name: given)
    exact, coded = (Life(NativeCpuOps(2), "deepseek", kv).step([(0, 300)])[0] for kv in ("float32", "int8"))
    assert np.linalg.norm(coded - exact) / np.linalg.norm(exact) < 0.012


def test_a_latent_that_is_no_number_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """In its own row and in all that see it, as in a float cache."""
    given = dict(numbers("few heads"))
    given["kv"] = given["kv"].copy()
    given["kv"][20, 70] = np.nan
    monkeypatch.setitem(globals(), "numbers", lambda name: given)
    got = Life(NativeCpuOps(2), "few heads", "int8").step([(0, 40)])[0]
    assert np.isfinite(got[:20]).all() and np.isnan(got[20:]).all()


@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_quantized_matrices_of_heads(bits: str) -> None:
    expected = Life(ReferenceOps(), "few heads", "float32", bits=bits).step([(0, 40)])[0]
    got = Life(NativeCpuOps(2), "few heads", "float32", bits=bits).step([(0, 40)])[0]
    assert np.linalg.norm(got - expected) / np.linalg.norm(expected) < 1e-2


@pytest.mark.parametrize(
    ("name", "bits", "kv_format"),
    [
        *[("deepseek", None, "float16"), ("deepseek", "int8", "float16"), ("few heads", "int4", "float16")],
        *[("odd", None, "float16"), ("deepseek", None, "int8"), ("odd", None, "int8")],
    ],
)
def test_the_same_bits_however_rows_come(name: str, bits: str | None, kv_format: KVFormat) -> None:
    """Whole, in chunks, one by one, beside others, on other threads and instruction sets; over three splits."""
    whole = Life(NativeCpuOps(1), name, kv_format, bits=bits).step([(0, 600)])[0]
    for isa in instruction_sets()[: 3 if name != "deepseek" else 1]:
        life = Life(NativeCpuOps(2, isa=isa), name, kv_format, 3, bits)
        got: list[list[np.ndarray]] = [[], [], []]
        for work in ([(0, 300)], [(0, 31), (1, 500)], [(2, 5), (0, 1), (1, 33)], [(0, 267), (1, 1), (2, 1)], [(0, 1)]):
            for (sequence, _), rows in zip(work, life.step(work), strict=True):
                got[sequence].append(rows)
        for rows in got:
            joined = np.concatenate(rows)
            assert np.array_equal(joined, whole[: len(joined)])


def test_refusals() -> None:
    life = Life(NativeCpuOps(1), "odd", "float32")
    with pytest.raises(ValueError, match="do not fit"):
        life.ops.attend_latent(np.zeros((1, 3), np.float32), life.given["kv"][:1], life.attention, life.cache, None, 0)
    for kv_format, reason in (("int8", "1 scales each"), ("int4", "int4 are not supported")):
        odd = KVLayer(kv_format, life.cache.keys)
        with pytest.raises(ValueError, match=reason):
            life.ops.attend_latent(life.given["q"][:1], life.given["kv"][:1], life.attention, odd, None, 0)
