"""The same share of work for every program: attention of single tokens gives what the specification gives."""

from __future__ import annotations

import pytest
import torch

from tests.ops.test_triton import DEVICE, ON_CARD, REFERENCE, close, copied, moved, on_device

pytest.importorskip("triton")

from tests.ops.cases import Case, make_step
from twostroke.ops.cuda.kernels.decode import DecodeScratch
from twostroke.ops.cuda.kernels.even_decode import even_attention
from twostroke.ops.cuda.kernels.rope import rotate_and_store

pytestmark = [pytest.mark.gpu] if ON_CARD else []
DTYPE = torch.bfloat16 if ON_CARD else torch.float32
LIMIT = 6e-3 if ON_CARD else 2e-5
STREAMS = ((300, 1), (15, 1), (16, 1), (0, 1), (700, 1), (130, 1))
CHANGES = [
    {},
    {"window": 100},
    {"window": 1},
    {"softcap": 3.0, "qk_norm": True},
    {"heads": 3, "kv_heads": 1, "head_dim": 80},
    {"sinks": (1.5, -2.0), "head_dim": 64},
]


@pytest.mark.parametrize("programs", [1, 5, 40, 300])
@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_streams(change: dict, programs: int) -> None:
    """Few programs serve several heads each, many share a head."""
    case = Case(STREAMS, format="bfloat16" if ON_CARD else "float32", **change)
    qkv, attention, kv, batch = make_step(case)
    qkv, mine, there = qkv.to(DTYPE).float(), copied(kv, DEVICE), on_device(attention, DEVICE)
    out = torch.empty(len(STREAMS), case.heads * case.head_dim, dtype=DTYPE, device=DEVICE)
    scratch = DecodeScratch(DEVICE)
    for _ in range(2):  # counters are set back
        even_attention(
            qkv.to(DEVICE, DTYPE), there, mine, moved(batch, True), 0, out, scratch, requests=len(STREAMS), listed=None,
            fused=True, programs=programs,
        )  # fmt: skip
    close(out.float(), REFERENCE.attend(qkv, attention, kv, batch, 0), LIMIT)
    block, offset = batch.groups[0].slots // 16, batch.groups[0].slots % 16
    for written, expected in ((mine.keys, kv.keys), (mine.values, kv.values)):
        close(written[block.to(DEVICE), :, offset.to(DEVICE)].float(), expected[block, :, offset].float(), LIMIT)


@pytest.mark.parametrize("programs", [4, 64])
def test_single_tokens_beside_prompts(programs: int) -> None:
    """They are listed, in any order, and padding stands behind them; other rows are left alone."""
    requests = ((0, 5), (260, 1), (90, 1), (33, 4), (513, 1))
    case = Case(requests, format="bfloat16" if ON_CARD else "float32", heads=8, kv_heads=2)
    qkv, attention, kv, batch = make_step(case)
    qkv, mine, there = qkv.to(DTYPE).float(), copied(kv, DEVICE), on_device(attention, DEVICE)
    step = moved(batch, False)
    contexts = torch.cat([step.contexts, step.contexts.new_zeros(1)])
    starts = torch.cat([step.starts, step.starts[-1:]])
    from twostroke.record import replace

    q, _ = rotate_and_store(qkv.to(DEVICE, DTYPE), there, mine, step, 0, keep_k=False, streams=False)
    listed = torch.tensor([4, 1, 2, 5, 5], dtype=torch.int32, device=DEVICE)
    out = torch.full((qkv.shape[0], case.heads * case.head_dim), 7.0, dtype=DTYPE, device=DEVICE)
    even_attention(
        q, there, mine, replace(step, contexts=contexts, starts=starts), 0, out, DecodeScratch(DEVICE), requests=5,
        listed=listed, fused=False, programs=programs,
    )  # fmt: skip
    expected = REFERENCE.attend(qkv, attention, kv, batch, 0)
    rows = batch.starts[:-1][torch.tensor([1, 2, 4])].long()
    close(out[rows.to(DEVICE)].float(), expected[rows], LIMIT)
    others = torch.ones(len(out), dtype=torch.bool)
    others[rows] = False
    assert bool((out[others.to(DEVICE)] == 7.0).all())
