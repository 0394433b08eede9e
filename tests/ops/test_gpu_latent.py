"""Latent attention on the GPU against the specification: under Triton's interpreter, and on the card with `-m gpu`."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from tests.ops.test_triton import DEVICE, ON_CARD, close, pytestmark  # noqa: F401
from twostroke.model.arch import Rope
from twostroke.model.rope import plain_frequencies
from twostroke.model.rope_table import rope_table
from twostroke.ops.cuda.backend import CudaOps
from twostroke.ops.cuda.cuts import DeviceBatch
from twostroke.ops.cuda.exact import ExactCudaOps
from twostroke.ops.cuda.kernels import latent
from twostroke.ops.formats import from_float
from twostroke.ops.interface import BLOCK, GroupBlocks, KVFormat, KVLayer, LatentAttention, Norm, latent_scales
from twostroke.ops.reference.backend import ReferenceOps

SHAPES = {  # heads, latent, plain, rotated, value
    "few heads": (2, 64, 32, 16, 24),
    "odd": (5, 40, 12, 6, 10),
    "many heads": (20, 32, 16, 8, 16),
    "many heads, groups": (20, 192, 16, 64, 16),
} | ({"deepseek": (16, 512, 128, 64, 128), "128 heads": (128, 512, 128, 64, 128)} if ON_CARD else {})
COLUMNS = 64
slow_here = pytest.mark.gpu if ON_CARD else pytest.mark.slow  # the interpreter takes long


class Life:
    """Sequences of the same rows that grow in one cache with scattered blocks."""

    def __init__(
        self, ops: Any, name: str, dtype: torch.dtype = torch.float32, count: int = 1, *, codes: bool = False
    ):  # fmt: skip
        """codes: the cache is int8."""
        heads, latent, plain, turned, value = SHAPES[name]
        rng = np.random.default_rng(7)

        def random(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape, np.float32)

        def parts(rows: int, columns: int) -> Any:
            return ops.pack([from_float(random(rows, columns) * np.float32(columns**-0.5)) for _ in range(heads)])

        device = ops.device
        self.ops, self.dtype = ops, dtype
        self.attention = LatentAttention(
            heads=heads, latent=latent, plain_dim=plain, rope_dim=turned, value_dim=value,
            scale=(plain + turned) ** -0.5,
            rope=rope_table(Rope(tuple(plain_frequencies(10_000.0, turned))), 1024, device),
            norm=Norm(torch.from_numpy(1 + 0.2 * random(latent)).to(device), 1e-6),
            key_up=parts(latent, plain), value_up=parts(value, latent),
        )  # fmt: skip
        order = torch.randperm(count * COLUMNS, generator=torch.Generator().manual_seed(count))
        self.tables = order.view(count, COLUMNS).to(torch.int32)
        keys = torch.full((count * COLUMNS, 1, BLOCK, latent + turned), float("nan"), dtype=dtype, device=device)
        kinds: dict[torch.dtype, KVFormat] = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
        self.cache = KVLayer(kinds[dtype], keys)
        if codes:
            scales = torch.full((len(keys), latent_scales(latent + turned), BLOCK), float("nan"), device=device)
            self.cache = KVLayer("int8", torch.full_like(keys, 99, dtype=torch.int8), key_scales=scales)
        self.computed = [0] * count
        self.q = torch.from_numpy(random(1024, heads * (plain + turned)))
        self.kv = torch.from_numpy(random(1024, latent + turned))

    def step(self, *work: tuple[int, int]) -> list[torch.Tensor]:
        """(sequence, so many more of its rows) …; results in that order."""
        positions = torch.cat([torch.arange(self.computed[s], self.computed[s] + n) for s, n in work])
        owner = torch.tensor([s for s, n in work for _ in range(n)])
        for sequence, count in work:
            self.computed[sequence] += count
        slots = self.tables[owner, positions // BLOCK].long() * BLOCK + positions % BLOCK
        counts = np.array([n for _, n in work])
        starts, contexts = np.cumsum([0, *counts]), np.array([self.computed[s] for s, _ in work])
        device = self.ops.device
        batch = DeviceBatch(
            positions.to(device), positions.to(device), torch.from_numpy(starts).to(device, torch.int32),
            torch.from_numpy(contexts).to(device, torch.int32),
            (GroupBlocks(slots.to(device), self.tables[[s for s, _ in work]].to(device)),), positions.to(device),
            counts, contexts, streams=bool((counts == 1).all()),
        )  # fmt: skip
        stacked = torch.cat((self.q[positions], self.kv[positions]), dim=1).to(device, self.dtype)
        q, kv = stacked[:, : self.q.shape[1]], stacked[:, self.q.shape[1] :]  # as a layer hands them over
        out = self.ops.attend_latent(q, kv, self.attention, self.cache, batch, 0)
        return list(out.float().cpu().split(counts.tolist()))


@pytest.mark.parametrize("name", ["few heads", *(pytest.param(name, marks=slow_here) for name in [*SHAPES][1:])])
def test_numbers_of_the_specification(name: str) -> None:
    """Prompts, chunks, single tokens of several contexts and streams; splits end at 128."""
    for dtype, limit in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2))[: 2 if ON_CARD else 1]:
        lives = [Life(ops, name, dtype, 2) for ops in (ReferenceOps(), CudaOps(dtype, DEVICE))]
        if dtype == torch.bfloat16:
            lives[0].dtype = torch.float32  # the specification computes in floats over the same cache
        for work in (((0, 21),), ((0, 1), (1, 127)), ((0, 9), (1, 1)), ((0, 1), (1, 1))):
            expected, found = (torch.cat(life.step(*work)) for life in lives)
            close(found, expected, limit)


GROUPS = [name for name, (_, latent, _, turned, _) in SHAPES.items() if latent % 64 == 0 and turned <= 64]


@pytest.mark.parametrize("name", ["few heads", *(pytest.param(name, marks=slow_here) for name in GROUPS[1:])])
def test_entries_in_int8(name: str) -> None:
    """Each 64 numbers have a scale: both write the same codes, but for numbers between two of them."""
    for dtype, limit in ((torch.float32, 5e-3), (torch.bfloat16, 2e-2))[: 2 if ON_CARD else 1]:
        lives = [Life(ops, name, dtype, 2, codes=True) for ops in (ReferenceOps(), CudaOps(dtype, DEVICE))]
        lives[0].dtype = torch.float32
        for work in (((0, 21),), ((0, 1), (1, 70)), ((0, 9), (1, 1)), ((0, 1), (1, 1))):
            expected, found = (torch.cat(life.step(*work)) for life in lives)
            close(found, expected, limit)
        written = ~lives[0].cache.key_scales.isnan()
        scales = lives[1].cache.key_scales.cpu()
        assert torch.equal(~scales.isnan(), written)
        torch.testing.assert_close(scales[written], lives[0].cache.key_scales[written], rtol=1e-2, atol=0)
        apart = (lives[1].cache.keys.cpu().int() - lives[0].cache.keys.int()).abs()
        assert dtype == torch.bfloat16 or (apart.max() <= 1 and (apart > 0).float().mean() < 5e-3)


@slow_here
@pytest.mark.parametrize("name", ["odd", "many heads"] if not ON_CARD else SHAPES)
@pytest.mark.parametrize("places", [1, 6])
def test_parts_of_several_tiles(name: str, places: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few programs: a part of a context has several tiles, and the last one is not full."""
    monkeypatch.setattr(latent, "PLACES", places)
    for dtype, limit in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2))[: 2 if ON_CARD else 1]:
        lives = [Life(ops, name, dtype, 2) for ops in (ReferenceOps(), CudaOps(dtype, DEVICE))]
        if dtype == torch.bfloat16:
            lives[0].dtype = torch.float32
        for work in (((0, 100),), ((1, 37),), ((0, 1), (1, 1))):
            expected, found = (torch.cat(life.step(*work)) for life in lives)
            close(found, expected, limit)


