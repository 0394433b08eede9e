"""Blocks go to the host and back in several halves of the staging memory, in any order."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from twostroke.kv import staging
from twostroke.kv.staging import BlockStaging


@pytest.mark.parametrize("size", [1000, 1002])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_sums_tell_blocks_apart(device: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One bit, two words that changed places, and the order of blocks; in pools of two processes they are equal."""
    monkeypatch.setattr(staging, "HALF", 4 * size)
    data = np.random.default_rng(size).integers(0, 256, (24, size), np.uint8)

    def sums(blocks: list[int]) -> tuple[int, ...]:
        return BlockStaging(torch.from_numpy(data).to(device, copy=True)).sums(blocks)

    before = sums(list(range(24)))
    assert len(set(before)) == 24 and sums([5, 3, 17, 3, 20, 0]) == tuple(before[i] for i in (5, 3, 17, 3, 20, 0))
    data[7, size - 1] ^= 128
    data[9, [0, 4]] = data[9, [4, 0]]
    data[11, 500] ^= 1
    after = sums(list(range(24)))
    assert [place for place in range(24) if after[place] != before[place]] == [7, 9, 11]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("count", [1, 3, 4, 8, 20])
def test_blocks_go_out_and_come_in(device: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "HALF", 4 * 1000)
    rng = np.random.default_rng(count)
    before = rng.integers(0, 256, (24, 1000), np.uint8)
    data = torch.from_numpy(before).to(device, copy=True)
    blocks = rng.permutation(24)[:count].tolist()
    out = np.zeros((count, 1000), np.uint8)
    stage = BlockStaging(data)
    assert stage.each == 4
    stage.copy_out(blocks, out)
    assert np.array_equal(out, before[blocks])
    to = rng.permutation(24)[:count].tolist()
    stage.take_in([(block, memoryview(content)) for block, content in zip(to, out, strict=True)])
    want = before.copy()
    want[to] = out
    assert np.array_equal(data.cpu().numpy(), want)
