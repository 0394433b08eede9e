"""Random batches for attention: requests at any stage, scattered and shared blocks, rubbish where nothing is stored."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from twostroke.model.arch import Rope
from twostroke.model.rope_table import rope_table
from twostroke.ops.interface import BLOCK, Attention, Batch, GroupBlocks, KVFormat, KVLayer, Norm
from twostroke.ops.reference.kv_codec import write_kv

WIDTHS = {"float32": 1, "float16": 1, "bfloat16": 1, "int8": 1, "int4": 2, "fp8": 1}
DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "int4": torch.uint8,
    "fp8": torch.float8_e4m3fn,
}


@dataclass(frozen=True)
class Case:
    """requests: (tokens already in the cache, new tokens)."""

    requests: tuple[tuple[int, int], ...]
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    window: int = 0
    softcap: float = 0.0
    rotary: int = -1  # rotated dimensions; -1: all of them, 0: none
    qk_norm: bool = False
    format: KVFormat = "float32"
    sinks: tuple[float, ...] = ()  # of the query heads, which take them in turn; (): there are none


MIXED = ((0, 37), (20, 13), (63, 1), (0, 1), (15, 1), (16, 17), (200, 3))
DECODE = ((5, 1), (130, 1), (127, 1), (128, 1), (300, 1), (0, 1))
CASES = {
    "mixed": Case(MIXED),
    "decode": Case(DECODE),
    "prefill": Case(((0, 150),)),
    "long chunk": Case(((250, 40),), heads=3, kv_heads=1),
    "multi-head": Case(MIXED, heads=3, kv_heads=3),
    "groups of 3": Case(MIXED, heads=9, kv_heads=3),
    "groups of 8": Case(MIXED, heads=16, kv_heads=2),
    "window": Case(MIXED, window=24),
    "window of one": Case(MIXED, window=1),
    "window of a tile": Case(DECODE, window=128),
    "window, decode": Case(DECODE, window=100),
    "softcap": Case(MIXED, softcap=3.0),
    "norms": Case(MIXED, qk_norm=True),
    "partial rotary": Case(MIXED, rotary=8, head_dim=20),
    "no positions": Case(MIXED, rotary=0),
    "head of 64": Case(MIXED, head_dim=64),
    "head of 80": Case(MIXED, head_dim=80),
    "head of 256": Case(((100, 1), (0, 40)), head_dim=256, heads=2, kv_heads=1),
    "float16": Case(MIXED, format="float16"),
    "bfloat16": Case(MIXED, format="bfloat16"),
    "int8": Case(MIXED, format="int8"),
    "int4": Case(MIXED, format="int4"),
    "int4 window": Case(MIXED, format="int4", window=24, heads=3, kv_heads=1),
}
BYTES = {  # for kernels that multiply bytes
    "int8 window": Case(MIXED, format="int8", window=24, heads=3, kv_heads=1),
    "int8 softcap": Case(MIXED, format="int8", softcap=3.0),
    "int8, head of 18": Case(MIXED, format="int8", head_dim=18, rotary=0),
    "int8, head of 64": Case(MIXED, format="int8", head_dim=64, heads=9, kv_heads=3),
    "int8, head of 80": Case(MIXED, format="int8", head_dim=80, qk_norm=True),
    "int8, head of 256": Case(((100, 1), (0, 40)), format="int8", head_dim=256, heads=2, kv_heads=1),
    "int8, long": Case(((700, 1), (3, 90), (511, 1)), format="int8", head_dim=64, heads=9, kv_heads=3, rotary=0),
    "int4, head of 80": Case(MIXED, format="int4", head_dim=80, heads=3, kv_heads=1),
    "int4, head of 18": Case(MIXED, format="int4", head_dim=18, rotary=0),
}


def make_attention(case: Case, generator: torch.Generator) -> Attention:
    rotary = case.head_dim if case.rotary < 0 else case.rotary
    rope = Rope(tuple(100.0 ** (-2 * i / rotary) for i in range(rotary // 2)), 1.1) if rotary else None

    sinks = torch.tensor([case.sinks[head % len(case.sinks)] for head in range(case.heads)]) if case.sinks else None

    def norm() -> Norm:
        return Norm(1 + 0.3 * torch.randn(case.head_dim, generator=generator), 1e-6)

    return Attention(
        case.heads,
        case.kv_heads,
        case.head_dim,
        scale=case.head_dim**-0.5,
        window=case.window,
        softcap=case.softcap,
        rope=rope_table(rope, 1024, torch.device("cpu")) if rope else None,
        query_norm=norm() if case.qk_norm else None,
        key_norm=norm() if case.qk_norm else None,
        sinks=sinks,
    )


def make_kv(case: Case, blocks: int) -> KVLayer:
    """A layer's share of a pool that holds rubbish, as a strided view."""
    shape = (blocks, 3, 2, case.kv_heads, BLOCK)
    data = torch.empty((*shape, case.head_dim // WIDTHS[case.format]), dtype=DTYPES[case.format])
    data.fill_(float("nan") if data.is_floating_point() else 77)
    if case.format not in ("int8", "int4", "fp8"):
        return KVLayer(case.format, data[:, 1, 0], data[:, 1, 1])
    scales = torch.full(shape, float("nan"))
    return KVLayer(case.format, data[:, 1, 0], data[:, 1, 1], scales[:, 1, 0], scales[:, 1, 1])


def make_step(case: Case, seed: int = 0) -> tuple[Tensor, Attention, KVLayer, Batch]:
    """qkv of the new tokens, and a cache that holds what came before."""
    generator = torch.Generator().manual_seed(seed)
    attention = make_attention(case, generator)
    columns = max(-(-(old + new) // BLOCK) for old, new in case.requests) + 2
    kv = make_kv(case, columns * len(case.requests))
    order = torch.randperm(columns * len(case.requests), generator=generator).to(torch.int32)
    tables = order.view(len(case.requests), columns)
    for table, (old, _) in zip(tables, case.requests, strict=True):
        before = torch.arange(old)
        k, v = (torch.randn(old, case.kv_heads, case.head_dim, generator=generator) for _ in "kv")
        write_kv(kv, slots_of(table, before), k, v)
    positions = [torch.arange(old, old + new) for old, new in case.requests]
    slots = [slots_of(table, where) for table, where in zip(tables, positions, strict=True)]
    counts = torch.tensor([new for _, new in case.requests])
    batch = Batch(
        tokens=torch.zeros(int(counts.sum()), dtype=torch.int64),
        positions=torch.cat(positions),
        starts=torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0))).to(torch.int32),
        contexts=torch.tensor([old + new for old, new in case.requests], dtype=torch.int32),
        groups=(GroupBlocks(torch.cat(slots), tables),),
        logit_rows=torch.arange(0),
    )
    width = (case.heads + 2 * case.kv_heads) * case.head_dim
    qkv = torch.randn(len(batch.tokens), width, generator=generator)
    return qkv, attention, kv, batch


def slots_of(table: Tensor, positions: Tensor) -> Tensor:
    return table[positions // BLOCK].long() * BLOCK + positions % BLOCK


def alone(batch: Batch, request: int) -> tuple[slice, Batch]:
    """One request of a batch, by itself: its rows and its batch."""
    rows = slice(int(batch.starts[request]), int(batch.starts[request + 1]))
    group = batch.groups[0]
    return rows, Batch(
        batch.tokens[rows],
        batch.positions[rows],
        torch.tensor([0, rows.stop - rows.start], dtype=torch.int32),
        batch.contexts[request : request + 1],
        (GroupBlocks(group.slots[rows], group.tables[request : request + 1]),),
        batch.logit_rows,
    )


def part_of(batch: Batch, first: int, size: int, before: int) -> tuple[slice, Batch]:
    """`size` tokens of a batch with one request, from `first` on: their rows and their batch. before: tokens that were
    in the cache before the whole batch."""
    rows = slice(first, first + size)
    group = batch.groups[0]
    return rows, Batch(
        batch.tokens[rows],
        batch.positions[rows],
        torch.tensor([0, size], dtype=torch.int32),
        torch.tensor([before + first + size], dtype=torch.int32),
        (GroupBlocks(group.slots[rows], group.tables),),
        batch.logit_rows,
    )


def copied(kv: KVLayer) -> KVLayer:
    scales = (None if s is None else s.clone() for s in (kv.key_scales, kv.value_scales))
    return KVLayer(kv.format, kv.keys.clone(), kv.values.clone(), *scales)