@slow_here
@pytest.mark.parametrize("codes", [False, True])
@pytest.mark.parametrize("name", ["few heads"] if not ON_CARD else SHAPES)
def test_the_same_bits_however_rows_come(name: str, codes: bool) -> None:
    """exact=True: whole, in chunks, one by one, beside others."""
    total = 600 if ON_CARD else 140
    for dtype in (torch.float32, torch.bfloat16)[: 2 if ON_CARD else 1]:
        if codes and name not in GROUPS:
            continue
        ops = ExactCudaOps(dtype, DEVICE)
        whole = Life(ops, name, dtype, codes=codes).step((0, total))[0]
        life = Life(ops, name, dtype, 2, codes=codes)
        found: list[list[torch.Tensor]] = [[], []]
        for work in (((0, total - 12), (1, 3)), ((0, 1), (1, 1)), ((1, 130), (0, 10)), ((0, 1), (1, 1))):
            for (sequence, _), rows in zip(work, life.step(*work), strict=True):
                found[sequence].append(rows)
        for rows in found:
            joined = torch.cat(rows)
            assert torch.equal(joined, whole[: len(joined)]), (name, dtype)


def test_kernels_over_int8_compile() -> None:
    """For an H200 that need not be there; a program has at most 227 KB of shared memory."""
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.ops.compile_latent"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=plain)
    found = [int(line.split()[1]) for line in done.stdout.splitlines()]
    assert len(found) == 6 and max(found) <= 227 << 10
