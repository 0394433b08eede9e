"""Attention with sinks in every GPU kernel, against the specification: under Triton's interpreter anywhere, and on the
card with `-m gpu`.

Heads have sinks from far below to far above their scores, and each head is compared by itself: a head whose sink takes
nearly all of the weight has small values, which would not count beside the others.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.ops.test_triton import DEVICE, LIMITS, ON_CARD, REFERENCE, copied, moved, on_device
from twostroke.record import replace

pytest.importorskip("triton")

from tests.ops.cases import Case, make_step, slots_of
from twostroke.ops.cuda.backend import CudaOps
from twostroke.ops.cuda.cuts import Cascade, Cut, DeviceBatch, cut_drafts
from twostroke.ops.cuda.exact import ExactCudaOps
from twostroke.ops.cuda.kernels.decode import split_count
from twostroke.ops.cuda.kernels.draft_decode import serves
from twostroke.ops.cuda.kernels.prefill import make_tiles
from twostroke.ops.interface import BLOCK, Attention, GroupBlocks

pytestmark = [pytest.mark.gpu] if ON_CARD else []
SINKS = (-1e4, -2.0, 0.5, 4.0, 25.0, 1.0, 0.0, 7.0)
LIKE = {"heads": 8, "kv_heads": 1, "sinks": SINKS}  # eight query heads read one K/V head, as in gpt-oss
# Contexts that end before, at and after the borders of blocks (16), of the windows below (24, 128) and of splits (128).
STREAMS = tuple((context - 1, 1) for context in (1, 16, 17, 24, 25, 33, 128, 129, 257, 300))
PROMPTS = ((0, 17), (15, 2), (23, 3), (126, 5), (63, 1), (250, 9))
DRAFTS = ((0, 3), (200, 5), (63, 1), (128, 8), (124, 7))
CHANGES = [
    {}, {"window": 24}, {"window": 128}, {"head_dim": 64, "window": 128}, {"qk_norm": True, "softcap": 3.0},
    {"heads": 6, "kv_heads": 2, "sinks": SINKS[:6]}, {"format": "bfloat16"},
]  # fmt: skip
NARROW = [{"format": "int8"}, {"format": "int8", "window": 24}, {"format": "int8", "window": 128}]
slow_here = pytest.mark.gpu if ON_CARD else pytest.mark.slow  # the interpreter takes long


def first_of(cases: list[dict], count: int) -> list:
    """So many of them run with the plain tests, the others with the slow ones."""
    return [*cases[:count], *(pytest.param(case, marks=slow_here) for case in cases[count:])]


@pytest.fixture(scope="module")
def ops() -> CudaOps:
    return CudaOps(torch.float32, DEVICE)


def close_by_head(out: torch.Tensor, expected: torch.Tensor, attention: Attention, limit: float) -> None:
    """A head whose sink leaves nothing to the keys is exactly zero in both."""
    mine, theirs = (x.cpu().double().unflatten(1, (attention.heads, -1)) for x in (out, expected))
    assert mine.isfinite().all()
    errors = (mine - theirs).norm(dim=(0, 2)) / theirs.norm(dim=(0, 2)).clamp_min(1e-30)
    assert errors.max() < limit, f"relative errors of heads {errors.tolist()}"


def check(ops: CudaOps, case: Case, streams: bool = False, cut: Cut | None = None, limit: float | None = None) -> None:
    """cut: how the step is divided among kernels; None: as the backend does it by itself."""
    limit = limit or LIMITS.get(case.format, 1e-4)
    if ON_CARD and case.format in ("int8", "fp8"):
        ops, limit = type(ops)(torch.bfloat16, DEVICE), limit + 1e-2  # in float32 such a cache is refused on a card
    qkv, attention, kv, batch = make_step(case)
    qkv = qkv.to(ops.dtype).float()
    mine, there, step = copied(kv, DEVICE), on_device(attention, DEVICE), moved(batch, streams)
    if cut is not None:
        step = replace(step, cuts={ops.kind(there): cut})
    expected = REFERENCE.attend(qkv, attention, kv, batch, 0)
    without = REFERENCE.attend(qkv, replace(attention, sinks=None), kv, batch, 0)
    assert (without - expected).norm() / expected.norm() > 0.1  # sinks matter
    close_by_head(ops.attend(qkv.to(DEVICE, ops.dtype), there, mine, step, 0), expected, attention, limit)


@pytest.mark.parametrize("change", first_of(CHANGES + NARROW, 4), ids=str)
def test_streams(ops: CudaOps, change: dict) -> None:
    """One new token each, projections as they come: with one split, and with several that are merged."""
    check(ops, Case(STREAMS, **(LIKE | change)), streams=True)


@pytest.mark.parametrize("change", first_of(CHANGES + NARROW, 4), ids=str)
def test_prompts_chunks_and_single_tokens(ops: CudaOps, change: dict) -> None:
    check(ops, Case(PROMPTS, **(LIKE | change)))


@pytest.mark.parametrize("change", [{}, {"window": 128}], ids=str)
def test_fp8_cache(ops: CudaOps, change: dict) -> None:
    """Long contexts and a wide limit, because the interpreter cuts fp8 off where others round it."""
    case = Case(((300, 1), (127, 1), (480, 1)), format="fp8", **(LIKE | change))
    check(ops, case, streams=True, limit=4e-2)
    check(ops, replace(case, requests=((310, 1), (400, 3))), limit=4e-2)


@pytest.mark.parametrize("change", first_of([{}, {"window": 24}, {"window": 128}, {"format": "int8"}], 1), ids=str)
def test_programs_that_share_a_tile_count_a_sink_once(
    ops: CudaOps, change: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twostroke.ops.cuda.cuts.split_for", lambda *_: 3)
    check(ops, Case(((0, 9), (200, 3), (127, 4), (250, 34)), **(LIKE | change)))


@pytest.mark.parametrize("change", first_of([
    {}, {"window": 128}, {"head_dim": 64}, {"qk_norm": True, "softcap": 3.0},
    {"heads": 6, "kv_heads": 2, "sinks": SINKS[:6]}, {"format": "bfloat16"}, {"window": 24}, {"format": "int8"},
], 2), ids=str)  # fmt: skip
@pytest.mark.parametrize("splits", [1, 2])
def test_rows_that_verify_drafts(ops: CudaOps, change: dict, splits: int) -> None:
    """In the kernel for short drafts, and in small tiles where there is a window or a cache of few bits. Rows have one
    split before them, two, a full one, and nothing."""
    case = Case(DRAFTS, **(LIKE | change))
    counts, lengths = (np.array(numbers) for numbers in zip(*((new, old + new) for old, new in DRAFTS), strict=True))
    _, attention, kv, batch = make_step(case)
    there = on_device(attention, DEVICE)
    assert serves(there, kv, batch, 0) == (not case.window and case.format != "int8")
    tiles = torch.from_numpy(cut_drafts(counts, lengths, ops.kind(there)).tiles).to(DEVICE)
    check(ops, case, cut=Cut(None, 0, 1, tiles, splits, queries=8))


@pytest.mark.parametrize("change", [{}, {"softcap": 3.0}], ids=str)
def test_streams_that_share_a_prefix(change: dict) -> None:
    """The prefix's splits are computed by another kernel, which leaves the sink to the one that merges."""
    streams = ((300, 1), (290, 1), (5, 1), (270, 1), (140, 1), (0, 1))
    qkv, attention, kv, batch = make_step(Case(streams, **(LIKE | change)))
    tables = batch.groups[0].tables.clone()
    tables[[1, 3], : 256 // BLOCK] = tables[0, : 256 // BLOCK]
    batch = replace(batch, groups=(GroupBlocks(batch.groups[0].slots, tables),))
    ops, there = CudaOps(torch.float32, DEVICE), on_device(attention, DEVICE)
    kind = ops.kind(there)
    members = torch.full((1, kind.members), -1, dtype=torch.int32)
    members[0, :3] = torch.tensor([0, 1, 3])
    shared = torch.tensor([2, 2, 0, 2, 0, 0], dtype=torch.int32)
    cut = Cut(None, len(streams), split_count(512), None, 1, cascade=Cascade(members.to(DEVICE), shared.to(DEVICE)))
    step = replace(moved(batch, True), cuts={kind: cut})
    out = ops.attend(qkv.to(DEVICE), there, copied(kv, DEVICE), step, 0)
    close_by_head(out, REFERENCE.attend(qkv, attention, kv, batch, 0), attention, 1e-4)


@pytest.mark.parametrize("change", first_of([{}, {"window": 128}, {"format": "int8"}], 1), ids=str)
def test_splits_longer_than_usual(ops: CudaOps, change: dict) -> None:
    requests = ((700, 1), (129, 1), (5, 1), (511, 1))
    check(ops, Case(requests, rotary=0, **(LIKE | change)), True, Cut(None, 4, split_count(351), None, 1, scale=2))


@pytest.mark.parametrize(
    "change", first_of([{}, {"window": 24}, {"window": 128, "head_dim": 64}, {"format": "int8"}], 2), ids=str
)
def test_exact_values(change: dict) -> None:
    ops = ExactCudaOps(torch.float32, DEVICE)
    check(ops, Case(((0, 17), (126, 5), (63, 1)), **(LIKE | change)))
    check(ops, Case(((5, 1), (127, 1), (130, 1)), **(LIKE | change)), streams=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16] if ON_CARD else [torch.float32])
