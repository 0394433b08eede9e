"""Streams that share a prefix, and splits longer than usual, give what the specification gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.ops.test_triton import DEVICE, ON_CARD, REFERENCE, close, copied, moved, on_device
from twostroke.record import replace

pytest.importorskip("triton")

from tests.ops.cases import Case, make_step
from twostroke.ops.cuda.backend import CudaOps
from twostroke.ops.cuda.cuts import Cascade, Cut
from twostroke.ops.cuda.kernels.decode import split_count
from twostroke.ops.interface import BLOCK, GroupBlocks
from twostroke.run.cuda.shared_prefix import find_sharing, split_end, whole_splits

pytestmark = [pytest.mark.gpu] if ON_CARD else []
STREAMS = ((300, 1), (290, 1), (5, 1), (270, 1), (140, 1), (0, 1))


def sharing_step(case: Case) -> tuple:
    """Streams 0, 1 and 3 hold the same first 256 tokens."""
    qkv, attention, kv, batch = make_step(case)
    tables = batch.groups[0].tables.clone()
    tables[[1, 3], : 256 // BLOCK] = tables[0, : 256 // BLOCK]
    return qkv, attention, kv, replace(batch, groups=(GroupBlocks(batch.groups[0].slots, tables),))


@pytest.mark.parametrize("change", [{}, {"softcap": 3.0, "qk_norm": True}, {"heads": 3, "kv_heads": 1}], ids=str)
def test_a_shared_prefix_is_read_once(change: dict) -> None:
    qkv, attention, kv, batch = sharing_step(Case(STREAMS, **change))
    ops, there = CudaOps(torch.float32, DEVICE), on_device(attention, DEVICE)
    mine, step = copied(kv, DEVICE), moved(batch, True)
    kind = ops.kind(there)
    members = torch.full((2, kind.members), -1, dtype=torch.int32)
    members[0, :3] = torch.tensor([0, 1, 3])
    shared = torch.tensor([2, 2, 0, 2, 0, 0], dtype=torch.int32)
    cut = Cut(None, len(STREAMS), split_count(512), None, 1, cascade=Cascade(members.to(DEVICE), shared.to(DEVICE)))
    out = ops.attend(qkv.to(DEVICE), there, mine, replace(step, cuts={kind: cut}), 0)
    close(out, REFERENCE.attend(qkv, attention, kv, batch, 0), 1e-4)


@pytest.mark.parametrize("scale", [1, 2, 4])
def test_longer_splits(scale: int) -> None:
    qkv, attention, kv, batch = make_step(Case(((700, 1), (129, 1), (5, 1), (1200, 1)), rotary=0))
    ops, there = CudaOps(torch.float32, DEVICE), on_device(attention, DEVICE)
    step, mine = moved(batch, True), copied(kv, DEVICE)
    cut = Cut(None, 4, split_count(-(-1201 // scale)), None, 1, scale=scale)
    out = ops.attend(qkv.to(DEVICE), there, mine, replace(step, cuts={ops.kind(there): cut}), 0)
    close(out, REFERENCE.attend(qkv, attention, kv, batch, 0), 1e-4)


def test_whole_splits() -> None:
    for tokens in range(0, 40_000, BLOCK):
        count = whole_splits(tokens)
        assert split_end(count) <= tokens < split_end(count + 1)


def test_streams_with_the_same_blocks_are_found() -> None:
    """Two families, a stranger, and one whose own tokens end before the prefix does."""
    tables = np.arange(60 * 300, dtype=np.int32).reshape(60, 300)
    tables[3:40, :256] = tables[3, :256]
    tables[40:50, :100] = tables[40, :100]
    contexts = np.full(60, 4700)
    contexts[5] = 4100
    found = find_sharing(tables, contexts, members=16, most_tiles=8)
    assert found is not None
    families = [sorted(row[row >= 0]) for row in found.tiles]
    assert [stream for row in families[:3] for stream in row] == list(range(3, 40))
    assert families[3] == list(range(40, 50))
    assert split_end(int(found.splits[3])) == 4096 and split_end(int(found.splits[40])) == 1536
    assert (found.splits[[0, 1, 2, 55]] == 0).all()
    contexts[5] = 3000  # its last block is not full: it is no longer one that all of them have read
    shorter = find_sharing(tables, contexts, members=16, most_tiles=8)
    assert shorter is not None and split_end(int(shorter.splits[3])) <= 2999


def test_little_to_share_is_not_worth_it() -> None:
    tables = np.arange(60 * 64, dtype=np.int32).reshape(60, 64)
    contexts = np.full(60, 1000)
    assert find_sharing(tables, contexts, members=16, most_tiles=8) is None
    tables[:4, :40] = tables[0, :40]
    assert find_sharing(tables, contexts, members=16, most_tiles=8) is None
