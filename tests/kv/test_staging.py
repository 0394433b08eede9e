"""Blocks go to the host and back in several halves of the staging memory, in any order."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from twostroke.kv import staging
from twostroke.kv.staging import Staging


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("count", [1, 3, 4, 8, 20])
def test_blocks_go_out_and_come_in(device: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "HALF", 4 * 1000)
    rng = np.random.default_rng(count)
    before = rng.integers(0, 256, (24, 1000), np.uint8)
    data = torch.from_numpy(before).to(device, copy=True)
    blocks = rng.permutation(24)[:count].tolist()
    out = np.zeros((count, 1000), np.uint8)
    stage = Staging(data)
    assert stage.each == 4
    stage.copy_out(blocks, out)
    assert np.array_equal(out, before[blocks])
    to = rng.permutation(24)[:count].tolist()
    stage.take_in([(block, memoryview(content)) for block, content in zip(to, out, strict=True)])
    want = before.copy()
    want[to] = out
    assert np.array_equal(data.cpu().numpy(), want)