@pytest.mark.parametrize("change", [{}, {"window": 24}, {"format": "int8"}], ids=str)
def test_no_chunking_changes_a_bit(change: dict, dtype: torch.dtype) -> None:
    """Rows across a border of splits at once, in chunks, and one by one: one program merges the splits, or several."""
    case = Case(((122, 9),), **(LIKE | change))
    ops = ExactCudaOps(dtype, DEVICE)
    qkv, attention, cache, batch = make_step(case)
    attention, qkv, table = on_device(attention, DEVICE), qkv.to(DEVICE, dtype), batch.groups[0].tables[0]
    kind = ops.kind(attention)

    def run(counts: list[int], splits: int) -> torch.Tensor:
        kv, out, start = copied(cache, DEVICE), [], 0
        for count in counts:
            positions, context = torch.arange(start, start + count) + 122, 122 + start + count
            step = DeviceBatch(
                positions.to(DEVICE), positions.to(DEVICE),
                torch.tensor([0, count], dtype=torch.int32, device=DEVICE),
                torch.tensor([context], dtype=torch.int32, device=DEVICE),
                (GroupBlocks(slots_of(table, positions).to(DEVICE), table.view(1, -1).to(DEVICE)),),
                positions.to(DEVICE), np.array([count]), np.array([context]), streams=count == 1,
            )  # fmt: skip
            if count > 1:
                tiles = torch.from_numpy(make_tiles(step.counts, step.lengths, np.arange(1), kind.queries))
                step = replace(step, cuts={kind: Cut(None, 0, 1, tiles.to(DEVICE), splits)})
            out.append(ops.attend(qkv[start : start + count].contiguous(), attention, kv, step, 0))
            start += count
        return torch.cat(out)

    expected = run([9], 1)
    for counts, splits in (([9], 2), ([2, 4, 3], 1), ([7, 1, 1], 2)):
        assert torch.equal(run(counts, splits), expected), (counts, splits)


