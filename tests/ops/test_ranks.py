"""Sums through shared memory: every rank gets the parts in the order of the ranks, and waits for none that is gone."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from twostroke.ops.cpu import ranks
from twostroke.ops.cpu.library import available

pytestmark = pytest.mark.skipif(not available() or not hasattr(os, "memfd_create"), reason="no native library")


def memory(parts: int) -> int:
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, ranks.memory_bytes(parts))
    return descriptor


@pytest.mark.parametrize("parts", [2, 3])
def test_every_rank_has_the_sum_in_order(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of other sizes one after the other, some in pieces, with ranks that are late in turn."""
    monkeypatch.setattr(ranks, "MOST", 1000)
    rng = np.random.default_rng(1)
    shapes = [(1, 7), (3, 100), (5, 700), (1, 1000)] * 20
    given = [[rng.normal(size=shape).astype(np.float32) * 10.0**rank for rank in range(parts)] for shape in shapes]
    descriptor = memory(parts)

    def run(rank: int) -> list[np.ndarray | None]:
        total = ranks.SharedSum(descriptor, rank, parts, lambda: False)
        found = []
        for number, one in enumerate(given):
            if number % parts == rank:
                time.sleep(0.001)
            found.append(total(one[rank]))
        return found

    with ThreadPoolExecutor(parts) as pool:
        results = list(pool.map(run, range(parts)))
    os.close(descriptor)
    for number, values in enumerate(given):
        want = values[0].copy()
        for value in values[1:]:
            want = want + value
        for found in results:
            assert found[number] is not None and found[number].tobytes() == want.tobytes()


def test_a_rank_that_is_gone_ends_the_wait() -> None:
    descriptor = memory(2)
    looks = []
    total = ranks.SharedSum(descriptor, 0, 2, lambda: bool(looks.append(1)) or len(looks) > 1)
    assert total(np.ones((1, 4), np.float32)) is None
    assert len(looks) == 2
    os.close(descriptor)
