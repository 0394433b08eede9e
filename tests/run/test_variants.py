"""The variants of attention that a start compiles: few, and all that steps can meet."""

from __future__ import annotations

from dataclasses import replace as with_field

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.random_weights import gpt_oss_shape, random_model
from twostroke.model.layers import Experts
from twostroke.ops.cuda.backend import FEW_OF_EXPERTS, CudaOps
from twostroke.ops.cuda.cuts import AttentionKind
from twostroke.ops.cuda.kernels import grouped_codes
from twostroke.ops.cuda.kernels.decode import form_of, longer, split_count
from twostroke.ops.cuda.kernels.grouped import TILE_BORDERS
from twostroke.ops.cuda.kernels.grouped_codes import code_tile
from twostroke.ops.cuda.kernels.narrow_tiles import INT4
from twostroke.ops.interface import BLOCK
from twostroke.record import replace
from twostroke.run.cuda.buckets import stream_rows
from twostroke.run.cuda.variants import cases_of
from twostroke.run.cuda.warm_up import expert_tasks, kinds_of_layers

KIND = AttentionKind(32, True, 8, 16)


def test_every_batch_of_streams_has_its_variant() -> None:
    cases = cases_of(KIND, 256, 131_072, grouped=True, shares=True, drafts=True)
    streams = [case for case in cases if case.streams and not case.members]
    assert len(streams) <= 4 and len(cases) <= 14  # the factor by which splits are longer makes no variant
    known = {form_of(case.rows * KIND.kv_heads, case.splits, case.scale) for case in streams}
    for count in range(1, 257):
        rows = stream_rows(count)
        scale = longer(rows * KIND.kv_heads)
        for columns in (16, 64, 512, 4096, 8192):
            assert form_of(rows * KIND.kv_heads, split_count(-(-columns * BLOCK // scale)), scale) in known


def test_prompts_chunks_and_prefixes_are_among_them() -> None:
    cases = cases_of(KIND, 256, 131_072, grouped=True, shares=True, drafts=True)
    assert {case.tile_splits > 1 for case in cases if case.tile_splits} == {True, False}
    assert any(case.members for case in cases) and any(case.rows and not case.streams for case in cases)
    assert not any(case.members for case in cases_of(KIND, 256, 4096, grouped=True, shares=False, drafts=True))
    assert len(cases_of(KIND, 256, 131_072, grouped=False, shares=False, drafts=True)) == 5


def test_every_tile_of_experts_of_four_bits_is_among_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers whose experts have other codes are kinds of their own."""
    arch = gpt_oss_shape(64, 32, 32, 2, 2, 1, 64)
    model = random_model(arch, CudaOps(torch.bfloat16, "cpu"), 16, mxfp4=True)
    assert len(kinds_of_layers(model)) == 1
    last = model.layers[1]
    assert isinstance(last.feed, Experts)
    other = with_field(last.feed.experts.down[0], format=INT4)
    mixed = replace(last.feed.experts, down=(other, *last.feed.experts.down[1:]))
    model.layers = (model.layers[0], replace(last, feed=replace(last.feed, experts=mixed)))
    assert len(kinds_of_layers(model)) == 2
    monkeypatch.setattr(grouped_codes, "INTERPRETED", False)
    compiled = [task.args[0] for task in expert_tasks(model, last.feed, 8192)]  # type: ignore[attr-defined]
    chosen = {code_tile(rows * 4 / 32, torch.bfloat16, TILE_BORDERS) for rows in compiled if rows > FEW_OF_EXPERTS}
    assert chosen == {code_tile(rows / 32, torch.bfloat16, TILE_BORDERS) for rows in range(36, 32768, 4)}
    assert 1 in compiled and len(chosen) == 4