@pytest.mark.parametrize("context", [1, 16, 129, 300])
@pytest.mark.parametrize("exact", [False, True])
def test_a_sink_takes_its_share(exact: bool, context: int) -> None:
    """Keys of zeros have equal weights, and values of ones leave what the sink does not take."""
    case = Case(((context - 1, 1),), heads=2, kv_heads=1, sinks=(0.0, 3.0), rotary=0)
    qkv, attention, kv, batch = make_step(case)
    qkv[:, :48], qkv[:, 48:] = 0.0, 1.0
    kv.keys.fill_(0.0)
    kv.values.fill_(1.0)
    ops = (ExactCudaOps if exact else CudaOps)(torch.float32, DEVICE)
    out = ops.attend(qkv.to(DEVICE), on_device(attention, DEVICE), copied(kv, DEVICE), moved(batch, True), 0)
    share = context / (context + attention.sinks.double().exp())
    torch.testing.assert_close(out.cpu().double(), share.repeat_interleave(16)[None], rtol=1e-5, atol=0)


def test_the_library_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its attention knows no sinks: runs of any length are tiles of our own."""
    monkeypatch.setattr(CudaOps, "_dense_ok", lambda self, attention: True)
    ops = CudaOps(torch.float32, DEVICE)
    plain = Attention(64, 8, 64, 0.125)
    assert ops.kind(plain).dense and not ops.kind(replace(plain, sinks=torch.zeros(64))).dense
