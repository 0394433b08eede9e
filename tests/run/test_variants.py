"""The variants of attention that a start compiles: few, and all that steps can meet."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from twostroke.ops.cuda.cuts import AttentionKind
from twostroke.ops.cuda.kernels.decode import longer, split_count
from twostroke.ops.interface import BLOCK
from twostroke.run.cuda.buckets import stream_rows
from twostroke.run.cuda.variants import cases_of

KIND = AttentionKind(32, True, 8, 16)


def tiles_of(rows: int, splits: int, scale: int) -> tuple[bool, int, bool, bool]:
    """What decode.py chooses its tiles by."""
    return rows * KIND.kv_heads <= 64, scale, splits <= 8, splits <= 16


def test_every_batch_of_streams_has_its_variant() -> None:
    cases = cases_of(KIND, 256, 131_072, grouped=True, shares=True, drafts=True)
    assert len(cases) <= 24
    known = {tiles_of(case.rows, case.splits, case.scale) for case in cases if case.streams and not case.members}
    for count in range(1, 257):
        rows = stream_rows(count)
        scale = longer(rows * KIND.kv_heads)
        for columns in (16, 64, 512, 4096, 8192):
            assert tiles_of(rows, split_count(-(-columns * BLOCK // scale)), scale) in known


def test_prompts_chunks_and_prefixes_are_among_them() -> None:
    cases = cases_of(KIND, 256, 131_072, grouped=True, shares=True, drafts=True)
    assert {case.tile_splits > 1 for case in cases if case.tile_splits} == {True, False}
    assert any(case.members for case in cases) and any(case.rows and not case.streams for case in cases)
    assert not any(case.members for case in cases_of(KIND, 256, 4096, grouped=True, shares=False, drafts=True))
    assert len(cases_of(KIND, 256, 131_072, grouped=False, shares=False, drafts=True)) == 5
