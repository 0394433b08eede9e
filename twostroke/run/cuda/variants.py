"""The variants of the attention kernels that steps of a model can meet, each as a small step over padding.

Kernels are compiled for each way in which a step is divided (ops/cuda/cuts.py): how many streams there are,
how long their contexts may be, whether prompts are read beside them. There are few such ways, so a server compiles all
of them before its first request, and no stream waits for a compiler.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from twostroke.ops.cuda.backend import FEW_STREAMS, CudaOps
from twostroke.ops.cuda.cuts import FEW_QUERIES, AttentionKind, Cascade, Cut, DeviceBatch
from twostroke.ops.cuda.kernels.decode import DecodeForm, form_of, longer, split_count
from twostroke.ops.cuda.kernels.dense import gather, merge
from twostroke.ops.cuda.kernels.even_decode import ROWS, rows_bucket
from twostroke.ops.cuda.kernels.rope import rotate_and_store
from twostroke.ops.interface import BLOCK, KV_SCALE_BYTES, Attention, GroupBlocks, KVLayer, LatentAttention
from twostroke.run.cuda.buckets import BATCHES, stream_rows

if TYPE_CHECKING:
    from collections.abc import Callable

SHORT_SPLITS, LONG = 8, 40  # splits of a short and of a long context
LONG_COLUMNS = 128  # block columns of a context that is not short for draft_decode.py


class Case(NamedTuple):
    """How a step's attention is divided."""

    rows: int  # requests with one new token
    splits: int
    scale: int = 1
    streams: bool = False
    members: int = 0  # of a tile of streams that share a prefix
    tile_splits: int = 0  # programs that share a tile of queries; 0: there are no tiles
    queries: int = 0  # the most of a tile, where they are few
    columns: int = 16  # of the block tables


def cases_of(
    kind: AttentionKind, requests: int, length: int, *, grouped: bool, shares: bool, drafts: bool
) -> list[Case]:
    """requests and length: the most of a step. grouped: the kernels of grouped attention, which choose by the number of
    streams; those of exact and of latent attention do not. shares: streams may share a prefix. drafts: there is a
    kernel for drafts with short contexts."""
    mixed = [Case(4, splits) for splits in ((SHORT_SPLITS, LONG) if grouped else (LONG,))]
    mixed += [Case(min(rows, requests), SHORT_SPLITS) for rows in ROWS if grouped and rows < 2 * requests]
    tiles = [Case(0, 1, tile_splits=splits) for splits in (1, 2)]
    if not grouped:
        return [*(Case(rows, LONG, streams=True) for rows in (1, FEW_STREAMS + 1)), *mixed, *tiles]
    if kind.queries >= FEW_QUERIES:
        tiles += [case._replace(queries=FEW_QUERIES, columns=LONG_COLUMNS if drafts else 16) for case in tiles]
        tiles += [Case(0, 1, tile_splits=1, queries=FEW_QUERIES)] if drafts else []
    found: dict[tuple[DecodeForm, int], Case] = {}  # each form of decode.py, and each kernel of even_decode.py
    for rows in BATCHES:
        if rows > stream_rows(requests):
            break
        scale, columns = longer(rows * kind.kv_heads), 16
        while columns <= max(16, -(-length // BLOCK)):
            splits = split_count(-(-columns * BLOCK // scale))
            form = form_of(rows * kind.kv_heads, splits, scale)
            found.setdefault((form, rows_bucket(rows)), Case(rows, splits, scale, streams=True))
            columns *= 2
    shared = [Case(4, splits, streams=True, members=kind.members) for splits in (SHORT_SPLITS, LONG)]
    return [*found.values(), *mixed, *tiles, *(shared if shares and kind.members else [])]


def batch_of(case: Case, ops: CudaOps, kind: AttentionKind, group: int) -> DeviceBatch:
    """Requests without a context: kernels run, and neither read nor write the cache."""

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=ops.device)

    rows = max(1, case.rows)
    cascade = Cascade(zeros(1, case.members) - 1, zeros(rows + 1)) if case.members else None
    listed = None if case.streams else zeros(case.rows)
    tiles = zeros(1, 2) if case.tile_splits else None
    cut = Cut(listed, case.rows, case.splits, tiles, max(1, case.tile_splits), cascade=cascade,
              scale=case.scale, queries=case.queries)  # fmt: skip
    starts = torch.arange(rows + 1, dtype=torch.int32, device=ops.device)
    none, blocks = np.zeros(rows, np.int64), GroupBlocks(zeros(rows) - 1, zeros(rows, case.columns))
    return DeviceBatch(
        zeros(rows), zeros(rows), starts, zeros(rows), (blocks,) * (group + 1), zeros(rows), none, none,
        streams=case.streams, splits=case.splits, cuts={kind: cut},
    )  # fmt: skip


def attention_variants(
    ops: CudaOps, attention: Attention | LatentAttention, kv: KVLayer, group: int, requests: int, length: int
) -> list[Callable[[], object]]:
    kind = ops.kind(attention)
    grouped = isinstance(attention, Attention) and not ops.one_order
    shares = ops.shares_steps and kv.format not in KV_SCALE_BYTES
    drafts = isinstance(attention, Attention) and not attention.window and kv.key_scales is None
    cases = cases_of(kind, requests, length, grouped=grouped, shares=shares, drafts=drafts)
    tasks: list[Callable[[], object]] = [partial(run_case, case, ops, attention, kv, group) for case in cases]
    if isinstance(attention, Attention) and kind.dense:
        tasks.append(partial(run_long, ops, attention, kv, group))
    return tasks


def run_long(ops: CudaOps, attention: Attention, kv: KVLayer, group: int) -> None:
    """What stands around the vendor's attention: K and V of the new tokens are kept, those before them are gathered,
    and results are merged."""
    case = Case(0, 1, tile_splits=1)
    qkv = torch.zeros(
        16, (attention.heads + 2 * attention.kv_heads) * attention.head_dim, dtype=ops.dtype, device=ops.device
    )
    batch = batch_of(case._replace(rows=16), ops, ops.kind(attention), group)
    rotate_and_store(qkv, attention, kv, batch, group, keep_k=True)
    gather(kv, batch.groups[group].tables[0], 16, attention, ops.dtype)
    part = torch.zeros(16, attention.heads, attention.head_dim, dtype=ops.dtype, device=ops.device)
    sums = torch.zeros(attention.heads, 16, device=ops.device)
    merge(part, part, (sums, sums), torch.empty_like(part), torch.empty_like(sums), attention)
    merge(part, part, (sums, sums), torch.empty_like(part).flatten(1), torch.empty_like(sums), attention)


def run_case(
    case: Case, ops: CudaOps, attention: Attention | LatentAttention, kv: KVLayer, group: int
) -> torch.Tensor:  # fmt: skip
    batch, rows = batch_of(case, ops, ops.kind(attention), group), max(1, case.rows)
    if isinstance(attention, LatentAttention):
        width = attention.heads * (attention.plain_dim + attention.rope_dim)
        q = torch.zeros(rows, width, dtype=ops.dtype, device=ops.device)
        return ops.attend_latent(
            q, q.new_zeros(rows, attention.latent + attention.rope_dim), attention, kv, batch, group
        )
    width = (attention.heads + 2 * attention.kv_heads) * attention.head_dim
    return ops.attend(torch.zeros(rows, width, dtype=ops.dtype, device=ops.device), attention, kv, batch, group)
